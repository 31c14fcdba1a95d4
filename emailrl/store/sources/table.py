"""Kaggle's ``emails.csv``: a row a message, its file's name in the column ``file``, all its text in ``message``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from emailrl.errors import EmailRLError
from emailrl.store.sources.message import MAX_MESSAGE_BYTES, Skipped

COLUMNS = ("file", "message")


def is_mail_table(start: bytes) -> bool:
    """Whether a file that starts so is a CSV with the columns ``file`` and ``message``."""
    line = start.partition(b"\n")[0].decode("utf-8-sig", "replace").strip()
    try:
        return set(COLUMNS) <= set(next(csv.reader([line]), []))
    except csv.Error:
        return False


def read_table(path: Path, stream: IO[bytes], *, allow_truncated: bool) -> Iterator[tuple[str, bytes] | Skipped]:
    """The messages of the table as (file, bytes).

    Raises ``EmailRLError`` where the file ends inside a row; with ``allow_truncated`` that ends the messages, the
    broken one as ``Skipped("truncated")``.
    """
    csv.field_size_limit(MAX_MESSAGE_BYTES)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, strict=True)
    seen = 0
    try:
        header = next(rows)
        file_column, message_column = (header.index(name) for name in COLUMNS)
        for row in rows:
            if len(row) == len(header):
                yield row[file_column], row[message_column].encode("utf-8", "surrogateescape")
            elif row:
                yield Skipped("bad_row", f"row {seen + 1}")
            seen += bool(row)
    except (csv.Error, EOFError, OSError) as error:
        if not allow_truncated:
            raise EmailRLError(
                f"{path} breaks off or is damaged after {seen:,} whole rows ({error}).",
                "Nothing was written. Get the file again, or keep what can be read with --allow-truncated.",
            ) from error
        yield Skipped("truncated")
