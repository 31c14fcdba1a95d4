"""Reads ART-E's questions with ``datasets``, from the hub or a local folder with the same features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emailrl.errors import EmailRLError, UsageError
from emailrl.questions.rows import ART_E, Fields, parse_row
from emailrl.remote.hub import go_offline_if_unreachable
from emailrl.store.sources.hub import describe
from emailrl.trajectory import Scenario

HUB_QUESTIONS = "corbt/enron_emails_sample_questions"
READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""The reader in ``datasets`` for each file type that a folder of questions may contain."""
CODE = frozenset({".py", ".pkl", ".pickle"})
SPLIT_NAMES = {"train": "train", "validation": "val", "val": "val", "test": "test"}


def read_dataset(name: str, fields: Fields = ART_E) -> Iterator[Scenario]:
    """Yield the questions of all splits of a hub dataset, or of a local folder that ``datasets`` wrote or can load.

    Raises EmailRLError with alternatives if the hub cannot be reached, UsageError for a folder that is not a dataset
    and for invalid rows.
    """
    names = {fields.train_split: fields.train_split} | SPLIT_NAMES
    for split_name, rows in _load(name).items():
        for number, row in enumerate(rows):
            where = f"{name}[{split_name}][{number}]"
            if split_name not in names:
                raise UsageError(f"{where}: a question set has the splits train, val(idation) and test.")
            yield parse_row({**row, "split": names[split_name]}, where, fields)


def download() -> None:
    """Download ART-E's questions into the hub's cache if missing; raises EmailRLError if that fails."""
    _load(HUB_QUESTIONS)


def _load(name: str) -> Any:
    if Path(name).is_dir():
        return _load_folder(Path(name).absolute())
    go_offline_if_unreachable()
    import datasets

    try:
        return datasets.load_dataset(name)
    except Exception as error:  # datasets propagates any error of its readers and HTTP client
        raise EmailRLError(
            f"The questions {name} could not be loaded from the hub: {describe(error)}.",
            "Name a local file or folder with --questions FILE, or generate one: emailrl gen-questions. "
            "HF_HUB_OFFLINE=0 waits for a slow network.",
        ) from error


def _load_folder(folder: Path) -> Any:
    """The splits of a folder; only pure data formats, as others (``pandas``) would execute code in a file."""
    import datasets

    try:
        if any((folder / marker).exists() for marker in ("dataset_dict.json", "dataset_info.json")):
            loaded = datasets.load_from_disk(str(folder))
            return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}
        reader, files = _data_files(folder)
        # The reader is named and the files are given: `load_dataset(folder)` would let the folder choose both.
        return datasets.load_dataset(reader, data_files=files)
    except EmailRLError:
        raise
    except Exception as error:  # as in _load
        raise UsageError(f"{folder} is not a folder of questions that datasets can load: {describe(error)}.") from error


def _data_files(folder: Path) -> tuple[str, dict[str, list[str]]]:
    """The reader of a folder's files, and the files of each split by their names."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    suffixes = {Path(file).suffix.lower() for files in found.values() for file in files}
    suffixes |= CODE & {file.suffix.lower() for file in folder.iterdir()}
    readers = {READERS[suffix] for suffix in suffixes if suffix in READERS}
    if len(readers) != 1 or suffixes & CODE:
        raise UsageError(
            f"{folder} is not a folder of questions: it contains {', '.join(sorted(suffixes)) or 'no'} files.",
            "Use JSON, JSONL, CSV, Parquet or Arrow files, all of one kind, and no code or pickles.",
        )
    kept = {split: [file for file in files if Path(file).suffix.lower() in READERS] for split, files in found.items()}
    return readers.pop(), {str(split): files for split, files in kept.items() if files}
