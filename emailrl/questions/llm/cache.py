"""Stores replies on disk as soon as they arrive, so that nothing is paid for twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from emailrl.base.disk import check_cache
from emailrl.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's raw reply to one prompt, and its billed tokens."""

    text: str
    tokens_in: int
    tokens_out: int


class ReplyCache:
    """Replies in a SQLite file by ``Batch.cache_key``; raises UsageError if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        check_cache(path, "GENERATOR_CACHE")
        self._path = path

    def get(self, key: str) -> Reply | None:
        """Return the reply stored under ``key``, or None; does not create the file."""
        if not self._path.exists():
            return None
        with self._opened() as connection:
            row = connection.execute("SELECT text, tokens_in, tokens_out FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else Reply(*row)

    def put(self, key: str, model: str, reply: Reply) -> None:
        """Store a reply unless there is one already."""
        with self._opened() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO replies (key, model, text, tokens_in, tokens_out) VALUES (?, ?, ?, ?, ?)",
                (key, model, *astuple(reply)),
            )

    def prepare(self) -> None:
        """Create the file, so that an unwritable path is found before the first prompt is paid for."""
        with self._opened() as connection:
            connection.execute("BEGIN IMMEDIATE")

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """A connection for one access, so that several runs can share the file."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=30)) as connection, connection:
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, model TEXT, text TEXT, "
                    "tokens_in INTEGER, tokens_out INTEGER, created_at TEXT DEFAULT CURRENT_TIMESTAMP) WITHOUT ROWID"
                )
                yield connection
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"The reply cache {self._path} cannot be used: {error}.", "Set GENERATOR_CACHE."
            ) from error
