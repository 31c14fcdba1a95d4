"""Reads mail as rows with ART-E's columns: of a dataset, a Parquet file, or JSONL (one object per line)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any

from emailrl.mail.parties import clean_text
from emailrl.mail.sources.dates import parse_date
from emailrl.mail.sources.raw_email import RawEmail, Reading, Skipped, made_up_id
from emailrl.mail.sources.streams import BROKEN, broken_off

COLUMNS = ("message_id", "subject", "from", "to", "cc", "bcc", "date", "body", "file_name")
_REQUIRED = frozenset(("message_id", "subject", "from", "to", "date", "body"))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class JsonLine(bytes):
    """A line of JSONL, not yet parsed."""


def has_mail_columns(columns: object) -> bool:
    """Whether ``columns`` (a row or column names) contain those of mail; cc, bcc and file_name may be missing."""
    return isinstance(columns, Mapping | Sequence) and set(columns) >= _REQUIRED


def is_mail_line(line: bytes) -> bool:
    """Whether a line is a JSON object with ART-E's columns."""
    try:
        return has_mail_columns(_load(line)[0])
    except (ValueError, TypeError, RecursionError):
        return False


def read_lines(path: Path, stream: IO[bytes], name: str, reading: Reading) -> Iterator[tuple[str, JsonLine] | Skipped]:
    """Yield the rows of JSONL as (``name#line``, bytes) without empty lines.

    Raises ``EmailRLError`` if the file ends inside a row. With ``allow_truncated`` the rows end there instead, with
    ``Skipped("truncated")`` for the broken one.
    """
    number, seen = 1, 0
    largest = reading.max_message_bytes
    try:
        while line := stream.readline(largest + 1):
            here = f"{name}#{number}"
            if len(line) > largest:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(1 << 20)
                yield Skipped("too_large", here)
            elif not line.endswith(b"\n") and not _is_json(line):
                raise EOFError(f"line {number:,} is not a complete JSON value")
            elif not line.isspace():
                yield here, JsonLine(line)
            seen += not line.isspace()
            number += 1
    except BROKEN as error:
        if not reading.allow_truncated:
            raise broken_off(path, f"{seen:,} complete rows ({error})") from error
        yield Skipped("truncated", f"{name}#{number}")


def _is_json(line: bytes) -> bool:
    try:
        _load(line)
    except (ValueError, RecursionError):
        return line.isspace()
    return True


def _load(line: bytes) -> tuple[Any, list[str]]:
    """A line's value, and the defects of its bytes."""
    try:
        return json.loads(line.decode("utf-8-sig"), strict=False), []
    except UnicodeDecodeError:
        return json.loads(line.decode("cp1252", "replace"), strict=False), ["bad_charset"]


def parse_line(line: bytes, name: str) -> RawEmail | Skipped:
    """Parse a line of JSONL as an email, named by its own ``file_name`` or else ``name``.

    Returns ``Skipped("bad_row")`` if the line is not an object or lacks a column.
    """
    try:
        row, defects = _load(line)
    except (ValueError, RecursionError):
        return Skipped("bad_row", name)
    if not isinstance(row, dict) or not has_mail_columns(row):
        return Skipped("bad_row", name)
    email = row_to_email(row, name)
    if defects and isinstance(email, RawEmail):
        email.defects += tuple(defects)
    return email


def row_to_email(row: Mapping[str, Any], name: str = "") -> RawEmail | Skipped:
    """Convert a row with ART-E's columns to an email, named by its ``file_name`` or else ``name``.

    Returns ``Skipped("bad_row")`` if a value has the wrong type.
    """
    try:
        name = clean_text(row.get("file_name") or name)
        to, cc, bcc = (_bare_list(row.get(kind)) for kind in ("to", "cc", "bcc"))
        date, defects = _utc(row["date"])
        text = {key: "" if row[key] is None else row[key] for key in ("message_id", "subject", "from", "body")}
        nul = any("\0" in value for value in text.values())
        text = {key: clean_text(value) for key, value in text.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        return Skipped("bad_row", name)
    message_id = text["message_id"].strip()
    if not message_id:
        message_id = made_up_id(repr(sorted(row.items())).encode("utf-8", "replace"))
        defects.append("no_message_id")
    if nul:
        defects.append("nul_bytes")
    sender = _bare(text["from"])
    if not sender:
        defects.append("no_sender")
    return RawEmail(message_id, text["subject"], sender, to, cc, bcc, date, text["body"], name, tuple(defects))


def _bare(address: str) -> str:
    if "<" in address:  # a name before it
        address = address.rpartition("<")[2].partition(">")[0]
    return "".join(clean_text(address).lower().split())


def _bare_list(addresses: Sequence[str] | None) -> list[str]:
    if isinstance(addresses, str | Mapping):
        raise TypeError("not a list of addresses")
    return [_bare(address) for address in addresses or () if address]


def _utc(value: datetime | str | float | None) -> tuple[datetime | None, list[str]]:
    """A timestamp in UTC (assumed if it has no zone) and no defects, or None and the defects.

    A number is milliseconds since 1970, as ``datasets`` and pandas write times to JSON; a text is ISO 8601 or a Date
    header. ``TypeError`` for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, datetime | str | float | int | None):
        raise TypeError("not a time")
    if value is None or value == "" or value != value:
        return None, ["no_date"]
    try:
        if isinstance(value, float | int):
            return _EPOCH + timedelta(milliseconds=value), []
        moment = _from_text(value) if isinstance(value, str) else value
        if moment is None:
            return None, ["bad_date"]
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC), []
    except OverflowError:  # before the year 1 or after 9999
        return None, ["bad_date"]


def _from_text(value: str) -> datetime | None:
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return parse_date(value)
