"""Kaggle's ``emails.csv``: a row a message, its file's name in the column ``file``, all its text in ``message``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from emailrl.store.sources.raw_email import Reading, Skipped
from emailrl.store.sources.streams import BROKEN, broken_off

COLUMNS = ("file", "message")


class TableMail(bytes):
    """A message out of a table, not yet parsed."""


_LARGEST_FIELD = 2**31 - 1  # the size of a message is judged where it is parsed


def is_mail_table(start: bytes) -> bool:
    """Whether a file that starts so is a CSV with the columns ``file`` and ``message``."""
    line = start.partition(b"\n")[0].decode("utf-8-sig", "replace").strip()
    try:
        return set(COLUMNS) <= set(next(csv.reader([line]), []))
    except csv.Error:
        return False


def read_table(path: Path, stream: IO[bytes], reading: Reading) -> Iterator[tuple[str, TableMail] | Skipped]:
    """The messages of the table as (file, bytes).

    Raises ``EmailRLError`` where the file ends inside a row; with ``allow_truncated`` that ends the messages, the
    broken one as ``Skipped("truncated")``.
    """
    csv.field_size_limit(_LARGEST_FIELD)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(text, strict=True)
    seen = 0
    try:
        header = next(rows)
        file_column, message_column = (header.index(name) for name in COLUMNS)
        for row in rows:
            if len(row) == len(header):
                yield row[file_column], TableMail(row[message_column], "utf-8", "surrogateescape")
            elif row:
                yield Skipped("bad_row", f"row {seen + 1}")
            seen += bool(row)
    except (csv.Error, *BROKEN) as error:
        if not reading.allow_truncated:
            raise broken_off(path, f"{seen:,} complete rows ({error})") from error
        yield Skipped("truncated")
