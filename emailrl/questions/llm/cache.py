"""Stores replies on disk as soon as they arrive, so that nothing is paid for twice."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from emailrl.disk import check_cache
from emailrl.errors import UsageError


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's raw reply to one prompt, and its billed tokens."""

    text: str
    tokens_in: int
    tokens_out: int


class ReplyCache:
    """Replies in a SQLite file by ``Batch.cache_key``; raises UsageError if the file cannot be used.

    Each access opens its own connection, so that several runs can share the file.
    """

    def __init__(self, path: Path) -> None:
        check_cache(path, "GENERATOR_CACHE")
        self._path = path

    def get(self, key: str) -> Reply | None:
        """Return the reply stored under ``key``, or None; does not create the file."""
        if not self._path.exists():
            return None
        try:
            with closing(self._open()) as connection:
                row = connection.execute(
                    "SELECT text, tokens_in, tokens_out FROM replies WHERE key = ?", (key,)
                ).fetchone()
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        return None if row is None else Reply(*row)

    def put(self, key: str, model: str, reply: Reply) -> None:
        """Store a reply unless there is one already."""
        try:
            with closing(self._open()) as connection, connection:
                connection.execute(
                    "INSERT OR IGNORE INTO replies (key, model, text, tokens_in, tokens_out) VALUES (?, ?, ?, ?, ?)",
                    (key, model, reply.text, reply.tokens_in, reply.tokens_out),
                )
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def prepare(self) -> None:
        """Create the file, so that an unwritable path is found before the first prompt is paid for."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS writable (one INTEGER)")
                connection.execute("DROP TABLE writable")
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=30)
        connection.execute(
            "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, model TEXT, text TEXT, tokens_in INTEGER, "
            "tokens_out INTEGER, created_at TEXT DEFAULT CURRENT_TIMESTAMP) WITHOUT ROWID"
        )
        return connection

    def _unusable(self, error: Exception) -> UsageError:
        return UsageError(f"The reply cache {self._path} cannot be used: {error}.", "Set GENERATOR_CACHE.")
