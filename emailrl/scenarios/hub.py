"""ART-E's questions through ``datasets``: from the hub, or from a local folder of the same features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emailrl.errors import EmailRLError, UsageError
from emailrl.scenarios.rows import ART_E, Fields, parse_row
from emailrl.store.sources.hub import go_offline_if_unreachable, told
from emailrl.trajectory import Scenario

HUB_QUESTIONS = "corbt/enron_emails_sample_questions"
SPLIT_NAMES = {"train": "train", "validation": "val", "val": "val", "test": "test"}


def read_dataset(name: str, fields: Fields = ART_E) -> Iterator[Scenario]:
    """The questions of every split of a hub dataset, or of a local folder that ``datasets`` wrote or can load.

    Raises EmailRLError with the alternatives where the hub cannot be reached, UsageError for a folder that is no
    dataset and for rows that are no questions.
    """
    names = {fields.train_split: fields.train_split} | SPLIT_NAMES
    for split_name, rows in _load(name).items():
        for number, row in enumerate(rows):
            where = f"{name}[{split_name}][{number}]"
            if split_name not in names:
                raise UsageError(f"{where}: a question set has the splits train, val(idation) and test.")
            yield parse_row({**row, "split": names[split_name]}, where, fields)


def _load(name: str) -> Any:
    local = Path(name).is_dir()
    if not local:
        go_offline_if_unreachable()
    import datasets

    try:
        if local and any((Path(name) / marker).exists() for marker in ("dataset_dict.json", "dataset_info.json")):
            loaded = datasets.load_from_disk(name)
            return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        return datasets.load_dataset(name)
    except Exception as error:  # datasets passes on whatever its readers and its HTTP client raise
        if local:
            raise UsageError(f"{name} is not a folder of questions that datasets can load: {told(error)}.") from error
        raise EmailRLError(
            f"Cannot load the questions {name} from the hub: {told(error)}.",
            "Name a local file with --questions FILE, or make one with `emailrl gen-questions` "
            "or `emailrl gen-db --source demo`.",
        ) from error
