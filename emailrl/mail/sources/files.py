"""Opens a file of many messages with the reader that its content calls for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, NamedTuple

from emailrl.mail.sources.archive import BLOCK, is_tar_header, read_archive
from emailrl.mail.sources.mbox import MBOX_STARTS, is_mbox, read_mbox
from emailrl.mail.sources.parallel import Item
from emailrl.mail.sources.parquet import MAGIC, is_mail_parquet, read_parquet
from emailrl.mail.sources.raw_email import Reading, Skipped
from emailrl.mail.sources.rows import is_mail_line, read_lines
from emailrl.mail.sources.streams import BROKEN, COMPRESSED, decompressed, start_of
from emailrl.mail.sources.table import is_mail_table, read_table

START_BYTES = 4096
_HEADER = re.compile(rb"[A-Za-z][A-Za-z0-9-]*:")


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
    return (
        start.startswith((*COMPRESSED, MAGIC, *MBOX_STARTS, b"{", b"\xef\xbb\xbf{"))
        or is_mail_table(start)
    )  # fmt: skip


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
    if start.startswith(MAGIC):
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
