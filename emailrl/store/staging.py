"""The two steps of a bulk load: mails as they come into a staging file, then newest first into the database."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from emailrl import __version__
from emailrl.store.connection import SCHEMA_VERSION
from emailrl.store.parties import parties_text
from emailrl.store.schema import create_indexes, create_tables
from emailrl.store.sieve import Mail

_FLUSH_MAILS = 1000
_INDEX_MAILS = 20_000
_CACHE_KIB = 64 * 1024
_FTS_HASH_BYTES = 32 * 1024 * 1024
_FTS_DEFAULTS = {"hashsize": 1024 * 1024, "automerge": 4}

_STAGING = """
    CREATE TABLE mail(
        n INTEGER PRIMARY KEY, message_id, subject, from_address, date, body, file_name, people, parties
    )"""


class Stage:
    """Mails on their way into a database; ``write`` ends it."""

    def __init__(self, path: Path, progress: Callable[[str, int, int | None], None] | None = None) -> None:
        self.path = path
        self.count = 0
        self._kept = self._kept_recipients = self._recipients = 0
        self._progress = progress
        self._connection = _connect(path)
        self._connection.execute(_STAGING)
        self._connection.execute("BEGIN")
        self._mails: list[tuple[object, ...]] = []
        self._addresses: dict[str, int] = {}
        self._fingerprint = 0

    def keep(self) -> None:
        """Count all mails so far as kept from an earlier build, not added by this one."""
        self._kept, self._kept_recipients = self.count, self._recipients

    @property
    def added(self) -> int:
        """Mails added since ``keep``."""
        return self.count - self._kept

    @property
    def added_recipients(self) -> int:
        """Rows of recipients added since ``keep``."""
        return self._recipients - self._kept_recipients

    def add(self, mail: Mail) -> None:
        """Stage one mail."""
        self.count += 1
        people = mail.people.split("\n") if mail.people else []
        parties = [mail.from_address] if mail.from_address else []
        parties += [line.partition(" ")[2] for line in people]
        self._mails.append((self.count, *mail[:7], parties_text(map(self._number, parties))))
        self._recipients += len(people)
        # A sum does not depend on the order that mails come in.
        self._fingerprint += int.from_bytes(mail.digest, "big")
        if len(self._mails) >= _FLUSH_MAILS:
            self._flush()

    def _number(self, address: str) -> int:
        return self._addresses.setdefault(address, len(self._addresses) + 1)

    def _flush(self) -> None:
        self._connection.executemany(f"INSERT INTO mail VALUES ({', '.join('?' * 9)})", self._mails)
        self._mails.clear()

    def close(self) -> None:
        """Leave the staging file."""
        self._connection.close()

    def write(self, path: Path) -> None:
        """Write the whole database: mails by date, newest first, then by Message-ID."""
        self._flush()
        self._connection.execute("COMMIT")
        self._connection.close()
        connection = _connect(path)
        try:
            create_tables(connection)
            connection.execute("ATTACH ? AS staging", (str(self.path),))
            for pragma in ("journal_mode = OFF", "synchronous = OFF"):  # an attached file has its own
                connection.execute(f"PRAGMA staging.{pragma}")
            connection.execute("CREATE TABLE staging.ranked AS SELECT n FROM mail ORDER BY date DESC, message_id DESC")
            connection.execute("BEGIN")
            connection.execute(
                "INSERT INTO emails SELECT r.rowid, message_id, subject, from_address, date, body, file_name, parties "
                "FROM staging.ranked r CROSS JOIN staging.mail m ON m.n = r.n ORDER BY r.rowid"
            )
            connection.executemany("INSERT INTO recipients VALUES (?, ?, ?)", self._recipient_rows(connection))
            connection.executemany("INSERT INTO addresses(address, id) VALUES (?, ?)", self._addresses.items())
            self._index(connection)
            create_indexes(connection)
            connection.executemany("INSERT INTO meta VALUES (?, ?)", self._meta().items())
            connection.execute("COMMIT")
        finally:
            connection.close()

    def _recipient_rows(self, connection: sqlite3.Connection) -> Iterator[tuple[int, str, str]]:
        for number, people in connection.execute(
            "SELECT r.rowid, people FROM staging.ranked r CROSS JOIN staging.mail m ON m.n = r.n "
            "WHERE people <> '' ORDER BY r.rowid"
        ):
            for line in people.split("\n"):
                kind, _, address = line.partition(" ")
                yield number, address, kind

    def _index(self, connection: sqlite3.Connection) -> None:
        for key, value in {"hashsize": _FTS_HASH_BYTES, "automerge": 0}.items():
            connection.execute("INSERT INTO emails_fts(emails_fts, rank) VALUES (?, ?)", (key, value))
        for first in range(1, self.count + 1, _INDEX_MAILS):
            if self._progress:
                self._progress("index", first - 1, self.count)
            connection.execute(
                "INSERT INTO emails_fts(rowid, subject, body, parties) "
                "SELECT id, subject, body, parties FROM emails WHERE id >= ? AND id < ?",
                (first, first + _INDEX_MAILS),
            )
        connection.execute("INSERT INTO emails_fts(emails_fts) VALUES ('optimize')")
        if self._progress:
            self._progress("index", self.count, self.count)
        for key, value in _FTS_DEFAULTS.items():
            connection.execute("INSERT INTO emails_fts(emails_fts, rank) VALUES (?, ?)", (key, value))

    def _meta(self) -> dict[str, str]:
        return {
            "schema_version": str(SCHEMA_VERSION),
            "fingerprint": f"{self._fingerprint % (1 << 128):032x}",
            "emails": str(self.count),
            "ids_follow_dates": "1",
            "written_by": f"emailrl {__version__}",
        }


def _connect(path: Path) -> sqlite3.Connection:
    """A connection for bulk loading: no journal, since a file that is not finished is thrown away."""
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in (
        "journal_mode = OFF",
        "synchronous = OFF",
        "locking_mode = EXCLUSIVE",
        f"cache_size = -{_CACHE_KIB}",
    ):
        connection.execute(f"PRAGMA {pragma}")
    return connection
