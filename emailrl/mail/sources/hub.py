"""Reads ART-E's dataset ``corbt/enron-emails`` from the hub or a local folder with ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emailrl.errors import EmailRLError, UsageError
from emailrl.mail.sources.raw_email import RawEmail, Skipped
from emailrl.mail.sources.rows import COLUMNS, row_to_email
from emailrl.remote.hub import go_offline_if_unreachable

DATASET = "corbt/enron-emails"
_ALTERNATIVES = (
    "Use --source demo --db data/demo.db, or --source PATH with a local copy "
    "(maildir tree, tar archive, mbox, emails.csv, JSONL, Parquet or dataset folder)."
)


def is_dataset_folder(path: Path) -> bool:
    """Whether ``save_to_disk`` wrote a folder; other folders of Parquet and JSONL files are read file by file."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def read_hub() -> Iterator[RawEmail | Skipped]:
    """Yield the emails of ``corbt/enron-emails``, downloaded once into the cache of ``datasets``.

    Raises ``EmailRLError`` if the hub cannot be reached and the dataset is not cached, ``UsageError`` if a folder of
    that name would be read in its place.
    """
    if Path(DATASET).exists():
        raise UsageError(
            f"A local folder {DATASET} would be read instead of the hub's dataset.", "Run in another folder."
        )
    go_offline_if_unreachable()
    from datasets import load_dataset

    try:
        dataset = load_dataset(DATASET, split="train")
    except Exception as error:  # datasets and its HTTP stack raise many kinds; all mean that there is no data
        raise EmailRLError(f"The dataset {DATASET} could not be loaded: {describe(error)}.", _ALTERNATIVES) from error
    yield from _rows([dataset])


def read_dataset_folder(path: Path) -> Iterator[RawEmail | Skipped]:
    """Yield the emails of all splits of a dataset with ART-E's columns, as written by ``save_to_disk``.

    Raises ``UsageError`` if it cannot be loaded or lacks a column.
    """
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:  # as in read_hub
        raise UsageError(f"{path} cannot be loaded as a dataset: {describe(error)}.") from error
    splits = [loaded] if isinstance(loaded, Dataset) else list(loaded.values())
    for split in splits:
        if missing := [name for name in COLUMNS if name not in split.column_names]:
            raise UsageError(f"The dataset in {path} has no column {missing[0]!r}.", f"It needs {', '.join(COLUMNS)}.")
    yield from _rows(splits)


def describe(error: Exception) -> str:
    """Return why ``datasets`` loaded nothing, in at most 200 characters and without a final period."""
    if isinstance(error, ConnectionError):  # its text ends with a class name
        return "the hub cannot be reached"
    return (" ".join(str(error).split())[:200] or type(error).__name__).rstrip(".")


def _rows(splits: list[Any]) -> Iterator[RawEmail | Skipped]:
    for split in splits:
        for batch in split.select_columns(list(COLUMNS)).iter(batch_size=1000):
            for values in zip(*(batch[name] for name in COLUMNS), strict=True):
                yield row_to_email(dict(zip(COLUMNS, values, strict=True)))
