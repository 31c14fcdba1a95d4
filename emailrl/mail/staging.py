"""Stages emails on disk until all are known, as their ids follow their dates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.schema import CreateTable

from emailrl.mail.connection import connect_for_loading, driver
from emailrl.mail.parties import parties_text
from emailrl.mail.schema import staged
from emailrl.mail.sieve import SiftedMail

_FLUSH_MAILS = 1000
_INSERT = f"INSERT INTO {staged.name} VALUES ({', '.join('?' * len(staged.columns))})"


@dataclass
class StagedCounts:
    """Counts of staged emails."""

    mails: int = 0
    recipients: int = 0
    fingerprint: int = 0
    """Sum of the emails' digests, which does not depend on their order."""


class Stage:
    """Emails to be written into a database; ``addresses`` are the numbers of the addresses it already has."""

    def __init__(self, path: Path, addresses: dict[str, int] | None = None) -> None:
        self.path = path
        self.addresses = addresses or {}
        self._next_number = max(self.addresses.values(), default=0) + 1
        self._tally = StagedCounts()
        self._connection = connect_for_loading(path)
        self._connection.execute(CreateTable(staged))
        self._mails: list[tuple[object, ...]] = []

    @property
    def tally(self) -> StagedCounts:
        """Return the counts of what has been staged so far."""
        return replace(self._tally)

    def add(self, mail: SiftedMail) -> None:
        """Stage one email."""
        self._tally.mails += 1
        people = mail.people.split("\n") if mail.people else []
        parties = [mail.from_address] if mail.from_address else []
        parties += [line.partition(" ")[2] for line in people]
        self._mails.append((self._tally.mails, *mail[:7], parties_text(map(self._number, parties))))
        self._tally.recipients += len(people)
        self._tally.fingerprint += int.from_bytes(mail.digest, "big")
        if len(self._mails) >= _FLUSH_MAILS:
            self._flush()

    def oldest(self) -> tuple[str, str] | None:
        """Return date and Message-ID of the oldest email with a date."""
        self._flush()
        first = select(staged.c.date, staged.c.message_id).where(staged.c.date.is_not(None))
        row = self._connection.execute(first.order_by(staged.c.date, staged.c.message_id).limit(1)).first()
        return None if row is None else (row.date, row.message_id)

    def last_undated(self) -> str | None:
        """Return the highest Message-ID of the emails without a date."""
        self._flush()
        return self._connection.scalar(select(func.max(staged.c.message_id)).where(staged.c.date.is_(None)))

    def finish(self) -> None:
        """Flush the buffer and close the file; it can then be read."""
        self._flush()
        self._connection.commit()
        self._connection.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _number(self, address: str) -> int:
        number = self.addresses.setdefault(address, self._next_number)
        self._next_number += number == self._next_number
        return number

    def _flush(self) -> None:
        driver(self._connection).executemany(_INSERT, self._mails)
        self._mails.clear()
