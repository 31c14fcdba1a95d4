"""The mails of a database that is already there, as a build reads them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from emailrl.store.connection import connect, reading
from emailrl.store.sieve import DATE_FORMAT, Keys, keys_of
from emailrl.store.sources import RawEmail


class Staying(NamedTuple):
    """The mails of a database that keep their ids when others are added: those with ids between these two."""

    above: int
    below: int


NONE_STAYS: Final = Staying(-1, 0)


def stored_emails(db: Path, staying: Staying = NONE_STAYS) -> Iterator[RawEmail]:
    """The mails of a database but those ``staying``, by falling id: oldest first.

    Raises ``UsageError`` where it is none of ours, ``EmailRLError`` where it is damaged.
    """
    with _opened(db) as connection:
        people = connection.cursor()
        mails = "SELECT id, message_id, subject, from_address, date, body, file_name FROM emails"
        for key, message_id, subject, sender, date, body, file_name in chain(
            connection.execute(f"{mails} WHERE id >= ? ORDER BY id DESC", (staying.below,)),
            connection.execute(f"{mails} WHERE id <= ? ORDER BY id DESC", (staying.above,)),
        ):
            lists: dict[str, list[str]] = {"to": [], "cc": [], "bcc": []}
            for address, kind in people.execute(
                "SELECT recipient_address, recipient_type FROM recipients WHERE email_id = ? ORDER BY rowid", (key,)
            ):
                lists[kind].append(address)
            try:
                moment = None if date is None else datetime.strptime(date, DATE_FORMAT).replace(tzinfo=UTC)
            except ValueError as error:
                raise sqlite3.DataError(f"the date of mail {key} is not as it was written") from error
            yield RawEmail(message_id, subject, sender, lists["to"], lists["cc"], lists["bcc"], moment, body, file_name)


def stored_keys(db: Path) -> Iterator[Keys]:
    """The keys of every mail of a database; raises as ``stored_emails``."""
    with _opened(db) as connection:
        for row in connection.execute("SELECT message_id, subject, from_address, body FROM emails"):
            yield keys_of(*row)


def stored_addresses(db: Path) -> dict[str, int]:
    """The numbers of a database's addresses; raises as ``stored_emails``."""
    with _opened(db) as connection:
        return dict(connection.execute("SELECT address, id FROM addresses"))


@contextlib.contextmanager
def _opened(db: Path) -> Iterator[sqlite3.Connection]:
    with reading(db), contextlib.closing(connect(db, mapped=False)) as connection:
        yield connection
