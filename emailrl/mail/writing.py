"""Writes staged emails into the database: all of it at once, or new emails before and after the existing ones.

Ids count from the newest email, so newer emails get ids below all others, and undated ones, which come last, ids above.
Either way the full-text index receives emails in the order of their ids, which is fastest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, delete, func, insert, or_, select

from emailrl import __version__
from emailrl.mail.connection import MARK, SCHEMA_VERSION, connect_for_loading, driver
from emailrl.mail.schema import (
    addresses,
    create_indexes,
    create_tables,
    create_triggers,
    drop_triggers,
    emails,
    meta,
    recipients,
    staged,
)
from emailrl.mail.staging import Stage
from emailrl.mail.stored import Staying

Progress = Callable[[str, int, int | None], None]
"""Called with the phase (``read`` or ``index``), the messages done in it, and their total if known."""

_INDEX_MAILS = 20_000
_LOADING = {"hashsize": 32 * 1024 * 1024, "automerge": 0, "usermerge": 2}
_DEFAULTS = {"hashsize": 1024 * 1024, "automerge": 4, "usermerge": 4}
_MERGE_PAGES = 100_000
_FINGERPRINTS = 1 << 128


def write_database(path: Path, stage: Stage, progress: Progress | None = None) -> None:
    """Write the entire database: emails by date, newest first, then by Message-ID."""
    stage.finish()
    with _loading(path, stage) as connection:
        create_tables(connection)
        dated = _dated(connection)
        _load(connection, stage, dated, dated, progress)
        _add_addresses(connection, stage.addresses.items())
        connection.exec_driver_sql("INSERT INTO emails_fts(emails_fts) VALUES ('optimize')")
        create_indexes(connection)
        create_triggers(connection)
        _note(connection, stage.tally.fingerprint)


def add_to_database(
    path: Path, stage: Stage, staying: Staying, fingerprint: int, progress: Progress | None = None
) -> None:
    """Add the staged emails to the database ``path``, replacing all that are not ``staying``.

    Requires that dated staged emails are newer than all that stay, and that undated ones have higher Message-IDs.
    ``fingerprint`` is added to the existing one.
    """
    stage.finish()
    with _loading(path, stage) as connection:
        drop_triggers(connection)
        known = connection.execute(select(func.coalesce(func.max(addresses.c.id), 0))).scalar_one()
        before, last = func.min(emails.c.id) - 1, func.max(emails.c.id)
        ends = select(func.coalesce(before, staying.above), func.coalesce(last, staying.above))
        stay = (emails.c.id > staying.above, emails.c.id < staying.below)
        low, high = connection.execute(ends.where(*stay)).one()
        connection.exec_driver_sql(
            "INSERT INTO emails_fts(emails_fts, rowid, subject, body, parties) "
            "SELECT 'delete', id, subject, body, parties FROM emails WHERE id <= ? OR id >= ?",
            tuple(staying),
        )
        for key in (recipients.c.email_id, emails.c.id):
            connection.execute(delete(key.table).where(or_(key <= staying.above, key >= staying.below)))
        _load(connection, stage, low, high, progress)
        _add_addresses(connection, (item for item in stage.addresses.items() if item[1] > known))
        _merge(connection)
        create_triggers(connection)
        old = connection.execute(select(meta.c.value).where(meta.c.key == "fingerprint")).scalar_one()
        _note(connection, int(old, 16) + fingerprint)


@contextmanager
def _loading(path: Path, stage: Stage) -> Iterator[Connection]:
    """One transaction on ``path``, with the ranked staged emails attached."""
    with connect_for_loading(path) as connection:
        cursor = driver(connection)  # Core would begin the transaction
        cursor.execute("ATTACH ? AS staging", (os.fsencode(stage.path),))
        for pragma in ("journal_mode = OFF", "synchronous = OFF"):  # an attached file has its own
            cursor.execute(f"PRAGMA staging.{pragma}")
        cursor.execute("CREATE TABLE staging.ranked AS SELECT n FROM mail ORDER BY date DESC, message_id DESC")
        with connection.begin():
            yield connection


def _load(connection: Connection, stage: Stage, low: int, high: int, progress: Progress | None) -> None:
    """Insert the staged emails: dated ones with ids up to ``low``, undated ones with ids above ``high``."""
    dated, mails = _dated(connection), stage.tally.mails
    before, behind = low - dated, high - dated
    ranked = f"r.rowid + iif(r.rowid <= {dated}, {before}, {behind})"
    source = "staging.ranked r CROSS JOIN staging.mail m ON m.n = r.n"
    connection.exec_driver_sql(
        f"INSERT INTO emails SELECT {ranked}, message_id, subject, from_address, date, body, file_name, parties "
        f"FROM {source} ORDER BY r.rowid"
    )
    cursor = driver(connection)
    people = cursor.execute(f"SELECT {ranked}, people FROM {source} WHERE people <> '' ORDER BY r.rowid")
    cursor.executemany("INSERT INTO recipients VALUES (?, ?, ?)", _recipients(people))
    _configure(connection, _LOADING)
    done = 0
    for start, end in ((before, before + dated), (behind + dated, behind + mails)):
        for first in range(start + 1, end + 1, _INDEX_MAILS):
            if progress:
                progress("index", done, mails)
            last = min(first + _INDEX_MAILS - 1, end)
            connection.exec_driver_sql(
                "INSERT INTO emails_fts(rowid, subject, body, parties) "
                "SELECT id, subject, body, parties FROM emails WHERE id BETWEEN ? AND ?",
                (first, last),
            )
            done += last - first + 1
    if progress:
        progress("index", mails, mails)


def _dated(connection: Connection) -> int:
    """The number of staged emails with a date."""
    return connection.execute(select(func.count(staged.c.date))).scalar_one()


def _add_addresses(connection: Connection, numbers: Iterable[tuple[str, int]]) -> None:
    driver(connection).executemany("INSERT INTO addresses(address, id) VALUES (?, ?)", numbers)


def _recipients(rows: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    for number, people in rows:
        for line in people.split("\n"):
            kind, _, address = line.partition(" ")
            yield number, address, kind


def _configure(connection: Connection, values: dict[str, int]) -> None:
    for name, value in values.items():
        connection.exec_driver_sql("INSERT INTO emails_fts(emails_fts, rank) VALUES (?, ?)", (name, value))


def _merge(connection: Connection) -> None:
    """Merge index segments of similar size in pairs.

    Every segment slows down searches a little; merging keeps them few without rewriting the entire index each time.
    """
    cursor, done = driver(connection), -1
    while cursor.total_changes - done >= 2:  # as FTS5 says that there was something to merge
        done = cursor.total_changes
        cursor.execute("INSERT INTO emails_fts(emails_fts, rank) VALUES ('merge', ?)", (_MERGE_PAGES,))


def _note(connection: Connection, fingerprint: int) -> None:
    _configure(connection, _DEFAULTS)
    values = {
        "schema_version": str(SCHEMA_VERSION),
        "fingerprint": f"{fingerprint % _FINGERPRINTS:032x}",
        "emails": str(connection.scalar(select(func.count()).select_from(emails))),
        "ids_follow_dates": "1",
        "written_by": f"{MARK}{__version__}",
    }
    rows = [{"key": key, "value": value} for key, value in values.items()]
    connection.execute(insert(meta).prefix_with("OR REPLACE"), rows)
