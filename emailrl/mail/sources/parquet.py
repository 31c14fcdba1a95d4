"""Reads a Parquet file with ART-E's columns, a few rows at a time, with ``pyarrow``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from emailrl.mail.sources.raw_email import RawEmail, Reading, Skipped
from emailrl.mail.sources.rows import COLUMNS, has_mail_columns, row_to_email
from emailrl.mail.sources.streams import broken_off

MAGIC = b"PAR1"
_BATCH_ROWS = 500
_BUFFER_BYTES = 1 << 20


def is_mail_parquet(path: Path) -> bool:
    """Whether a Parquet file has the columns of mail; True for a truncated one, whose columns are unknown."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as table:
            return has_mail_columns(table.schema_arrow.names)
    except (ArrowException, OSError):
        return True


def read_parquet(path: Path, name: str, reading: Reading) -> Iterator[RawEmail | Skipped]:
    """Yield the rows as emails, named by their own ``file_name`` or else ``name#row``.

    Raises ``EmailRLError`` if the file is truncated (its index is at the end, so no row can be read) or damaged. With
    ``allow_truncated`` the rows end there instead, with ``Skipped("truncated")`` for the broken one.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    seen = 0
    try:
        # Read pages as needed rather than row groups, which may be most of the file.
        with ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
            columns = [column for column in COLUMNS if column in table.schema_arrow.names]
            for batch in table.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    seen += 1
                    email = row_to_email(row, f"{name}#{seen}")
                    if isinstance(email, RawEmail) and len(email.body) > reading.max_message_bytes:
                        email = Skipped("too_large", email.file_name)
                    yield email
    except (ArrowException, OSError) as error:
        if not reading.allow_truncated:
            raise broken_off(path, f"{seen:,} complete rows ({' '.join(str(error).split())[:200]})") from error
        yield Skipped("truncated", f"{name}#{seen + 1}")
