"""Reads the emails of an existing database for a build."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from sqlalchemy import ColumnElement, Connection, func, or_, select, text

from emailrl.mail.connection import opened
from emailrl.mail.schema import addresses, emails, recipients
from emailrl.mail.sieve import DATE_FORMAT, Keys, keys_of
from emailrl.mail.sources import RawEmail


class Staying(NamedTuple):
    """The emails of a database that keep their ids when others are added: those with ids in this range."""

    above: int
    below: int


NONE_STAYS: Final = Staying(-1, 0)

_PAGE_MAILS = 200


def stored_emails(db: Path, staying: Staying = NONE_STAYS) -> Iterator[RawEmail]:
    """Yield the emails of a database except those ``staying``, by descending id: oldest first.

    Raises ``UsageError`` if the file is not a mail database, ``EmailRLError`` if it is damaged.
    """
    columns = (emails.c[name] for name in ("id", "message_id", "subject", "from_address", "date", "body", "file_name"))
    mails = select(*columns).order_by(emails.c.id.desc())
    with opened(db, mapped=False) as connection:
        for part in (emails.c.id >= staying.below, emails.c.id <= staying.above):
            for page in connection.execute(mails.where(part)).partitions(_PAGE_MAILS):
                people = recipients_of(connection, recipients.c.email_id.between(page[-1].id, page[0].id))
                for key, message_id, subject, sender, date, body, file_name in page:
                    lists: dict[str, list[str]] = {"to": [], "cc": [], "bcc": []}
                    for address, kind in people[key]:
                        lists[kind].append(address)
                    to, cc, bcc = lists.values()
                    yield RawEmail(message_id, subject, sender, to, cc, bcc, _moment(key, date), body, file_name)


def _moment(key: int, date: str | None) -> datetime | None:
    try:
        return None if date is None else datetime.strptime(date, DATE_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise sqlite3.DataError(f"the date of email {key} is corrupt") from error


def recipients_of(connection: Connection, which: ColumnElement[bool]) -> defaultdict[int, list[tuple[str, str]]]:
    """Return addresses and their types (to, cc, bcc) by email id, in the order in which they were written."""
    people: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    rows = select(recipients.c.email_id, recipients.c.recipient_address, recipients.c.recipient_type).where(which)
    for key, address, kind in connection.execute(rows.order_by(recipients.c.email_id, text("rowid"))):
        people[key].append((address, kind))
    return people


def stored_keys(db: Path) -> Iterator[Keys]:
    """Yield the keys of every email of a database; raises the errors of ``stored_emails``."""
    with opened(db, mapped=False) as connection:
        columns = (emails.c[name] for name in ("message_id", "subject", "from_address", "body", "date"))
        for row in connection.execute(select(*columns)):
            yield keys_of(*row)


def stored_addresses(db: Path) -> dict[str, int]:
    """Return the numbers of a database's addresses; raises the errors of ``stored_emails``."""
    with opened(db, mapped=False) as connection:
        return dict(connection.execute(select(addresses.c.address, addresses.c.id)).all())


def first_day(db: Path, inbox: str) -> str | None:
    """Return the date of the oldest email sent or received by an address, as in ``last_day``."""
    received = select(recipients.c.email_id).where(recipients.c.recipient_address == inbox)
    with opened(db) as connection:
        mine = or_(emails.c.from_address == inbox, emails.c.id.in_(received))
        oldest = connection.scalar(select(func.min(emails.c.date)).where(mine))
    return oldest[:10] if oldest else None


def last_day(db: Path) -> str | None:
    """Return the date of the newest email, ``YYYY-MM-DD`` in UTC; None if no email has a date.

    Raises the errors of ``stored_emails``.
    """
    with opened(db) as connection:
        newest = connection.scalar(select(func.max(emails.c.date)))
    return newest[:10] if newest else None
