"""Builds a mail database from a stream of messages, or adds to one: filter, deduplicate, order by date, index.

Messages are first staged in a separate file, because their ids follow their dates. Then they are written in order into
a temporary file next to the target, which is renamed at the end: an empty file, or a copy of the old database if mail
is added. Processes that have the old database open keep it, and a build that is killed leaves it unchanged. Memory use
is small: one or two hashes per message.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import and_, func, or_, select

from emailrl.errors import EmailRLError, UsageError
from emailrl.mail.connection import SQLITE_ERRORS, connect, connect_for_loading, driver, noted, opened, reading, reason
from emailrl.mail.schema import emails as stored
from emailrl.mail.sieve import KEPT_BY, Listing, Sieve, SiftedMail, as_mail, sift
from emailrl.mail.sources import RawEmail, Skipped, Source
from emailrl.mail.staging import Stage
from emailrl.mail.stored import NONE_STAYS, Staying, stored_addresses, stored_emails, stored_keys
from emailrl.mail.target import Target, claim
from emailrl.mail.writing import Progress, add_to_database, write_database
from emailrl.settings import StoreSettings

_PROGRESS_MAILS = 1000
_LARGEST_SHARE = 4
_FEW_MAILS = 1000
_DATES_END = "~"
"""Sorts after all dates."""


@dataclass(slots=True)
class BuildReport:
    """A build's counts: ``emails`` stored plus all ``skipped`` are the messages seen."""

    emails: int
    recipients: int
    """Stored recipients, without repeats within to, cc or bcc."""
    skipped: dict[str, int]
    """Messages not stored, by reason."""
    seconds: float
    db: Path
    defects: dict[str, int]
    """Messages stored despite defects, by kind."""


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

    ``append`` keeps the emails of an existing database and adds those it lacks (see ``_add``); ``overwrite`` replaces
    it; ``limit`` is the maximum number of emails to store. ``sift`` and ``Sieve`` decide what is skipped. A ``Source``
    is parsed by ``workers`` other processes (None chooses a number for the machine). ``listing`` is called for every
    message skipped or repaired.

    Raises ``UsageError`` if ``db`` exists and neither flag is given, if it is not a database or cannot be written, or
    if nothing is left to store; ``EmailRLError`` if the source or the disk fails, or another build is writing ``db``.
    An existing database is then unchanged.
    """
    started = time.monotonic()
    db = Path(os.path.expanduser(db))
    settings = settings or StoreSettings()
    sieve = Sieve(dedupe=settings.dedupe, listing=listing)
    with claim(db, overwrite=overwrite, append=append) as target:
        old = target.db if append and target.db.exists() else None
        try:
            with contextlib.closing(Stage(target.staging, stored_addresses(old) if old else None)) as stage:
                for keys in stored_keys(old) if old else ():
                    sieve.remember(keys)
                with contextlib.closing(_sifted(emails, settings, workers)) as mails:
                    _stage_all(mails, sieve, stage, limit, progress)
                new = stage.tally
                if new.mails and old:
                    _add(stage, old, target, progress)
                elif new.mails:
                    write_database(target.building, stage, progress)
        except SQLITE_ERRORS as error:
            raise EmailRLError(
                f"The database {target.db} cannot be written: {reason(error)}.", "It is unchanged."
            ) from error
        if new.mails:
            target.publish()
        elif not old:
            raise _nothing_stored(sieve)
    seconds = round(time.monotonic() - started, 3)
    return BuildReport(new.mails, new.recipients, sieve.skipped, seconds, target.db, sieve.defects)


def _nothing_stored(sieve: Sieve) -> UsageError:
    kept_by = "".join(f" {KEPT_BY[reason]} keeps {reason}." for reason in sieve.skipped if reason in KEPT_BY)
    formats = " docs/data.md lists the formats, and converters for Outlook's." if "not_mail" in sieve.skipped else ""
    return UsageError(
        f"There is no mail to store ({_listed(sieve.skipped)}).", f"No database was written.{kept_by}{formats}"
    )


def _add(stage: Stage, old: Path, target: Target, progress: Progress | None) -> None:
    """Write the staged emails and those of the database ``old`` into the new file.

    Existing emails that are newer than the oldest staged one, or undated like a staged one, change their ids: they are
    removed from a copy and inserted again with the new ones. If there are many (old mail is added), or if ids do not
    follow dates, the database is rewritten.
    """
    fingerprint = stage.tally.fingerprint
    staying = _staying(stage, old)
    for email in stored_emails(old, staying or NONE_STAYS):
        stage.add(as_mail(email))
    if staying is None:
        write_database(target.building, stage, progress)
        return
    _copy(old, target.building)
    add_to_database(target.building, stage, staying, fingerprint, progress)


def _copy(db: Path, copy: Path) -> None:
    with reading(db):
        source = connect(db, mapped=False)
    with source, connect_for_loading(copy) as connection:
        try:
            driver(source).backup(driver(connection))
        except sqlite3.Error as error:
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                with reading(db):
                    raise
            raise  # a full disk is the copy's, not the database's


def _staying(stage: Stage, db: Path) -> Staying | None:
    """The emails of ``db`` that keep their ids: those older than all staged ones, and undated ones before them.

    None if there are too many others to move, or if ids do not follow dates.
    """
    date, message_id = stage.oldest() or (_DATES_END, "")
    newest = or_(stored.c.date > date, and_(stored.c.date == date, stored.c.message_id > message_id))
    last = and_(stored.c.date.is_(None), stored.c.message_id < (stage.last_undated() or ""))
    with opened(db) as connection:
        if noted(connection, "ids_follow_dates") is None:
            return None
        lowest, highest = func.coalesce(func.min(stored.c.id), 1), func.coalesce(func.max(stored.c.id), 0)
        mails, low, high = connection.execute(select(func.count(), lowest, highest).select_from(stored)).one()
        above, newer = connection.execute(
            select(func.coalesce(func.max(stored.c.id), low - 1), func.count()).where(newest)
        ).one()
        below, undated = connection.execute(
            select(func.coalesce(func.min(stored.c.id), high + 1), func.count()).where(last)
        ).one()
    return None if newer + undated > max(_FEW_MAILS, mails // _LARGEST_SHARE) else Staying(above, below)


def _sifted(
    emails: Iterable[RawEmail | Skipped] | Source, settings: StoreSettings, workers: int | None
) -> Generator[SiftedMail | Skipped]:
    judge = functools.partial(sift, settings=settings)
    yield from emails.read(judge, workers) if isinstance(emails, Source) else map(judge, emails)


def _stage_all(
    mails: Iterable[SiftedMail | Skipped], sieve: Sieve, stage: Stage, limit: int | None, progress: Progress | None
) -> None:
    seen = 0
    for seen, mail in enumerate(mails, 1):
        if sieve.passes(mail):
            stage.add(mail)
            if stage.tally.mails == limit:
                return
        if progress and seen % _PROGRESS_MAILS == 0:
            progress("read", seen, None)
    if progress:
        progress("read", seen, seen)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in counts.items()) or "no message was found"
