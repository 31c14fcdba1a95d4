"""Reads Kaggle's ``emails.csv``: one message per row, with its file name in ``file`` and its text in ``message``."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from emailrl.mail.sources.raw_email import Reading, Skipped
from emailrl.mail.sources.streams import BROKEN, broken_off

COLUMNS = ("file", "message")


class TableMail(bytes):
    """A message from a table, not yet parsed."""


_LARGEST_FIELD = 2**31 - 1  # message size is checked by the parser


def is_mail_table(start: bytes) -> bool:
    """Whether a file is a CSV with the columns ``file`` and ``message``, by its start."""
    line = start.partition(b"\n")[0].decode("utf-8-sig", "replace").strip()
    try:
        return set(COLUMNS) <= set(next(csv.reader([line]), []))
    except csv.Error:
        return False


def read_table(path: Path, stream: IO[bytes], reading: Reading) -> Iterator[tuple[str, TableMail] | Skipped]:
    """Yield the messages of the table as (file, bytes).

    Raises ``EmailRLError`` if the file ends inside a row. With ``allow_truncated`` the messages end there instead, with
    ``Skipped("truncated")`` for the broken one.
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
