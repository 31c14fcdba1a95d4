"""Opens a source with the reader that its content calls for, never its name, and parses it in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import IO, TypeVar

from emailrl.base.errors import UsageError
from emailrl.base.workers import in_order, worker_processes
from emailrl.mail.schema import clean_text
from emailrl.mail.sources.archive import BLOCK, is_tar_header, read_archive
from emailrl.mail.sources.mbox import MBOX_STARTS, is_mbox, read_mbox
from emailrl.mail.sources.message import begins_mail, parse_message
from emailrl.mail.sources.reading import BROKEN, COMPRESSED, RawEmail, Reading, Skipped, decompressed, start_of
from emailrl.mail.sources.rows import (
    PARQUET_START,
    JsonLine,
    TableMail,
    is_dataset_folder,
    is_mail_line,
    is_mail_parquet,
    is_mail_table,
    parse_line,
    read_dataset_folder,
    read_hub,
    read_lines,
    read_parquet,
    read_table,
)

Unread = tuple[str, bytes | Path]
"""A message not yet parsed: its name in the source, and its bytes or the file that holds them.

The bytes are a ``JsonLine`` for a row of JSONL and a ``TableMail`` for a row of Kaggle's table.
"""

Item = Unread | RawEmail | Skipped

T = TypeVar("T")

_CMU_NAME = re.compile(r"(?:^|/)\d+\.$")
"""File names such as ``allen-p/inbox/1.``, which are specific to CMU's Enron release."""
_MAX_WORKERS = 4
_BATCH_BYTES = 1 << 20
_BATCH_ITEMS = 512
_ASSUMED_FILE_BYTES = 4096
_START_BYTES = 4096
_HEADER = re.compile(rb"[A-Za-z][A-Za-z0-9-]*:")
_JSON_STARTS = (b"{", b"\xef\xbb\xbf{")
_MANY_STARTS = (*COMPRESSED, PARQUET_START, *MBOX_STARTS, *_JSON_STARTS)

_KINDS = (
    "Supported: an email (.eml), a folder tree of emails, a tar / tar.gz / tar.xz of one, an mbox, an emails.csv "
    "(columns file, message), JSONL or Parquet with the columns message_id, subject, from, to, cc, bcc, date, body and "
    "file_name, a folder of these, and a saved dataset."
)

_CONVERTIBLE = {
    b"PK\3\4": ("a zip archive", "Unpack it, and pass its contents to --source."),
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


@dataclass
class Source:
    """An opened source of mail."""

    items: Iterator[Item]
    fraction: Callable[[], float | None] = lambda: None
    """Fraction read, 0 to 1; None if unknown."""
    reading: Reading = field(default_factory=Reading)

    def __iter__(self) -> Iterator[RawEmail | Skipped]:
        """Yield every message, parsed in this process."""
        return self.read(lambda email: email, 0)

    def is_enron(self) -> bool:
        """Whether one of the first files is named as in CMU's Enron release; they are still read."""
        first = list(islice(self.items, 5))
        self.items = chain(first, self.items)
        return any(isinstance(item, tuple) and _CMU_NAME.search(item[0]) for item in first)

    def read(self, judge: Callable[[RawEmail | Skipped], T], workers: int | None = None) -> Iterator[T]:
        """Yield the result of ``judge`` for every message, in order.

        Parsing and ``judge`` run in ``workers`` other processes; None chooses one per usable core, as far as one
        reading process can feed them; 0 uses this process. Only a few batches per worker are in flight at any time, so
        memory does not grow with the source.
        """
        if workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            workers = min(cores, _MAX_WORKERS) if cores > 1 else 0
        batches = _batches(self.items)
        first = list(islice(batches, 2))
        calls = ((batch, judge, self.reading.max_message_bytes) for batch in chain(first, batches))
        if workers < 1 or len(first) < 2:
            for call in calls:
                yield from _parse_batch(*call)
            return
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        with worker_processes(workers, hint="Try --workers 0.", method=method) as submit:
            for judged in in_order(submit, _parse_batch, calls, ahead=2 * workers + 1):
                yield from judged


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
    total = cache(lambda: sum(len(files) for _, _, files in os.walk(path)))
    seen = Counter[str]()
    items = _folder_items(path, reading, seen)
    return Source(items, lambda: min(seen["files"] / max(total(), 1), 1.0), reading)


def _open_file(path: Path, reading: Reading) -> Source:
    size = path.stat().st_size
    if size == 0:
        raise UsageError(f"{path} is empty.", _KINDS)
    opened = _open_many(path, path.name, reading)
    if opened is None:
        with path.open("rb") as single:
            if begins_mail(single.read(_START_BYTES)):
                return Source(iter([(path.name, path)]), reading=reading)
        raise _no_source(path)
    items, file, _ = opened

    def fraction() -> float | None:
        if file.closed:
            return 1.0
        return min(file.tell() / size, 1.0) or None  # pyarrow opens the Parquet file itself

    return Source(items, fraction, reading)


def _no_source(path: Path) -> UsageError:
    start = start_of(path, _START_BYTES)
    if not start:
        return UsageError(f"{path} is truncated or damaged before its first message.", "Download the file again.")
    if not start.strip(b"\0"):
        return UsageError(f"The archive {path} is empty.", _KINDS)
    for signature, (kind, remedy) in _CONVERTIBLE.items():
        if start.startswith(signature):
            return UsageError(f"{path} is {kind}.", remedy)
    return UsageError(f"{path} is not a mail archive.", _KINDS)


def _folder_items(root: Path, reading: Reading, seen: Counter[str]) -> Iterator[Item]:
    """The messages under ``root`` in a fixed order of files, named by their path below it.

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
        below = [entry for entry in listed if entry.is_dir(follow_symlinks=False)]
        for entry in listed:
            if entry.is_dir(follow_symlinks=False):
                continue
            seen["files"] += 1
            if entry.is_file(follow_symlinks=False):
                yield from _items_of(entry.path, os.path.relpath(entry.path, root), reading)
            else:
                yield Skipped("not_a_file", os.path.relpath(entry.path, root))
        folders += [Path(entry.path) for entry in reversed(below)]


def _items_of(path: str, name: str, reading: Reading) -> Iterator[Item]:
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(BLOCK)
        opened = _open_many(Path(path), name, reading) if _may_hold_many(start) else None
    except OSError:
        yield Skipped("unreadable", name)
        return
    if opened is None:
        yield name, Path(path)
        return
    items, _, has_own_names = opened
    for item in items:
        if not has_own_names or isinstance(item, RawEmail):
            yield item
        elif isinstance(item, Skipped):
            yield Skipped(item.reason, f"{name}/{item.file_name}" if item.file_name else name)
        else:
            yield f"{name}/{item[0]}", item[1]


def _may_hold_many(start: bytes) -> bool:
    """Whether a file may hold many messages, judged quickly by its first 512 bytes."""
    if is_tar_header(start):
        return True
    return not _HEADER.match(start) and (start.startswith(_MANY_STARTS) or is_mail_table(start))


def _open_many(path: Path, name: str, reading: Reading) -> tuple[Iterator[Item], IO[bytes], bool] | None:
    """Open a file of many messages; None if it is of no known kind.

    Returns its messages, the open file, whose position is how far reading has got, and whether the messages have names
    of their own; others are named after ``name``. Raises ``OSError`` if the file cannot be opened.
    """
    start = start_of(path, _START_BYTES)
    has_own_names = False
    read: Callable[[IO[bytes]], Iterator[Item]]
    if is_tar_header(start[:BLOCK]):
        has_own_names, read = True, lambda file: read_archive(path, file, reading)
    elif start.startswith(PARQUET_START) and is_mail_parquet(path):
        read = lambda file: read_parquet(path, name, reading)  # noqa: E731
    elif is_mbox(start):
        read = lambda file: read_mbox(path, file, name, reading)  # noqa: E731
    elif is_mail_table(start):
        has_own_names, read = True, lambda file: read_table(path, decompressed(file), reading)
    elif start.startswith(_JSON_STARTS) and is_mail_line(_first_line(path, reading.max_message_bytes)):
        read = lambda file: read_lines(path, decompressed(file), name, reading)  # noqa: E731
    else:
        return None
    file = path.open("rb")

    def items() -> Iterator[Item]:
        with file:
            yield from read(file)

    return items(), file, has_own_names


def _first_line(path: Path, largest: int) -> bytes:
    with path.open("rb") as file:
        try:
            return decompressed(file).readline(largest)
        except BROKEN:
            return b""


# -- parsing ----------------------------------------------------------------------------------------------------------


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        if isinstance(item, tuple):
            size += len(item[1]) if isinstance(item[1], bytes) else _ASSUMED_FILE_BYTES
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parse_batch(batch: list[Item], judge: Callable[[RawEmail | Skipped], T], largest: int) -> list[T]:
    return [judge(_parse(item, largest) if isinstance(item, tuple) else item) for item in batch]


def _parse(item: Unread, largest: int) -> RawEmail | Skipped:
    name, content = clean_text(item[0]), item[1]
    if isinstance(content, Path):
        try:
            if content.stat().st_size > largest:
                return Skipped("too_large", name)
            content = content.read_bytes()
        except OSError:
            return Skipped("unreadable", name)
    if len(content) > largest:
        return Skipped("too_large", name)
    if isinstance(content, JsonLine):
        return parse_line(content, name)
    email = parse_message(content, name)
    if isinstance(email, RawEmail):
        email.is_research = isinstance(content, TableMail) or _CMU_NAME.search(name) is not None
    return email
