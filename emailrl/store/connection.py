"""Opens database files: a SQLAlchemy engine for each, with actionable errors.

What is not on the hot path is Core on ``emailrl.store.schema``. Search, read and bulk load take the driver's connection
beneath (``driver``): Core would cost a read more than SQLite does.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final, cast
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, NullPool, bindparam, create_engine, event, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry

from emailrl.errors import EmailRLError, UsageError
from emailrl.store.schema import meta, sqlite_master

SCHEMA_VERSION = 3
"""Incremented whenever older databases can no longer be read."""

HOW_DATABASES_CHANGE: Final = "gen-db --append and --overwrite change a database: keep a copy of the old one."
"""The hint if a database has changed since a run was started on it."""

SQLITE_ERRORS: Final = (sqlite3.Error, DBAPIError)
"""As the driver raises them, and as Core does."""

OTHER_FILE = "Name another file with --db."
_REBUILD = "Rebuild it with emailrl gen-db --overwrite."
_HEADER = b"SQLite format 3\0"
_MAPPED_BYTES = 2147418112
"""As many as SQLite allows."""
_CACHE_KIB = 64 * 1024
_LOADING = ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE", f"cache_size = -{_CACHE_KIB}")
_TABLES = {"emails", "recipients", "addresses", "emails_fts", "meta"}
_TABLE_NAMES = select(sqlite_master.c.name).where(sqlite_master.c.type == "table")
_NOTED = select(meta.c.value).where(meta.c.key == bindparam("key"))


def connect(db: Path, *, mapped: bool = True) -> Connection:
    """A read-only connection to a database that ``gen-db`` wrote.

    ``mapped`` reads the file by a memory map: searches gain a tenth, while whoever reads all of it is charged with all
    of it as resident.

    Raises ``EmailRLError`` where there is none or it is damaged, ``UsageError`` where it is something else.
    """
    if not db.is_file():
        raise no_database(db)
    check_header(db)
    with reading(db):
        pragmas = ("query_only = ON", f"mmap_size = {_MAPPED_BYTES if mapped else 0}")
        connection = _engine(db.absolute(), "ro", pragmas).connect()
        try:
            _check(connection, db)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def opened(db: Path, *, mapped: bool = True) -> Iterator[Connection]:
    """``connect`` for as long as the block lasts, SQLite's errors in it raised as by ``reading``."""
    with reading(db), connect(db, mapped=mapped) as connection:
        yield connection


def connect_for_loading(path: Path) -> Connection:
    """A connection for bulk loading: no journal, since a file that is not finished is thrown away."""
    return _engine(path.absolute(), "rw", _LOADING).connect()


def driver(connection: Connection) -> sqlite3.Connection:
    """The driver's connection beneath one of SQLAlchemy's; it begins no transaction."""
    return cast(sqlite3.Connection, connection.connection.driver_connection)


@lru_cache(maxsize=16)
def _engine(path: Path, mode: str, pragmas: tuple[str, ...]) -> Engine:
    """The engine of a file, which keeps compiled statements but no open connection: another file may take the name."""
    engine = create_engine(
        URL.create("sqlite", database=f"file:{quote(os.fsencode(path))}", query={"mode": mode, "uri": "true"}),
        poolclass=NullPool,
        connect_args={"isolation_level": None, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    if mode == "rw":  # readers hold no lock between two statements

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN")

    return engine


def _check(connection: Connection, db: Path) -> None:
    tables = set(connection.scalars(_TABLE_NAMES))
    if missing := _TABLES - tables:
        if tables and "emails" in missing:
            raise UsageError(f"The database {db} holds no mail: it has no emails table.", OTHER_FILE)
        what = "full-text index (emails_fts)" if "emails_fts" in missing else f"table {min(missing)}"
        raise UsageError(f"The database {db} has no {what}.", _REBUILD)
    if noted(connection, "schema_version") != str(SCHEMA_VERSION):
        raise UsageError(f"The database {db} was written by another version of emailrl.", _REBUILD)


def noted(connection: Connection, key: str) -> str | None:
    """The value of ``key`` in the table ``meta``."""
    return connection.scalar(_NOTED, {"key": key})


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
    except SQLITE_ERRORS as error:
        raise EmailRLError(f"The database {db} cannot be read: {reason(error)}.", _REBUILD) from error


def reason(error: sqlite3.Error | DBAPIError) -> str:
    """SQLite's own words, without the statement that SQLAlchemy adds."""
    return str(error.orig if isinstance(error, DBAPIError) else error)


def no_database(db: Path) -> EmailRLError:
    """The error for a missing database."""
    return EmailRLError(f"No such mail database: {db}.", "Build one with emailrl gen-db, or choose another with --db.")


def database_fingerprint(db: Path) -> str:
    """What tells databases of different content apart, as ``gen-db`` noted it; cheap.

    Raises ``EmailRLError`` where there is no such file or it is damaged, ``UsageError`` where it is no mail database.
    """
    with opened(db) as connection:
        fingerprint = noted(connection, "fingerprint")
    if fingerprint is None:
        raise UsageError(f"The database {db} has no fingerprint.", _REBUILD)
    return fingerprint
