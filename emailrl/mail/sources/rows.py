"""Reads mail as rows: of a dataset, a Parquet file or JSONL with ART-E's columns, or of Kaggle's ``emails.csv``.

Readers of files raise ``EOFError`` if the file is truncated or damaged.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.hub import go_offline_if_unreachable
from emailrl.mail.database import clean_text
from emailrl.mail.sources.archive import READ_BYTES
from emailrl.mail.sources.headers import note, parse_date
from emailrl.mail.sources.reading import RawEmail, Skipped, made_up_id

COLUMNS = ("message_id", "subject", "from", "to", "cc", "bcc", "date", "body", "file_name")
_REQUIRED = frozenset(COLUMNS) - {"cc", "bcc", "file_name"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DATASET = "corbt/enron-emails"
_ALTERNATIVES = (
    "Use --source demo --db data/demo.db, or --source PATH with a local copy "
    "(maildir tree, tar archive, mbox, emails.csv, JSONL, Parquet or dataset folder)."
)
PARQUET_START = b"PAR1"
_BATCH_ROWS = 20  # of Parquet, held at once however large they are
_BUFFER_BYTES = 1 << 20
_MOST_DENSE = 100  # times its size that a file of Parquet may unpack to; mail does to 10
_TABLE_COLUMNS = (b"file", b"message")
_ROW = re.compile(rb"(?:%b,)*+%b\n" % ((rb'(?:(?:"[^"]*+")++(?!")|(?!"))[^,\n]*+',) * 2))
_FIELD = re.compile(rb'(?:\A|,)((?:"[^"]*+")++|[^",][^,]*+|)(?=,|\Z)')
"""A row of a table, and each of its fields; a quote in a field in quotes is doubled."""
_MSGVAULT = "msgvault-message-export/"
_RECORD, _MESSAGE, _COMPLETE = (b'{"record_type":"%b' % kind for kind in (b"", b'message"', b'complete"'))


class JsonLine(bytes):
    """A line of JSONL, not yet parsed."""


class TableMail(bytes):
    """A message from Kaggle's table, not yet parsed."""


def is_mail_line(line: bytes) -> bool:
    """Whether a line is a JSON object with ART-E's columns, or the first of msgvault's export."""
    try:
        row = _load(line)[0]
        return set(row) >= _REQUIRED or str(row.get("schema")).startswith(_MSGVAULT)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False


def read_lines(stream: IO[bytes], name: str, largest: int) -> Iterator[tuple[str, JsonLine] | Skipped]:
    """Yield the rows of JSONL as (``name#line``, bytes), of msgvault's export its messages."""
    record = b""
    for number in itertools.count(1):
        line = stream.readline(largest + 1)
        if not line:
            if record and not record.startswith(_COMPLETE):
                raise EOFError("msgvault's export lacks its last record")
            return
        here = f"{name}#{number}"
        if len(line) > largest:
            while line and not line.endswith(b"\n"):
                line = stream.readline(1 << 20)
            yield Skipped("too_large", here)
        elif not line.isspace():
            if not line.endswith(b"\n"):
                try:
                    _load(line)
                except (ValueError, RecursionError):
                    raise EOFError(f"line {number:,} is not a complete JSON value") from None
            record = line if line.startswith(_RECORD) else record
            if record is not line or line.startswith(_MESSAGE):
                yield here, JsonLine(line)


def _load(line: bytes) -> tuple[Any, list[str]]:
    """A line's value, and the defects of its bytes."""
    try:
        return json.loads(line.decode("utf-8-sig"), strict=False), []
    except UnicodeDecodeError:
        return json.loads(line.decode("cp1252", "replace"), strict=False), ["bad_charset"]


def parse_line(line: bytes, name: str) -> RawEmail | Skipped:
    """Parse a line of JSONL as ``row_to_email`` does a row; ``bad_row`` also if it lacks a column."""
    try:
        row, defects = _load(line)
        if line.startswith(_MESSAGE):
            return _of_msgvault(row, name)
        if not row.keys() >= _REQUIRED:
            return Skipped("bad_row", name)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return Skipped("bad_row", name)
    email = row_to_email(row, name)
    if isinstance(email, RawEmail):
        email.defects += tuple(defects)
    return email


def _of_msgvault(row: dict[str, Any], name: str) -> RawEmail | Skipped:
    """Convert a message of msgvault's export. It names no recipients: what others wrote is to the account's owner."""
    if row["message_type"] != "email":
        return Skipped("not_mail", name)
    author, owner = row["author"] or {"display_name": "", "address": ""}, row["source_identifier"].lower()
    is_received = "@" in owner and owner != author["address"].lower()
    columns = {"subject": row["subject"], "body": row["text"], "date": row["occurred_at"]}
    columns |= {"from": f"{author['display_name']} <{author['address']}>", "to": [owner] if is_received else []}
    own, thread = ("".join(f"<{row[key]}@{owner}.msgvault>".split()) for key in ("id", "conversation_id"))
    email = row_to_email({"message_id": own, **columns}, name)
    if isinstance(email, RawEmail):
        email.references, email.is_research = [thread], False
    return email


def row_to_email(row: Mapping[str, Any], name: str = "") -> RawEmail | Skipped:
    """Convert a row with ART-E's columns to an email, named by its ``file_name`` or else ``name``, or ``bad_row``."""
    try:
        name = clean_text(row.get("file_name") or name)
        people = [row.get(kind) for kind in ("to", "cc", "bcc")]
        if any(isinstance(addresses, str | Mapping) for addresses in people):
            return Skipped("bad_row", name)
        names: dict[str, str] = {}
        to, cc, bcc = ([_bare(address, names) for address in addresses or () if address] for addresses in people)
        date, defects = _utc(row["date"])
        text = {key: "" if row[key] is None else row[key] for key in ("message_id", "subject", "from", "body")}
        nul = any("\0" in value for value in text.values())
        message_id, subject, sender, body = map(clean_text, text.values())
    except (AttributeError, TypeError, ValueError, OverflowError):
        return Skipped("bad_row", name)
    message_id, sender = message_id.strip(), _bare(sender, names)
    if not message_id.strip("<> "):
        message_id = made_up_id(repr(sorted(row.items())).encode("utf-8", "replace"))
        defects.append("no_message_id")
    if nul:
        defects.append("nul_bytes")
    if not sender:
        defects.append("no_sender")
    return RawEmail(message_id, subject, sender, to, cc, bcc, date, body, name, tuple(defects), names=names)


def _bare(address: str, names: dict[str, str]) -> str:
    """An address in its stored form; a name before it is added to ``names``."""
    name, is_inside, inside = address.rpartition("<")
    bare = "".join(clean_text(inside.partition(">")[0] if is_inside else inside).lower().split())
    if name:
        note(names, [bare], [name.strip().strip('"')])
    return bare


def _utc(value: datetime | str | float | None) -> tuple[datetime | None, list[str]]:
    """A timestamp in UTC (assumed if it has no zone) and no defects, or None and the defects. A number is milliseconds
    since 1970, as ``datasets`` and pandas write times to JSON; a text is ISO 8601 or a Date header."""
    if isinstance(value, bool) or not isinstance(value, datetime | str | float | int | None):
        raise TypeError("not a time")
    if value is None or value == "" or value != value:
        return None, ["no_date"]
    with suppress(OverflowError):  # before the year 1 or after 9999
        if isinstance(value, float | int):
            return _EPOCH + timedelta(milliseconds=value), []
        if moment := parse_date(value) if isinstance(value, str) else value:
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC), []
    return None, ["bad_date"]


def is_mail_parquet(path: Path) -> bool:
    """Whether a Parquet file has the columns of mail; True for a truncated one, whose columns are unknown."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as table:
            return set(table.schema_arrow.names) >= _REQUIRED
    except (ArrowException, OSError):
        return True


def read_parquet(path: Path, name: str, largest: int) -> Iterator[RawEmail | Skipped]:
    """Yield the rows as emails, named by their own ``file_name`` or else ``name#row``; none of a truncated file."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    numbers = itertools.count(1)
    try:
        # Read pages as needed rather than row groups, which may be most of the file.
        with ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
            groups = map(table.metadata.row_group, range(table.num_row_groups))
            if sum(group.total_byte_size for group in groups) > _MOST_DENSE * (path.stat().st_size + _BUFFER_BYTES):
                raise EOFError(f"rows that unpack to more than {_MOST_DENSE} times their size")
            columns = [column for column in COLUMNS if column in table.schema_arrow.names]
            for batch in table.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    email = row_to_email(row, f"{name}#{next(numbers)}")
                    is_large = isinstance(email, RawEmail) and len(email.body) > largest
                    yield Skipped("too_large", email.file_name) if is_large else email
    except (ArrowException, OSError) as error:
        raise EOFError(" ".join(str(error).split())[:200]) from error


def read_hub() -> Iterator[RawEmail | Skipped]:
    """Yield the emails of ``corbt/enron-emails``, downloaded once into the cache of ``datasets``. ``EmailRLError`` if
    the hub cannot be reached and it is not cached, ``UsageError`` if a folder of that name would be read in its
    place."""
    if Path(DATASET).exists():
        raise UsageError(f"A local folder {DATASET} would be read instead of the hub's.", "Run in another folder.")
    go_offline_if_unreachable()
    from datasets import load_dataset

    try:
        dataset = load_dataset(DATASET, split="train")
    except Exception as error:  # datasets and its HTTP stack raise many kinds; all mean that there is no data
        raise EmailRLError(f"The dataset {DATASET} could not be loaded: {describe(error)}.", _ALTERNATIVES) from error
    yield from _of_dataset(dataset)


def read_dataset_folder(path: Path) -> Iterator[RawEmail | Skipped]:
    """Yield the emails of all splits of a dataset with ART-E's columns, as written by ``save_to_disk``. ``UsageError``
    if it cannot be loaded or lacks a column."""
    from datasets import Dataset, load_from_disk

    try:
        loaded = load_from_disk(str(path))
    except Exception as error:  # as in read_hub
        raise UsageError(f"{path} cannot be loaded as a dataset: {describe(error)}.") from error
    for split in [loaded] if isinstance(loaded, Dataset) else loaded.values():
        if missing := [name for name in COLUMNS if name not in split.column_names]:
            raise UsageError(f"The dataset in {path} has no column {missing[0]!r}.", f"It needs {', '.join(COLUMNS)}.")
        yield from _of_dataset(split)


def _of_dataset(split: Any) -> Iterator[RawEmail | Skipped]:
    for batch in split.select_columns(list(COLUMNS)).with_format("arrow").iter(batch_size=1000):
        yield from map(row_to_email, batch.to_pylist())


def describe(error: Exception) -> str:
    """Return why ``datasets`` loaded nothing, in at most 200 characters and without a final period."""
    if isinstance(error, ConnectionError):  # its text ends with a class name
        return "the hub cannot be reached"
    return (" ".join(str(error).split())[:200] or type(error).__name__).rstrip(".")


def is_mail_table(start: bytes) -> bool:
    """Whether a file is a CSV with the columns ``file`` and ``message``, by its start."""
    return {*_TABLE_COLUMNS} <= {*_fields(start.partition(b"\n")[0].removeprefix(b"\xef\xbb\xbf"))}


def read_table(stream: BufferedReader, inside: str, largest: int) -> Iterator[tuple[str, TableMail] | Skipped]:
    """Yield the messages of the table as (file after ``inside``, bytes)."""
    records = (each for each in _records(stream, max(largest, READ_BYTES)) if each not in (b"\n", b"\r\n"))
    header = _fields(next(records).removeprefix(b"\xef\xbb\xbf"))
    file_column, message_column = map(header.index, _TABLE_COLUMNS)
    for number, record in enumerate(records, 1):
        row = _fields(record)
        if len(row) == len(header):
            yield inside + row[file_column].decode("utf-8", "surrogateescape"), TableMail(row[message_column])
        else:
            yield Skipped("bad_row" if record else "too_large", f"{inside}row {number}")


def _fields(record: bytes) -> list[bytes]:
    found = _FIELD.findall(record.rstrip(b"\r\n"))
    return [field[1:-1].replace(b'""', b'"') if field[:1] == b'"' else field for field in found]


def _records(stream: BufferedReader, largest: int) -> Iterator[bytes]:
    """The rows of a table as written, holding ``largest`` bytes and a block; nothing in place of longer ones."""
    buffer, looked, dropped = bytearray(), 0, False
    blocks = iter(lambda: stream.read1(READ_BYTES), b"")
    for block in itertools.chain(blocks, (b"\n",)):  # the last row may lack its end
        buffer += block
        if len(buffer) < min(2 * looked, largest) and block != b"\n":
            continue
        start = 0
        while row := _ROW.match(buffer, start):
            yield b"" if dropped or row.end() - start > largest else row[0]
            start, dropped = row.end(), False
        del buffer[:start]
        if len(buffer) > largest:
            buffer, dropped = bytearray(b'"' * (buffer.count(b'"') % 2)), True
        looked = len(buffer)
    if buffer:
        raise EOFError("the last row has no end")
