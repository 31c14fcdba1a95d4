"""The way into a mail database: read-only, with an error a user can act on for every file that is none."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from emailrl.errors import EmailRLError, UsageError

SCHEMA_VERSION = 3
"""Raised whenever a database written before cannot be read any more."""

OTHER_FILE = "Name another file with --db."
_REBUILD = "Build it anew with emailrl gen-db --overwrite."
_HEADER = b"SQLite format 3\0"
_MAPPED_BYTES = 2147418112
"""As many as SQLite allows."""
_TABLES = {"emails", "recipients", "addresses", "emails_fts", "meta"}


def connect(db: Path, *, mapped: bool = True) -> sqlite3.Connection:
    """A read-only connection to a database that ``gen-db`` wrote.

    ``mapped`` reads the file by a memory map: searches gain a tenth, while whoever reads all of it is charged with all
    of it as resident.

    Raises ``EmailRLError`` where there is none or it is damaged, ``UsageError`` where it is something else.
    """
    if not db.is_file():
        raise no_database(db)
    check_header(db)
    with reading(db):
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(db.absolute()))}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA query_only = ON")
        connection.execute(f"PRAGMA mmap_size = {_MAPPED_BYTES if mapped else 0}")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if missing := _TABLES - tables:
        connection.close()
        if tables and "emails" in missing:
            raise UsageError(f"The database {db} holds no mail: it has no table emails.", OTHER_FILE)
        what = "full-text index (emails_fts)" if "emails_fts" in missing else f"table {min(missing)}"
        raise UsageError(f"The database {db} has no {what}.", _REBUILD)
    with reading(db):
        version = connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
    if version != (str(SCHEMA_VERSION),):
        connection.close()
        raise UsageError(f"The database {db} was written by another version of emailrl.", _REBUILD)
    return connection


def check_header(db: Path) -> None:
    """Raise ``UsageError`` for a file that is neither empty nor begins as an SQLite database: nobody's to replace."""
    try:
        with db.open("rb") as file:
            start = file.read(len(_HEADER))
    except OSError as error:
        raise UsageError(f"{db} cannot be read: {error.strerror or error}.", OTHER_FILE) from error
    if start and start != _HEADER:
        raise UsageError(
            f"{db} cannot be read as a mail database: file is not a database.",
            "Name another file with --db, or move this one away.",
        )


@contextmanager
def reading(db: Path) -> Iterator[None]:
    """Turn SQLite's errors over a damaged database into an ``EmailRLError`` that names it and the remedy."""
    try:
        yield
    except sqlite3.Error as error:
        raise EmailRLError(f"The database {db} cannot be read: {error}.", _REBUILD) from error


def no_database(db: Path) -> EmailRLError:
    """The error for a database that is not there."""
    return EmailRLError(f"There is no mail database {db}.", "Build one with emailrl gen-db, or name another with --db.")


def database_fingerprint(db: Path) -> str:
    """What tells databases of different content apart, as ``gen-db`` noted it; cheap.

    Raises ``EmailRLError`` where there is no such file or it is damaged, ``UsageError`` where it is no mail database.
    """
    with reading(db), closing(connect(db)) as connection:
        row = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()
    if row is None:
        raise UsageError(f"The database {db} has no fingerprint.", _REBUILD)
    return str(row[0])
