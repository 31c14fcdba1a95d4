"""ART-E's dataset ``corbt/enron-emails``, from the hub or a local folder, read by ``datasets``."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from emailrl.errors import EmailRLError, UsageError
from emailrl.store.parties import clean_text
from emailrl.store.sources.message import RawEmail, Skipped, made_up_id

DATASET = "corbt/enron-emails"
COLUMNS = ("message_id", "subject", "from", "to", "cc", "bcc", "date", "body", "file_name")
_ALTERNATIVES = (
    "Use --source demo, or --source PATH with a local copy (maildir tree, tar archive, emails.csv or dataset folder)."
)


def is_dataset_folder(path: Path) -> bool:
    """Whether a folder holds a dataset: saved by ``save_to_disk``, or Parquet / JSONL files as the hub stores them."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return True
    return any(next(path.glob(pattern), None) for pattern in ("*.parquet", "data/*.parquet", "*.jsonl", "data/*.jsonl"))


def read_hub() -> Iterator[RawEmail | Skipped]:
    """The mails of ``corbt/enron-emails``, downloaded once into the cache of ``datasets``.

    Raises ``EmailRLError`` with the alternatives where the hub cannot be reached and the cache lacks it.
    """
    go_offline_if_unreachable()
    from datasets import load_dataset

    try:
        dataset = load_dataset(DATASET, split="train")
    except Exception as error:  # datasets and the HTTP stack below it raise many kinds; all mean that there is no data
        reason = " ".join(str(error).split())[:200]
        raise EmailRLError(f"The dataset {DATASET} cannot be loaded: {reason}.", _ALTERNATIVES) from error
    yield from _rows([dataset])


def read_dataset_folder(path: Path) -> Iterator[RawEmail | Skipped]:
    """The mails of a local dataset folder with ART-E's columns, all its splits.

    Raises ``UsageError`` where it cannot be loaded or lacks a column.
    """
    from datasets import Dataset, load_dataset, load_from_disk

    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    try:
        loaded = load_from_disk(str(path)) if saved else load_dataset(str(path))
    except Exception as error:  # as in read_hub
        raise UsageError(f"{path} cannot be loaded as a dataset: {' '.join(str(error).split())[:200]}.") from error
    splits = [loaded] if isinstance(loaded, Dataset) else list(loaded.values())
    for split in splits:
        if missing := [name for name in COLUMNS if name not in split.column_names]:
            raise UsageError(f"The dataset in {path} has no column {missing[0]!r}.", f"It needs {', '.join(COLUMNS)}.")
    yield from _rows(splits)


def go_offline_if_unreachable() -> None:
    """Tell the hub's library that there is no network where there is none: it would retry for half a minute."""
    if any(os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=5).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _rows(splits: list[Any]) -> Iterator[RawEmail | Skipped]:
    for split in splits:
        for batch in split.select_columns(list(COLUMNS)).iter(batch_size=1000):
            for values in zip(*(batch[name] for name in COLUMNS), strict=True):
                yield row_to_email(dict(zip(COLUMNS, values, strict=True)))


def row_to_email(row: Mapping[str, Any]) -> RawEmail | Skipped:
    """One row with ART-E's columns as a mail; ``Skipped("bad_row")`` where a value has the wrong type."""
    name = clean_text(str(row["file_name"] or ""))
    try:
        to, cc, bcc = (_bare_list(row[kind]) for kind in ("to", "cc", "bcc"))
        date, defects = _utc(row["date"]), []
        if date is None:
            defects.append("no_date")
        text = {key: clean_text(row[key] or "") for key in ("message_id", "subject", "from", "body")}
    except (AttributeError, TypeError, ValueError):
        return Skipped("bad_row", name)
    if not text["message_id"]:
        text["message_id"] = made_up_id(repr(sorted(row.items())).encode())
        defects.append("no_message_id")
    return RawEmail(
        text["message_id"], text["subject"], _bare(text["from"]), to, cc, bcc, date, text["body"], name,
        tuple(defects),
    )  # fmt: skip


def _bare(address: str) -> str:
    return "".join(clean_text(address).lower().split())


def _bare_list(addresses: Sequence[str] | None) -> list[str]:
    if isinstance(addresses, str):
        raise TypeError("one text in place of a list of addresses")
    return [_bare(address) for address in addresses or () if address]


def _utc(value: datetime | str | None) -> datetime | None:
    """A timestamp in UTC; without a zone it already is."""
    if value is None or value == "":
        return None
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
