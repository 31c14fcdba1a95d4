"""The mail database: its schema, and a SQLAlchemy engine for each file, with actionable errors.

Search, read and bulk load use the driver's connection (``driver``): Core would take longer than SQLite itself.

As in ART-E: ``emails``, ``recipients`` and the external-content table ``emails_fts``. ``emails.id`` counts from the
newest email, so that newest first is a forward scan of row ids; a write that breaks this order is refused.
``addresses`` numbers every address.

``emails.parties``, also indexed, has one word per sender and recipient: the address's number between two private-use
characters, which FTS5's tokenizer keeps (category Co). A search includes the inbox's word in its MATCH, so that the
index itself intersects keywords with the inbox. No word of an email can be equal, since ``clean_text`` removes the
character.

``emails.extra`` is indexed, too: what a search may find besides subject and body, namely the names of people and
attachments and pairs of characters, each word after that character alone, so that queries as ART-E writes them do not
find these, nor a number an address. ``stems`` has the words of other languages (``languages``), ``threads`` the emails
of threads of two or more.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final, cast
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import URL, Connection, Engine, NullPool, bindparam, create_engine, event, func, or_, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.schema import CreateIndex, CreateTable

from emailrl.base.disk import Lock, not_a_file
from emailrl.base.errors import EmailRLError, UsageError

PARTY = "\ue000"  # the first and the last character of every party word
INDEXED = "subject, body, parties, extra"
SNIPPET_WORDS = 15  # length of a search hit's snippet, as in ART-E
TOKENIZER = "tokenize='unicode61 remove_diacritics 2'"  # 1, the default, keeps letters with two accents: Việt

# FTS5 shows the stretch of words that holds most phrases of the query, of several equal ones the first, and prefers one
# that begins a column, if the column is longer than a snippet. The inbox's word is a single phrase and stands in the
# last column, so it would be shown in place of a keyword in that one case: near the beginning of a long column.
FILLER = f"{PARTY} " * SNIPPET_WORDS
"""Precedes more than ``SNIPPET_WORDS`` party words, so that none is near the beginning."""

metadata = sa.MetaData()

emails = sa.Table(
    "emails",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("message_id", sa.Text, nullable=False),
    *(sa.Column(name, sa.Text) for name in ("subject", "from_address", "date", "body", "file_name")),
    *(
        sa.Column(name, sa.Text, nullable=False, server_default="")
        for name in ("parties", "names", "attachments", "machine", "refs", "extra")
    ),
    sa.Index("idx_emails_message_id", "message_id", unique=True),
    sa.Index("idx_emails_from", "from_address"),
    sa.Index("idx_emails_date", "date"),
)

recipients = sa.Table(
    "recipients",
    metadata,
    sa.Column("email_id", sa.Integer, sa.ForeignKey("emails.id", ondelete="CASCADE"), nullable=False),
    sa.Column("recipient_address", sa.Text, nullable=False),
    sa.Column("recipient_type", sa.Text, nullable=False),
    sa.Index("idx_recipients_email", "email_id"),
    sa.Index("idx_recipients_address_email", "recipient_address", "email_id"),
)

addresses = sa.Table(
    "addresses",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("address", sa.Text, nullable=False),
    sa.Index("idx_addresses_address", "address", unique=True),
)

threads = sa.Table(
    "threads",
    metadata,
    sa.Column("email_id", sa.Integer, sa.ForeignKey("emails.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("thread_id", sa.Integer, nullable=False),
    sa.Index("idx_threads_thread", "thread_id"),
)

stems = sa.Table(
    "stems",
    metadata,
    sa.Column("stem", sa.Text, primary_key=True),
    sa.Column("word", sa.Text, primary_key=True),
    sqlite_with_rowid=False,
)

meta = sa.Table(
    "meta", metadata, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False)
)

sqlite_master = sa.table("sqlite_master", sa.column("type"), sa.column("name"))  # SQLite's own list of tables

TABLES: list[sa.Executable] = [
    *map(CreateTable, metadata.sorted_tables),
    sa.text(
        f"CREATE VIRTUAL TABLE emails_fts USING fts5({INDEXED}, content='emails', content_rowid='id', {TOKENIZER})"
    ),
]
INDEXES = [
    CreateIndex(each) for table in metadata.sorted_tables for each in sorted(table.indexes, key=lambda i: str(i.name))
]
"""Created after a bulk load, which is faster."""
_INDEX_NEW = f"INSERT INTO emails_fts(rowid, {INDEXED}) VALUES (new.id, new.subject, new.body, new.parties, new.extra);"
_UNINDEX_OLD = (
    f"INSERT INTO emails_fts(emails_fts, rowid, {INDEXED}) "
    "VALUES ('delete', old.id, old.subject, old.body, old.parties, old.extra);"
)


def _renew_parties(email_id: str, address: str) -> str:
    """SQL that numbers an address and rewrites an email's party words."""
    return f"""
        INSERT OR IGNORE INTO addresses(address) SELECT {address} WHERE {address} <> '';
        UPDATE emails SET parties = (
            SELECT iif(count(*) > {SNIPPET_WORDS}, '{FILLER}', '')
            || coalesce(group_concat('{PARTY}' || id || '{PARTY}', ' '), '')
            FROM addresses WHERE address = from_address
            OR address IN (SELECT recipient_address FROM recipients WHERE email_id = emails.id)
        ) WHERE id = {email_id};"""


_KEEP_ORDER = """
    SELECT RAISE(ABORT, 'ids follow dates, the newest first: add email with emailrl gen-db --append') WHERE (
        coalesce(new.date, '') > (SELECT coalesce(date, '') FROM emails WHERE id < new.id ORDER BY id DESC LIMIT 1) OR
        coalesce(new.date, '') < (SELECT coalesce(date, '') FROM emails WHERE id > new.id ORDER BY id LIMIT 1));"""

TRIGGERS = {
    "emails_ai AFTER INSERT ON emails": _INDEX_NEW + _renew_parties("new.id", "new.from_address") + _KEEP_ORDER,
    "emails_ad AFTER DELETE ON emails": _UNINDEX_OLD,
    "emails_au AFTER UPDATE OF id, subject, body, parties, extra ON emails": _UNINDEX_OLD + _INDEX_NEW,
    "emails_sender AFTER UPDATE OF from_address ON emails": _renew_parties("new.id", "new.from_address"),
    "emails_order AFTER UPDATE OF id, date ON emails": _KEEP_ORDER,
    "recipients_ai AFTER INSERT ON recipients": _renew_parties("new.email_id", "new.recipient_address"),
    "recipients_ad AFTER DELETE ON recipients": _renew_parties("old.email_id", "NULL"),
    "recipients_au AFTER UPDATE ON recipients": _renew_parties("old.email_id", "NULL")
    + _renew_parties("new.email_id", "new.recipient_address"),
}
"""Keep the tables consistent row by row; a bulk load comes before them."""


def party_word(address_id: int) -> str:
    """Return the party word of an address."""
    return f"{PARTY}{address_id}{PARTY}"


def parties_text(party_words: Iterable[str]) -> str:
    """Return the ``parties`` column of an email between the people with these words, without repeats."""
    words = dict.fromkeys(party_words)
    return (FILLER if len(words) > SNIPPET_WORDS else "") + " ".join(words)


def names_of(lines: str) -> dict[str, str]:
    """Return the display names by address of the column ``emails.names``."""
    parts = (line.partition("\t") for line in lines.split("\n"))
    return {address: name for address, _, name in parts if name}


def named(names: Mapping[str, str], address: str) -> str:
    """Return an address with its name, if it has one: ``Ann Lee <ann@x.org>``."""
    return f"{name} <{address}>" if (name := names.get(address)) else address


def clean_text(text: str) -> str:
    """Return text that can be stored, without NUL (which ends a text in SQLite), ``PARTY`` and lone surrogates."""
    if text.isascii() and "\0" not in text:
        return text
    return text.translate({ord(PARTY): "\ufffd", 0: None}).encode("utf-8", "replace").decode("utf-8")


# -- files ------------------------------------------------------------------------------------------------------------

SCHEMA_VERSION = 9  # incremented whenever older databases can no longer be read
HOW_DATABASES_CHANGE: Final = "gen-db --append and --overwrite change a database: keep a copy of the old one."
"""The hint if a database has changed since a run was started on it."""
SQLITE_ERRORS: Final = (sqlite3.Error, DBAPIError)  # SQLite's errors as the driver and as Core raise them
OTHER_FILE = "Name another file with --db."
MARK = "emailrl "  # the start of ``written_by`` in ``meta``, by which every database that gen-db wrote is recognized
_REBUILD = "Name another file with --db, or move this one away and build one with emailrl gen-db."
LOCK_END: Final = ".gen-db-lock"
_HEADER = b"SQLite format 3\0"
_MAPPED_BYTES = 2147418112  # of a file: SQLite's maximum
_CHECK_STEPS = 100_000  # of SQLite's virtual machine between two checks for Ctrl-C, about a millisecond
_LOADING = ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE", "cache_size = -65536")
_REBUILD_OLD = "Build it again: emailrl gen-db --db {} --overwrite (--source names the mail)."
_NAMES = select(sqlite_master.c.name)
_NOTED = select(meta.c.value).where(meta.c.key == bindparam("key"))


def connect(db: Path, *, mapped: bool = True) -> Connection:
    """Return a read-only connection to a database written by ``gen-db``. ``mapped`` reads the file through a memory
    map: searches are a tenth faster, but reading all of it counts the file as resident memory. ``EmailRLError`` if the
    file is missing or damaged, ``UsageError`` if it is something else."""
    if not db.is_file():
        raise no_database(db)
    check_header(db)
    if what := not_a_file(journal := db.with_name(f"{db.name}-journal")):  # SQLite would wait for a pipe's writer
        raise UsageError(f"{journal} is {what}.", "Remove it.")
    with reading(db):
        pragmas = ("query_only = ON", f"mmap_size = {_MAPPED_BYTES if mapped else 0}")
        connection = _engine(db.absolute(), "mode=ro", pragmas).connect()
        try:
            names = set(connection.scalars(_NAMES))
            if "meta" not in names or not str(noted(connection, "written_by")).startswith(MARK):
                what = "was not written by emailrl" if names else "is empty"
                raise UsageError(f"The database {db} {what}.", _REBUILD)
            version, own = (noted(connection, "schema_version") or "").rjust(9), str(SCHEMA_VERSION).rjust(9)
            if version != own:
                age, hint = ("a newer", "Upgrade emailrl.") if version > own else ("an older", _REBUILD_OLD.format(db))
                raise UsageError(f"The database {db} was written by {age} version of emailrl.", hint)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def opened(db: Path) -> Iterator[Connection]:
    """Open a connection with ``connect`` for the block; SQLite's errors in it are raised as by ``reading``."""
    with reading(db), connect(db) as connection:
        yield connection


def locked(db: Path) -> Lock:
    """Lock a database for the command that writes it; EmailRLError if another one does."""
    try:
        return Lock(db.with_name(f"{db.name}{LOCK_END}"))
    except BlockingIOError:
        raise EmailRLError(f"Another gen-db or forget is writing {db}.", "Wait for it to finish.") from None


def connect_for_loading(path: Path) -> Connection:
    """Return a connection for bulk loading, without a journal, since an unfinished file is discarded."""
    return _engine(path.absolute(), "mode=rw", _LOADING).connect()


def driver(connection: Connection) -> sqlite3.Connection:
    """Return the driver's connection of a SQLAlchemy connection; it begins no transaction."""
    return cast(sqlite3.Connection, connection.connection.driver_connection)


@lru_cache(maxsize=16)
def _engine(path: Path, query: str, pragmas: tuple[str, ...] = ()) -> Engine:
    """The engine of a file; it caches compiled statements but no connection, since the file may be replaced."""
    engine = create_engine(
        URL.create("sqlite", database=f"file:{quote(os.fsencode(path))}").update_query_string(f"uri=true&{query}"),
        poolclass=NullPool,
        connect_args={"isolation_level": None, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: ConnectionPoolEntry) -> None:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
        # Python's signal handlers run only in Python code, so this also lets one raise and interrupt the query.
        connection.set_progress_handler(is_cancelled, _CHECK_STEPS)

    return engine


def is_cancelled() -> bool:
    """Whether the asyncio task that runs the query is cancelled: on Ctrl-C, asyncio does that instead of raising."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return False
    return task is not None and task.cancelling() > 0


def noted(connection: Connection, key: str) -> str | None:
    """Return the value of ``key`` in the table ``meta``."""
    return connection.scalar(_NOTED, {"key": key})


def check_header(db: Path) -> None:
    """Raise ``UsageError`` for a file that is neither empty nor an SQLite database, and so must not be replaced."""
    try:
        with db.open("rb") as file:
            start = file.read(len(_HEADER))
    except OSError as error:
        raise UsageError(f"{db} cannot be read: {error.strerror or error}.", OTHER_FILE) from error
    if start and start != _HEADER:
        raise UsageError(f"{db} cannot be read as a mail database: file is not a database.", _REBUILD)


def check_replaceable(db: Path) -> None:
    """Raise ``UsageError`` unless the file is empty, or a database without anything in it or one that gen-db wrote. No
    locks or journals are made: the file may belong to another program."""
    try:
        with _engine(db.absolute(), "mode=ro&immutable=1").connect() as connection:
            names = set(connection.scalars(_NAMES))
            is_ours = "meta" in names and str(noted(connection, "written_by")).startswith(MARK)
    except SQLITE_ERRORS as error:
        raise UsageError(f"The database {db} cannot be read: {reason(error)}.", _REBUILD) from error
    if names and not is_ours:
        raise UsageError(f"The database {db} was not written by emailrl.", _REBUILD)


@contextmanager
def reading(db: Path) -> Iterator[None]:
    """Turn SQLite's errors on a damaged database into an ``EmailRLError`` with the remedy, and those of a query that
    Ctrl-C interrupted into KeyboardInterrupt."""
    try:
        yield
    except SQLITE_ERRORS as error:
        if error_code(error) == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from None
        raise EmailRLError(f"The database {db} cannot be read: {reason(error)}.", _REBUILD) from error


def error_code(error: sqlite3.Error | DBAPIError) -> int:
    """Return SQLite's primary error code; 0 if it has none."""
    return getattr(error.orig if isinstance(error, DBAPIError) else error, "sqlite_errorcode", 0) & 0xFF


def reason(error: sqlite3.Error | DBAPIError) -> str:
    """Return SQLite's own message, without the statement that SQLAlchemy adds."""
    return str(error.orig if isinstance(error, DBAPIError) else error)


def no_database(db: Path) -> EmailRLError:
    """Return the error for a missing database."""
    to = f" (a broken link to {os.readlink(db)})" if db.is_symlink() else ""
    return UsageError(f"No such mail database: {db}{to}.", how_to_get(db), "no-database")


def how_to_get(db: Path) -> str:
    """Return what to do about a missing database: name another of the same folder, or build one."""
    if others := sorted(other.name for other in db.parent.glob("*.db") if other != db):
        return f"Name one with --db or EMAILRL_DB; {db.parent} has {', '.join(others)}."
    how = "Index mail: emailrl gen-db --source PATH; or the demo's: emailrl gen-db --source demo --db data/demo.db"
    return f"{how}. If there is one elsewhere, name it with --db."


def database_fingerprint(db: Path) -> str:
    """Return the fingerprint of a database's content, as recorded by ``gen-db``. Raises as ``connect``."""
    with opened(db) as connection:
        return noted(connection, "fingerprint") or ""


def first_day(db: Path, inbox: str) -> str | None:
    """Return the date of the oldest email sent or received by an address, as in ``last_day``."""
    received = select(recipients.c.email_id).where(recipients.c.recipient_address == inbox)
    is_own = or_(emails.c.from_address == inbox, emails.c.id.in_(received))
    with opened(db) as connection:
        return (connection.scalar(select(func.min(emails.c.date)).where(is_own)) or "")[:10] or None


def last_day(db: Path) -> str | None:
    """Return the date of the newest email, ``YYYY-MM-DD`` in UTC, or None without any. Raises as ``connect``."""
    with opened(db) as connection:
        return (connection.scalar(select(func.max(emails.c.date))) or "")[:10] or None
