"""Opens a source with the reader that its content calls for, never its name, and parses it in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from io import BufferedReader
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.workers import in_order, worker_processes
from emailrl.mail.database import clean_text
from emailrl.mail.sources import archive, attached, outlook, reading, rows
from emailrl.mail.sources.documents import ZIP_START
from emailrl.mail.sources.message import begins_mail, parse_message
from emailrl.mail.sources.reading import RawEmail, Skipped, decompressed, start_of

Unread = tuple[str, bytes | Path]
"""A message not yet parsed: its name in the source, and its bytes (of a row ``JsonLine`` or ``TableMail``) or file."""
Item = Unread | RawEmail | Skipped
Found = Item | Callable[[Path | None], Iterator[Item]]
"""What a source holds: an item, or what unpacks some in a folder."""
T = TypeVar("T")

_CMU_NAME = re.compile(r"(?:.*/)?\d+\.$", re.DOTALL)
"""File names such as ``allen-p/inbox/1.``, which are specific to CMU's Enron release."""
_MAX_WORKERS = 4
_BATCH_BYTES = 1 << 20
_LEAST_BYTES = 2048  # that each message counts for
_START_BYTES = 4096
_HEADER = re.compile(rb"[A-Za-z][A-Za-z0-9-]*:")
_JSON_STARTS = (b"{", b"\xef\xbb\xbf{")
_MANY_STARTS = (*reading.COMPRESSED, rows.PARQUET_START, *archive.MBOX_STARTS, *_JSON_STARTS)

_KINDS = (
    "Supported: an email (.eml, .msg), a folder tree of emails, a tar / tar.gz / tar.xz of one, an mbox, Outlook's "
    "data file (.pst, .ost), an emails.csv (columns file, message), JSONL or Parquet with the columns message_id, "
    "subject, from, to, cc, bcc, date, body and file_name, msgvault's JSONL, a folder of these, and a saved dataset."
)


@dataclass
class Source:
    """An opened source of mail."""

    items: Iterator[Found]
    fraction: Callable[[], float | None] = lambda: None  # fraction read, 0 to 1; None if unknown
    max_message_bytes: int = reading.MAX_MESSAGE_BYTES

    def __iter__(self) -> Iterator[RawEmail | Skipped]:
        """Yield every message, parsed in this process."""
        return self.read(lambda email: email, 0)

    def is_enron(self) -> bool:
        """Whether one of the first files is named as in CMU's Enron release; they are still read."""
        first = list(islice(self.items, 5))
        self.items = chain(first, self.items)
        return any(isinstance(item, tuple) and _CMU_NAME.match(item[0]) for item in first)

    def read(
        self, judge: Callable[[RawEmail | Skipped], T], workers: int | None = None, scratch: Path | None = None
    ) -> Generator[T]:
        """Yield the result of ``judge`` for every message, in order. Parsing and ``judge`` run in ``workers`` other
        processes; None chooses one per usable core, 0 uses this process. Only a few batches per worker are in flight at
        any time. Outlook's data files are unpacked in the folder ``scratch``, as ``outlook.emails_of`` says."""
        if workers is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            workers = min(cores, _MAX_WORKERS) if cores > 1 else 0
        batches = _batches(self._unpacked(scratch))
        first = list(islice(batches, 2))
        calls = ((batch, judge, self.max_message_bytes) for batch in chain(first, batches))
        if workers < 1 or len(first) < 2:
            with closing(attached.documents):
                for call in calls:
                    yield from _parse_batch(*call)
            return
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        with worker_processes(workers, hint="Try --workers 0.", method=method) as submit:
            for judged in in_order(submit, _parse_batch, calls, ahead=2 * workers + 1):
                yield from judged

    def _unpacked(self, scratch: Path | None) -> Iterator[Item]:
        for item in self.items:
            yield from item(scratch) if callable(item) else (item,)


def open_source(
    source: str | Path, *, allow_truncated: bool = False, max_message_bytes: int = reading.MAX_MESSAGE_BYTES
) -> Source:
    """Open ``hf`` (the hub's dataset) or a path of any known kind. Raises ``UsageError`` if the path does not exist,
    cannot be read or is of no known kind. Reading the source raises ``EmailRLError`` if it is truncated, unless
    ``allow_truncated``, or if the hub's dataset is unavailable."""
    if not str(source).strip():  # an empty path would mean the current folder
        raise UsageError("The source is empty.", "Name hf, demo or a path with --source.")
    if source == "hf":
        return Source(rows.read_hub())
    path = Path(os.path.expanduser(source))
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():  # ``save_to_disk`` wrote it
            return Source(rows.read_dataset_folder(path))
        if path.is_dir():
            if next(path.iterdir(), None) is None:
                raise UsageError(f"The folder {path} is empty.", _KINDS)
            total, seen = cache(lambda: sum(len(files) for _, _, files in os.walk(path))), Counter[str]()
            items = _folder_items(path, seen, max_message_bytes, allow_truncated)
            return Source(items, lambda: min(seen["files"] / max(total(), 1), 1.0), max_message_bytes)
        if path.is_file():
            return _open_file(path, max_message_bytes, allow_truncated)
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    if exists:
        raise UsageError(f"{path} is neither a file nor a folder.", _KINDS)
    raise UsageError(f"No such file or folder: {path}.", "Name an existing one, or use --source demo or hf.")


def _open_file(path: Path, largest: int, allow_truncated: bool) -> Source:
    size = path.stat().st_size
    if size == 0:
        raise UsageError(f"{path} is empty.", _KINDS)
    if opened := _open_many(path, path.name, "", largest, allow_truncated):
        items, file = opened
        # pyarrow opens the Parquet file itself
        return Source(items, lambda: 1.0 if file.closed else min(file.tell() / size, 1.0) or None, largest)
    with path.open("rb") as single:
        start = single.read(_START_BYTES)
    is_data = start.startswith(outlook.DATA_START)
    if is_data or begins_mail(start) or start.startswith(outlook.MESSAGE_START):
        item: Found = partial(outlook.emails_of, path, "", allow_truncated) if is_data else (path.name, path)
        return Source(iter([item]), max_message_bytes=largest)
    start = start_of(path, _START_BYTES)
    if not start:
        raise UsageError(f"{path} is truncated or damaged before its first message.", "Download the file again.")
    if not start.strip(b"\0"):
        raise UsageError(f"The archive {path} is empty.", _KINDS)
    if start.startswith(ZIP_START):
        raise UsageError(f"{path} is a zip archive.", "Unpack it, and pass its contents to --source.")
    raise UsageError(f"{path} is not a mail archive.", _KINDS)


def _folder_items(root: Path, seen: Counter[str], largest: int, allow_truncated: bool) -> Iterator[Found]:
    """The messages under ``root`` in a fixed order of files, named by their path below it. Links are not followed."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            yield Skipped("unreadable", os.path.relpath(folder, root))
            continue
        below = [Path(entry.path) for entry in listed if entry.is_dir(follow_symlinks=False)]
        if {"cur", "new"} <= {each.name for each in below}:  # a Maildir, with unfinished deliveries in tmp
            below = [each for each in below if each.name != "tmp"]
        for entry in listed:
            name = os.path.relpath(entry.path, root)
            if entry.is_file(follow_symlinks=False):
                seen["files"] += 1
                yield from _items_of(entry.path, name, largest, allow_truncated)
            elif not entry.is_dir(follow_symlinks=False):
                seen["files"] += 1
                yield Skipped("not_a_file", name)
        folders += reversed(below)


def _items_of(path: str, name: str, largest: int, allow_truncated: bool) -> Iterator[Found]:
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(archive.BLOCK)
        looks_like_many = not _HEADER.match(start) and (start.startswith(_MANY_STARTS) or rows.is_mail_table(start))
        is_many = looks_like_many or archive.is_tar_header(start)
        opened = _open_many(Path(path), name, f"{name}/", largest, allow_truncated) if is_many else None
    except OSError:
        yield Skipped("unreadable", name)
        return
    if start.startswith(outlook.DATA_START):
        yield partial(outlook.emails_of, Path(path), f"{name}/", allow_truncated)
    elif opened is None:
        yield name, Path(path)
    else:
        yield from opened[0]


def _open_many(
    path: Path, name: str, inside: str, largest: int, allow_truncated: bool
) -> tuple[Iterator[Item], BufferedReader] | None:
    """Open a file of many messages; None if it is of no known kind. Returns its messages, and the open file, whose
    position is how far reading has got. Messages with names of their own are named after ``inside``, others after
    ``name``. A truncated file raises ``EmailRLError`` where it breaks off, or with ``allow_truncated`` yields
    ``Skipped("truncated")``. Raises ``OSError`` if the file cannot be opened."""
    start = start_of(path, _START_BYTES)
    is_tar, is_mbox = archive.is_tar_header(start[: archive.BLOCK]), archive.is_mbox(start)
    is_table = rows.is_mail_table(start)
    unit = "messages" if is_tar or is_mbox else "rows"
    largest_row = largest // reading.ROW_SHARE
    file = path.open("rb")
    content = decompressed(file)
    found: Iterator[Item]
    if is_tar:
        found = archive.read_archive(content, inside, largest)
    elif start.startswith(rows.PARQUET_START) and rows.is_mail_parquet(path):
        found = rows.read_parquet(path, name, largest_row)
    elif is_mbox:
        found = archive.messages_of(iter(lambda: content.read1(archive.READ_BYTES), b""), name, largest)
    elif is_table:
        found = rows.read_table(content, inside, largest_row)
    elif start.startswith(_JSON_STARTS) and rows.is_mail_line(start_of(path, largest_row, line=True)):
        found = rows.read_lines(content, name, largest_row)
    else:
        file.close()
        return None

    def items() -> Iterator[Item]:
        seen = 0
        with file:
            try:
                for item in found:
                    yield item
                    seen += 1
            except reading.BROKEN as error:
                if not allow_truncated:
                    at = f"{file.tell():,} of its {path.stat().st_size:,} bytes read" if is_tar else error
                    raise EmailRLError(
                        f"{path} is truncated or damaged after {seen:,} complete {unit} ({at}).",
                        "Nothing was written. Download the file again, or keep the readable part with "
                        "--allow-truncated.",
                    ) from error
                yield Skipped("truncated", inside.rstrip("/") if is_tar or is_table else f"{name}#{seen + 1}")

    return items(), file


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Batches of about ``_BATCH_BYTES``; a larger one is followed by as many empty ones as it has of these, so that no
    more of it is held at a time than of others."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        content = item.body if isinstance(item, RawEmail) else item[1] if isinstance(item, tuple) else b""
        size += max(_LEAST_BYTES, 0 if isinstance(content, Path) else len(content))
        if size >= _BATCH_BYTES:
            yield batch
            yield from ([] for _ in range(1, size // _BATCH_BYTES))
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
    if content.startswith(outlook.MESSAGE_START):
        try:
            content = outlook.email_of(content)
        except UsageError:
            raise
        except Exception:  # as in ``parse_message``
            return Skipped("unreadable", name)
    if isinstance(content, rows.JsonLine):
        return rows.parse_line(content, name)
    email = parse_message(content, name)
    if isinstance(email, RawEmail):
        email.is_research = isinstance(content, rows.TableMail) or _CMU_NAME.match(name) is not None
    return email
