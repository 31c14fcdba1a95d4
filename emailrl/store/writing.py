"""From the stage into the database: all of it written at once, or new mail put before and behind what is there.

Ids count from the newest mail, so newer mail takes the ids below all others, and mail without a date, which comes
last, those above. Either way the full-text index gets its mails in the order of their ids, which it is quickest at.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from emailrl import __version__
from emailrl.store.connection import SCHEMA_VERSION
from emailrl.store.schema import create_indexes, create_tables, create_triggers, drop_triggers
from emailrl.store.staging import Stage, connect_for_loading
from emailrl.store.stored import Staying

Progress = Callable[[str, int, int | None], None]
"""Called with the phase (``read`` or ``index``), the messages done in it, and their number where it is known."""

_INDEX_MAILS = 20_000
_LOADING = {"hashsize": 32 * 1024 * 1024, "automerge": 0, "usermerge": 2}
_DEFAULTS = {"hashsize": 1024 * 1024, "automerge": 4, "usermerge": 4}
_MERGE_PAGES = 100_000
_FINGERPRINTS = 1 << 128


def write_database(path: Path, stage: Stage, progress: Progress | None = None) -> None:
    """Write the whole database: mails by date, newest first, then by Message-ID."""
    stage.finish()
    with _loading(path, stage) as connection:
        create_tables(connection)
        dated = _dated(connection)
        _load(connection, stage, dated, dated, progress)
        connection.executemany("INSERT INTO addresses(address, id) VALUES (?, ?)", stage.addresses.items())
        connection.execute("INSERT INTO emails_fts(emails_fts) VALUES ('optimize')")
        create_indexes(connection)
        create_triggers(connection)
        _note(connection, stage.tally.fingerprint)


def add_to_database(
    path: Path, stage: Stage, staying: Staying, fingerprint: int, progress: Progress | None = None
) -> None:
    """Add the staged mails to the database ``path``, in place of all there that are not ``staying``.

    Right for a stage that is, where dates are given, newer than all that stays, and comes by Message-ID after it where
    none are. ``fingerprint`` is to be added to the one that stands there.
    """
    stage.finish()
    with _loading(path, stage) as connection:
        drop_triggers(connection)
        known = connection.execute("SELECT coalesce(max(id), 0) FROM addresses").fetchone()[0]
        low, high = connection.execute(
            "SELECT coalesce(min(id) - 1, ?), coalesce(max(id), ?) FROM emails WHERE id > ? AND id < ?",
            (staying.above, staying.above, *staying),
        ).fetchone()
        connection.execute(
            "INSERT INTO emails_fts(emails_fts, rowid, subject, body, parties) "
            "SELECT 'delete', id, subject, body, parties FROM emails WHERE id <= ? OR id >= ?",
            staying,
        )
        connection.execute("DELETE FROM recipients WHERE email_id <= ? OR email_id >= ?", staying)
        connection.execute("DELETE FROM emails WHERE id <= ? OR id >= ?", staying)
        _load(connection, stage, low, high, progress)
        new = [(address, number) for address, number in stage.addresses.items() if number > known]
        connection.executemany("INSERT INTO addresses(address, id) VALUES (?, ?)", new)
        _merge(connection)
        create_triggers(connection)
        old = connection.execute("SELECT value FROM meta WHERE key = 'fingerprint'").fetchone()[0]
        _note(connection, int(old, 16) + fingerprint)


@contextmanager
def _loading(path: Path, stage: Stage) -> Iterator[sqlite3.Connection]:
    """One transaction on ``path``, with the staged mails by rank attached."""
    with closing(connect_for_loading(path)) as connection:
        connection.execute("ATTACH ? AS staging", (os.fsencode(stage.path),))
        for pragma in ("journal_mode = OFF", "synchronous = OFF"):  # an attached file has its own
            connection.execute(f"PRAGMA staging.{pragma}")
        connection.execute("CREATE TABLE staging.ranked AS SELECT n FROM mail ORDER BY date DESC, message_id DESC")
        connection.execute("BEGIN")
        yield connection
        connection.execute("COMMIT")


def _load(connection: sqlite3.Connection, stage: Stage, low: int, high: int, progress: Progress | None) -> None:
    """Insert the staged mails: those with a date under ids that end at ``low``, the others under those that follow
    ``high``."""
    dated, mails = _dated(connection), stage.tally.mails
    before, behind = low - dated, high - dated
    ranked = f"r.rowid + iif(r.rowid <= {dated}, {before}, {behind})"
    staged = "staging.ranked r CROSS JOIN staging.mail m ON m.n = r.n"
    connection.execute(
        f"INSERT INTO emails SELECT {ranked}, message_id, subject, from_address, date, body, file_name, parties "
        f"FROM {staged} ORDER BY r.rowid"
    )
    people = connection.execute(f"SELECT {ranked}, people FROM {staged} WHERE people <> '' ORDER BY r.rowid")
    connection.executemany("INSERT INTO recipients VALUES (?, ?, ?)", _recipients(people))
    _configure(connection, _LOADING)
    done = 0
    for start, end in ((before, before + dated), (behind + dated, behind + mails)):
        for first in range(start + 1, end + 1, _INDEX_MAILS):
            if progress:
                progress("index", done, mails)
            last = min(first + _INDEX_MAILS - 1, end)
            connection.execute(
                "INSERT INTO emails_fts(rowid, subject, body, parties) "
                "SELECT id, subject, body, parties FROM emails WHERE id BETWEEN ? AND ?",
                (first, last),
            )
            done += last - first + 1
    if progress:
        progress("index", mails, mails)


def _dated(connection: sqlite3.Connection) -> int:
    """How many of the staged mails have a date."""
    return int(connection.execute("SELECT count(date) FROM staging.mail").fetchone()[0])


def _recipients(rows: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    for number, people in rows:
        for line in people.split("\n"):
            kind, _, address = line.partition(" ")
            yield number, address, kind


def _configure(connection: sqlite3.Connection, values: dict[str, int]) -> None:
    for name, value in values.items():
        connection.execute("INSERT INTO emails_fts(emails_fts, rank) VALUES (?, ?)", (name, value))


def _merge(connection: sqlite3.Connection) -> None:
    """Merge the index's segments of like size, two and two: each more of them costs every search a little, and so they
    stay few however often mail is added, without the whole index being rewritten each time."""
    done = -1
    while connection.total_changes - done >= 2:  # as FTS5 says that there was something to merge
        done = connection.total_changes
        connection.execute("INSERT INTO emails_fts(emails_fts, rank) VALUES ('merge', ?)", (_MERGE_PAGES,))


def _note(connection: sqlite3.Connection, fingerprint: int) -> None:
    _configure(connection, _DEFAULTS)
    meta = {
        "schema_version": str(SCHEMA_VERSION),
        "fingerprint": f"{fingerprint % _FINGERPRINTS:032x}",
        "emails": str(connection.execute("SELECT count(*) FROM emails").fetchone()[0]),
        "ids_follow_dates": "1",
        "written_by": f"emailrl {__version__}",
    }
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta.items())
