"""Opens a source with the reader that its content calls for, never its name: a folder tree, or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, NamedTuple, TypeVar

from emailrl.base.errors import UsageError
from emailrl.mail.sources.archive import BLOCK, is_tar_header, read_archive
from emailrl.mail.sources.mbox import MBOX_STARTS, is_mbox, read_mbox
from emailrl.mail.sources.message import begins_mail
from emailrl.mail.sources.parallel import CMU_NAME, Item, default_workers, parse_all
from emailrl.mail.sources.raw_email import RawEmail, Reading, Skipped
from emailrl.mail.sources.rows import (
    PARQUET_START,
    is_dataset_folder,
    is_mail_line,
    is_mail_parquet,
    is_mail_table,
    read_dataset_folder,
    read_hub,
    read_lines,
    read_parquet,
    read_table,
)
from emailrl.mail.sources.streams import BROKEN, COMPRESSED, decompressed, start_of

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
START_BYTES = 4096
_HEADER = re.compile(rb"[A-Za-z][A-Za-z0-9-]*:")


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


class FolderShare:
    """The fraction of a folder tree that has been read, in files; they are counted on the first call."""

    def __init__(self, root: Path) -> None:
        self.read = 0
        self._root = root
        self._all: int | None = None

    def __call__(self) -> float:
        """Return the fraction, 0 to 1."""
        if self._all is None:
            self._all = sum(len(files) for _, _, files in os.walk(self._root))
        return min(self.read / max(self._all, 1), 1.0)


def read_folder(root: Path, reading: Reading, share: FolderShare) -> Iterator[Item]:
    """Yield the messages under ``root`` in a fixed order of files, named by their path below it.

    A file of many messages yields all of them; any other file counts as one message. Links and devices are not
    followed.
    """
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            yield Skipped("unreadable", os.path.relpath(folder, root))
            continue
        for entry in listed:
            share.read += not entry.is_dir(follow_symlinks=False)
            if entry.is_file(follow_symlinks=False):
                yield from _read_file(entry.path, os.path.relpath(entry.path, root), reading)
            elif not entry.is_dir(follow_symlinks=False):
                yield Skipped("not_a_file", os.path.relpath(entry.path, root))
        folders += [Path(entry.path) for entry in reversed(listed) if entry.is_dir(follow_symlinks=False)]


def _read_file(path: str, name: str, reading: Reading) -> Iterator[Item]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            start = os.read(descriptor, BLOCK)
        finally:
            os.close(descriptor)
        opened = open_file(Path(path), name, reading) if may_hold_many(start) else None
    except OSError:
        yield Skipped("unreadable", name)
        return
    if opened is None:
        yield name, Path(path)
    elif opened.kind in ("archive", "table"):
        yield from under(name, opened.items)
    else:
        yield from opened.items


class MailFile(NamedTuple):
    """An opened file of many messages."""

    kind: str
    items: Iterator[Item]
    file: IO[bytes]
    """The open file; its position is how far reading has got."""


def may_hold_many(start: bytes) -> bool:
    """Whether a file may hold many messages, judged quickly by its start (at least 512 bytes)."""
    if is_tar_header(start[:BLOCK]):
        return True
    if _HEADER.match(start):
        return False
    starts = (*COMPRESSED, PARQUET_START, *MBOX_STARTS, b"{", b"\xef\xbb\xbf{")
    return start.startswith(starts) or is_mail_table(start)


def open_file(path: Path, name: str, reading: Reading) -> MailFile | None:
    """Open a file of many messages; returns None if it is of no known kind.

    Messages without a name of their own are named after ``name``. Raises ``OSError`` if the file cannot be opened.
    """
    start = start_of(path, START_BYTES)
    kind = _kind(path, start, reading)
    if kind is None:
        return None
    file = path.open("rb")
    items: Iterator[Item]
    if kind == "archive":
        items = read_archive(path, file, reading)
    elif kind == "mbox":
        items = read_mbox(path, file, name, reading)
    elif kind == "table":
        items = read_table(path, decompressed(file), reading)
    elif kind == "JSONL file":
        items = read_lines(path, decompressed(file), name, reading)
    else:
        items = read_parquet(path, name, reading)
    return MailFile(kind, _closing(file, items), file)


def _kind(path: Path, start: bytes, reading: Reading) -> str | None:
    if is_tar_header(start[:BLOCK]):
        return "archive"
    if start.startswith(PARQUET_START):
        return "Parquet file" if is_mail_parquet(path) else None
    if is_mbox(start):
        return "mbox"
    if is_mail_table(start):
        return "table"
    if start.startswith((b"{", b"\xef\xbb\xbf{")) and is_mail_line(_first_line(path, reading.max_message_bytes)):
        return "JSONL file"
    return None


def _first_line(path: Path, largest: int) -> bytes:
    with path.open("rb") as file:
        try:
            return decompressed(file).readline(largest)
        except BROKEN:
            return b""


def _closing(file: IO[bytes], items: Iterator[Item]) -> Iterator[Item]:
    with closing(file):
        yield from items


def under(name: str, items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items of an archive or a table in a folder, with names below that of the file."""
    for item in items:
        if isinstance(item, Skipped):
            yield Skipped(item.reason, f"{name}/{item.file_name}" if item.file_name else name)
        else:
            yield (f"{name}/{item[0]}", item[1]) if isinstance(item, tuple) else item
