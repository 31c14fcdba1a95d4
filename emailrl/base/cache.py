"""Replies of servers, kept in a SQLite file as soon as they arrive, so that nothing is paid for twice."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from emailrl.base.disk import check_cache
from emailrl.base.errors import UsageError


class ReplyCache:
    """JSON values by key; threads and processes share only the file. UsageError names the setting ``option``."""

    def __init__(self, path: Path, option: str) -> None:
        check_cache(path, option)
        if path.is_file() and _is_foreign(path):
            raise UsageError(f"The cache {path} cannot be used: it is another program's database.", f"Set {option}.")
        self._path, self._option = path, option

    def get(self, key: str) -> Any:
        """Return the value stored under ``key``, or None; does not create the file."""
        if not self._path.exists():
            return None
        with self._opened() as connection:
            row = connection.execute("SELECT value FROM kept WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, model: str, value: Any) -> None:
        """Store a value unless there is one already."""
        with self._opened() as connection:
            row = (key, model, json.dumps(value))
            connection.execute("INSERT OR IGNORE INTO kept (key, model, value) VALUES (?, ?, ?)", row)

    def prepare(self) -> None:
        """Create the file, so that an unwritable path is found before the first request is paid for."""
        with self._opened() as connection:
            connection.execute("BEGIN IMMEDIATE")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=30)) as connection, connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, model TEXT, value TEXT, "
                    "created_at TEXT DEFAULT CURRENT_TIMESTAMP) WITHOUT ROWID"
                )
                yield connection
        except (OSError, sqlite3.Error) as error:
            raise UsageError(f"The cache {self._path} cannot be used: {error}.", f"Set {self._option}.") from error


def _is_foreign(path: Path) -> bool:
    """Whether a database has anything but our table. It is read without locks, which would change files beside it."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as connection:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info('kept')")]
    except sqlite3.Error:  # opening it says what is wrong
        return False
    return bool(names) and (names, columns) != ({"kept"}, ["key", "model", "value", "created_at"])
