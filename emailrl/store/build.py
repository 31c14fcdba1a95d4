"""Build a mail database from a stream of messages: filter, dedupe, put in order of date, index.

Messages are first staged in a file of their own, since their ids follow their dates; then tables and full-text index
are written once, in order, into a file beside the target that takes its name when all is done. A build that is killed
leaves the old database as it was. Memory stays flat: what is kept of every message is a hash or two.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from emailrl.errors import EmailRLError, UsageError
from emailrl.settings import StoreSettings
from emailrl.store.connection import connect, reading
from emailrl.store.sieve import DATE_FORMAT, Listing, Mail, Sieve, as_mail, sift
from emailrl.store.sources import RawEmail, Skipped, Source
from emailrl.store.staging import Stage
from emailrl.store.target import claim

Progress = Callable[[str, int, int | None], None]
"""Called with the phase (``read`` or ``index``), the messages done in it, and their number where it is known."""

_PROGRESS_MAILS = 1000


@dataclass(slots=True)
class BuildReport:
    """What a build did: ``emails`` stored plus all ``skipped`` are the messages seen."""

    emails: int
    recipients: int
    """Rows of recipients stored with them; repeats within to, cc or bcc removed."""
    skipped: dict[str, int]
    """Messages not stored, by reason."""
    seconds: float
    db: Path
    defects: dict[str, int]
    """Messages stored in spite of something wrong with them, by kind."""


def build_database(
    emails: Iterable[RawEmail | Skipped] | Source,
    db: Path,
    *,
    settings: StoreSettings | None = None,
    overwrite: bool = False,
    append: bool = False,
    limit: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    listing: Listing | None = None,
) -> BuildReport:
    """Write ``emails`` into the database file ``db``.

    ``append`` keeps the mails of an existing database and adds those it lacks; ``overwrite`` replaces it; ``limit``
    stops once so many mails are stored. What is skipped and why: ``sift`` and ``Sieve``. A ``Source`` is parsed by
    ``workers`` processes beside this one (None: as many as the machine has use for). ``listing`` hears of every message
    skipped or mended.

    Raises ``UsageError`` where ``db`` exists and neither flag is given, where it is no database or cannot be written,
    or where nothing is left to store; ``EmailRLError`` where the source or the disk fails, or another build is writing
    ``db``. An existing database then stays as it was.
    """
    started = time.monotonic()
    db = Path(db).expanduser()
    settings = settings or StoreSettings()
    sieve = Sieve(dedupe=settings.dedupe, listing=listing)
    with claim(db, overwrite=overwrite, append=append) as target:
        try:
            with contextlib.closing(Stage(target.staging, progress)) as stage:
                if append and target.db.exists():
                    for email in stored_emails(target.db):
                        mail = as_mail(email)
                        sieve.remember(mail)
                        stage.add(mail)
                stage.keep()
                with contextlib.closing(_sifted(emails, settings, workers)) as mails:
                    _stage_all(mails, sieve, stage, limit, progress)
                if stage.count == 0:
                    raise UsageError(
                        f"There is no mail to store ({_listed(sieve.skipped)}).", "No database was written."
                    )
                stage.write(target.building)
        except sqlite3.Error as error:
            raise EmailRLError(
                f"The database {target.db} cannot be written: {error}.", "It was left as it was."
            ) from error
        target.publish()
    return BuildReport(
        stage.added, stage.added_recipients, sieve.skipped, time.monotonic() - started, target.db, sieve.defects
    )


def _sifted(
    emails: Iterable[RawEmail | Skipped] | Source, settings: StoreSettings, workers: int | None
) -> Generator[Mail | Skipped]:
    judge = functools.partial(sift, settings=settings)
    yield from emails.read(judge, workers) if isinstance(emails, Source) else map(judge, emails)


def _stage_all(
    mails: Iterable[Mail | Skipped], sieve: Sieve, stage: Stage, limit: int | None, progress: Progress | None
) -> None:
    seen = 0
    for seen, mail in enumerate(mails, 1):
        if sieve.passes(mail):
            stage.add(mail)
            if stage.added == limit:
                return
        if progress and seen % _PROGRESS_MAILS == 0:
            progress("read", seen, None)
    if progress:
        progress("read", seen, seen)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in counts.items()) or "no message was found"


def stored_emails(db: Path) -> Iterator[RawEmail]:
    """The mails of a database, oldest first.

    Raises ``UsageError`` where it is none of ours, ``EmailRLError`` where it is damaged.
    """
    with reading(db), contextlib.closing(connect(db)) as connection:
        people = connection.cursor()
        for key, message_id, subject, sender, date, body, file_name in connection.execute(
            "SELECT id, message_id, subject, from_address, date, body, file_name FROM emails ORDER BY id DESC"
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
