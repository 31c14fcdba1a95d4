"""Writes a build's emails into the database file: a new one, or a copy of the old one.

Ids count from the newest email, so emails are staged in a file of their own until all are known. Those of the old
database keep their ids where they can: newer emails get ids below all others, and undated ones, which come last, ids
above. The others are staged again and change their ids; if there are many of them (old mail is added), or if ids do not
follow dates, all are written anew. Either way the full-text index receives emails in the order of their ids, which is
fastest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, tuple_
from sqlalchemy.schema import CreateTable

from emailrl import __version__
from emailrl.mail.connection import MARK, SCHEMA_VERSION, connect, connect_for_loading, driver, noted
from emailrl.mail.parties import parties_text
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
from emailrl.mail.sieve import Keys, SiftedMail, keys_of

Progress = Callable[[str, int, int | None], None]
"""Called with the phase (``read`` or ``index``), the messages done in it, and their total if known."""

_LARGEST_SHARE = 4
"""All emails are written anew if more than one in this many would change its id, but not for ``_FEW_MAILS``."""
_FEW_MAILS = 1000
_DATES_END = "~"
"""Sorts after all dates."""
_FLUSH_MAILS = 1000
_INDEX_MAILS = 20_000
_LOADING = {"hashsize": 32 * 1024 * 1024, "automerge": 0, "usermerge": 2}
_DEFAULTS = {"hashsize": 1024 * 1024, "automerge": 4, "usermerge": 4}
_MERGE_PAGES = 100_000
_FINGERPRINTS = 1 << 128

_STAGE = f"INSERT INTO {staged.name} VALUES (NULL, {', '.join('?' * (len(staged.columns) - 1))})"
_STAGED_BEFORE = """
    SELECT message_id, subject, from_address, date, body, file_name, coalesce((
        SELECT group_concat(recipient_type || ' ' || recipient_address, char(10))
        FROM (SELECT * FROM recipients WHERE email_id = emails.id ORDER BY rowid)), ''), parties
    FROM emails WHERE id <= ? OR id >= ?"""
"""The emails of a database in the columns of ``staged``, without those between two ids."""


class _Staying(NamedTuple):
    """The emails of the old database that keep their ids: those with ids in this range."""

    above: int
    below: int


class Stage:
    """The emails to be added to the database ``old``, or to a new one, in a temporary file."""

    def __init__(self, path: Path, old: Path | None = None) -> None:
        """Raises the errors of ``connect`` for ``old``."""
        self.path = path
        self.mails = 0
        self.recipients = 0
        self.fingerprint = 0
        """Sum of the digests of the old and the added emails, which does not depend on their order."""
        self.addresses: dict[str, int] = {}
        """The number of every address, old and new."""
        self._old = connect(old, mapped=False) if old else None
        if self._old:
            self.fingerprint = int(noted(self._old, "fingerprint") or "0", 16)
            self.addresses = dict(self._old.execute(select(addresses.c.address, addresses.c.id)).all())
        self._next_number = max(self.addresses.values(), default=0) + 1
        self._connection = connect_for_loading(path)
        self._connection.execute(CreateTable(staged))
        self._mails: list[tuple[object, ...]] = []

    def old_keys(self) -> Iterator[Keys]:
        """Yield the keys of every old email."""
        if self._old:
            columns = (emails.c[name] for name in ("message_id", "subject", "from_address", "body", "date"))
            for row in self._old.execute(select(*columns)):
                yield keys_of(*row)

    def add(self, mail: SiftedMail) -> None:
        """Stage a new email."""
        people = mail.people.split("\n") if mail.people else []
        parties = [mail.from_address] if mail.from_address else []
        parties += [line.partition(" ")[2] for line in people]
        self._mails.append((*mail[:7], parties_text(map(self._number, parties))))
        self.mails += 1
        self.recipients += len(people)
        self.fingerprint += int.from_bytes(mail.digest, "big")
        if len(self._mails) >= _FLUSH_MAILS:
            self._flush()

    def finish(self, path: Path) -> _Staying | None:
        """Stage the old emails that change their ids, and copy the old database to ``path`` if others keep theirs.

        Returns those that stay. The staging file is then complete and closed.
        """
        self._flush()
        staying = None
        if self._old:
            staying = self._staying(self._old)
            moving = driver(self._old).execute(_STAGED_BEFORE, staying or (-1, 0))
            driver(self._connection).executemany(_STAGE, moving)
            if staying:
                with connect_for_loading(path) as copy:
                    driver(self._old).backup(driver(copy))
        self._connection.commit()
        self.close()
        return staying

    def close(self) -> None:
        """Close the file and the old database."""
        self._connection.close()
        if self._old:
            self._old.close()

    def _staying(self, old: Connection) -> _Staying | None:
        """The old emails that are older than all new ones, and undated ones before them; None to write all anew."""
        if noted(old, "ids_follow_dates") is None:
            return None
        dated = select(staged.c.date, staged.c.message_id).where(staged.c.date.is_not(None))
        oldest = self._connection.execute(dated.order_by(staged.c.date, staged.c.message_id).limit(1)).first()
        last = self._connection.scalar(select(func.max(staged.c.message_id)).where(staged.c.date.is_(None)))
        newer = tuple_(emails.c.date, emails.c.message_id) > tuple_(*(oldest or (_DATES_END, "")))
        behind = and_(emails.c.date.is_(None), emails.c.message_id < (last or ""))
        number, low, high = func.count(), func.min(emails.c.id), func.max(emails.c.id)
        mails, first, end = old.execute(select(number, func.coalesce(low, 1), func.coalesce(high, 0))).one()
        num_newer, above = old.execute(select(number, func.coalesce(high, first - 1)).where(newer)).one()
        num_behind, below = old.execute(select(number, func.coalesce(low, end + 1)).where(behind)).one()
        is_few = num_newer + num_behind <= max(_FEW_MAILS, mails // _LARGEST_SHARE)
        return _Staying(above, below) if is_few else None

    def _number(self, address: str) -> int:
        number = self.addresses.setdefault(address, self._next_number)
        self._next_number += number == self._next_number
        return number

    def _flush(self) -> None:
        driver(self._connection).executemany(_STAGE, self._mails)
        self._mails.clear()


def write_database(path: Path, stage: Stage, progress: Progress | None = None) -> None:
    """Write the staged emails, and all of the old database, into the empty file ``path``.

    They are ordered by date, newest first, then by Message-ID, undated ones last.
    """
    staying = stage.finish(path)
    with _loading(path, stage) as connection:
        dated, mails = connection.execute(select(func.count(staged.c.date), func.count()).select_from(staged)).one()
        if staying is None:
            create_tables(connection)
            known, low, high = 0, dated, dated
        else:
            drop_triggers(connection)
            known = connection.execute(select(func.coalesce(func.max(addresses.c.id), 0))).scalar_one()
            low, high = _remove_others(connection, staying)
        _load(connection, dated, mails, low, high, progress)
        numbers = (item for item in stage.addresses.items() if item[1] > known)
        driver(connection).executemany("INSERT INTO addresses(address, id) VALUES (?, ?)", numbers)
        if staying is None:
            connection.exec_driver_sql("INSERT INTO emails_fts(emails_fts) VALUES ('optimize')")
            create_indexes(connection)
        else:
            _merge(connection)
        create_triggers(connection)
        _note(connection, stage.fingerprint)


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


def _remove_others(connection: Connection, staying: _Staying) -> tuple[int, int]:
    """Remove the emails that do not stay; return the id below all others, and the highest one."""
    connection.exec_driver_sql(
        "INSERT INTO emails_fts(emails_fts, rowid, subject, body, parties) "
        "SELECT 'delete', id, subject, body, parties FROM emails WHERE id <= ? OR id >= ?",
        staying,
    )
    for key in (recipients.c.email_id, emails.c.id):
        connection.execute(delete(key.table).where(or_(key <= staying.above, key >= staying.below)))
    ends = func.coalesce(func.min(emails.c.id) - 1, staying.above), func.coalesce(func.max(emails.c.id), staying.above)
    low, high = connection.execute(select(*ends)).one()
    return low, high


def _load(connection: Connection, dated: int, mails: int, low: int, high: int, progress: Progress | None) -> None:
    """Insert the staged emails: dated ones with ids up to ``low``, undated ones with ids above ``high``."""
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


def _recipients(rows: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
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
