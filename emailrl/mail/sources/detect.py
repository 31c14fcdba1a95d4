"""Detects a source's reader by content, never by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from emailrl.errors import UsageError
from emailrl.mail.sources.files import START_BYTES, open_file
from emailrl.mail.sources.folder import FolderShare, read_folder
from emailrl.mail.sources.hub import is_dataset_folder, read_dataset_folder, read_hub
from emailrl.mail.sources.message import begins_mail
from emailrl.mail.sources.parallel import CMU_NAME, Item, default_workers, parse_all
from emailrl.mail.sources.raw_email import RawEmail, Reading, Skipped
from emailrl.mail.sources.streams import start_of

_KINDS = (
    "Supported: an email (.eml), a folder tree of emails, a tar / tar.gz / tar.xz of one, an mbox, an emails.csv "
    "(columns file, message), JSONL or Parquet with the columns message_id, subject, from, to, cc, bcc, date, body and "
    "file_name, a folder of these, and a saved dataset."
)

_OUTLOOK = {
    b"!BDN": (
        "an Outlook data file (.pst or .ost)",
        "Convert it (readpst -o mail FILE, from the package pst-utils), and pass the folder mail to --source.",
    ),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": (
        "an Outlook message (.msg) or another file of Microsoft Office",
        "Convert messages (msgconvert *.msg, from the package libemail-outlook-message-perl), and pass the .eml files.",
    ),
}
"""What a file with this start is, and how to convert it."""

T = TypeVar("T")


@dataclass
class Source:
    """An opened source of mail."""

    items: Iterator[Item]
    fraction: Callable[[], float | None] = lambda: None
    """Fraction read, 0 to 1; None if unknown."""
    reading: Reading = field(default_factory=Reading)

    def __iter__(self) -> Iterator[RawEmail | Skipped]:
        """Yield every message, parsed in this process."""
        return self.read(_unchanged, 0)

    def is_enron(self) -> bool:
        """Whether one of the first files is named as in CMU's Enron release; they are still read."""
        first = list(islice(self.items, 5))
        self.items = chain(first, self.items)
        return any(isinstance(item, tuple) and CMU_NAME.search(item[0]) for item in first)

    def read(self, judge: Callable[[RawEmail | Skipped], T], workers: int | None = None) -> Iterator[T]:
        """Yield the result of ``judge`` for every message, in order.

        Parsing and ``judge`` run in ``workers`` other processes; None chooses a number for the machine, 0 uses this
        process.
        """
        workers = default_workers() if workers is None else workers
        return parse_all(self.items, judge, workers, self.reading.max_message_bytes)


def _unchanged(email: RawEmail | Skipped) -> RawEmail | Skipped:
    return email


def open_source(
    source: str | Path,
    *,
    allow_truncated: bool = False,
    max_message_bytes: int = Reading.max_message_bytes,
) -> Source:
    """Open ``hf`` (the hub's dataset) or a path of any known kind.

    Raises ``UsageError`` if the path does not exist, cannot be read or is of no known kind. Reading the source raises
    ``EmailRLError`` if it is truncated, unless ``allow_truncated``, or if the hub's dataset is unavailable.
    """
    if not str(source).strip():  # an empty path would mean the current folder
        raise UsageError("The source is empty.", "Name hf, demo or a path with --source.")
    reading = Reading(allow_truncated, max_message_bytes)
    if source == "hf":
        return Source(read_hub(), reading=reading)
    path = Path(os.path.expanduser(source))
    try:
        if path.is_dir():
            return _open_folder(path, reading)
        if path.is_file():
            return _open_file(path, reading)
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    if exists:
        raise UsageError(f"{path} is neither a file nor a folder.", _KINDS)
    raise UsageError(f"No such file or folder: {path}.", "Name an existing one, or use --source demo or hf.")


def _open_folder(path: Path, reading: Reading) -> Source:
    if is_dataset_folder(path):
        return Source(read_dataset_folder(path), reading=reading)
    if next(path.iterdir(), None) is None:
        raise UsageError(f"The folder {path} is empty.", _KINDS)
    share = FolderShare(path)
    return Source(read_folder(path, reading, share), share, reading)


def _open_file(path: Path, reading: Reading) -> Source:
    size = path.stat().st_size
    if size == 0:
        raise UsageError(f"{path} is empty.", _KINDS)
    opened = open_file(path, path.name, reading)
    if opened is None:
        with path.open("rb") as single:
            if begins_mail(single.read(START_BYTES)):
                return Source(iter([(path.name, path)]), reading=reading)
        raise _no_source(path)
    file = opened.file

    def fraction() -> float | None:
        if file.closed:
            return 1.0
        return min(file.tell() / size, 1.0) or None  # pyarrow opens the Parquet file itself

    return Source(opened.items, fraction, reading)


def _no_source(path: Path) -> UsageError:
    start = start_of(path, START_BYTES)
    if not start:
        return UsageError(f"{path} is truncated or damaged before its first message.", "Download the file again.")
    if not start.strip(b"\0"):
        return UsageError(f"The archive {path} is empty.", _KINDS)
    if start.startswith(b"PK\3\4"):
        return UsageError(f"{path} is a zip archive.", "Unpack it, and pass its contents to --source.")
    for signature, (kind, remedy) in _OUTLOOK.items():
        if start.startswith(signature):
            return UsageError(f"{path} is {kind}.", remedy)
    return UsageError(f"{path} is not a mail archive.", _KINDS)
