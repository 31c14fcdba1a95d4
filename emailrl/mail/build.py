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
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.connection import SQLITE_ERRORS, error_code, reading, reason
from emailrl.mail.sieve import KEPT_BY, Listing, Sieve, SiftedMail, sift
from emailrl.mail.sources import RawEmail, Skipped, Source
from emailrl.mail.target import Target, claim
from emailrl.mail.writing import Progress, Stage, write_database
from emailrl.settings import StoreSettings

_PROGRESS_MAILS = 1000


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

    ``append`` keeps the emails of an existing database and adds those it lacks; ``overwrite`` replaces it; ``limit`` is
    the maximum number of emails to store. ``sift`` and ``Sieve`` decide what is skipped. A ``Source`` is parsed by
    ``workers`` other processes (None chooses a number for the machine). ``listing`` is called for every message skipped
    or repaired.

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
        with _errors_of(target), contextlib.closing(Stage(target.staging, old)) as stage:
            for keys in stage.old_keys():
                sieve.remember(keys)
            with contextlib.closing(_sifted(emails, settings, workers)) as mails:
                _stage_all(mails, sieve, stage, limit, progress)
            if stage.mails:
                write_database(target.building, stage, progress)
        if stage.mails:
            target.publish()
        elif not old:
            raise _nothing_stored(sieve)
    seconds = round(time.monotonic() - started, 3)
    return BuildReport(stage.mails, stage.recipients, sieve.skipped, seconds, target.db, sieve.defects)


def _nothing_stored(sieve: Sieve) -> UsageError:
    kept_by = "".join(f" {KEPT_BY[reason]} keeps {reason}." for reason in sieve.skipped if reason in KEPT_BY)
    formats = (
        " docs/guides/data.md lists the formats, and converters for Outlook's." if "not_mail" in sieve.skipped else ""
    )
    return UsageError(
        f"There is no mail to store ({_listed(sieve.skipped)}).", f"No database was written.{kept_by}{formats}"
    )


@contextlib.contextmanager
def _errors_of(target: Target) -> Iterator[None]:
    """Name the database in SQLite's errors: the old one if it is damaged, otherwise the one to be written."""
    try:
        yield
    except SQLITE_ERRORS as error:
        if error_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_INTERRUPT):
            with reading(target.db):
                raise
        raise EmailRLError(
            f"The database {target.db} cannot be written: {reason(error)}.", "It is unchanged."
        ) from error


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
            if stage.mails == limit:
                return
        if progress and seen % _PROGRESS_MAILS == 0:
            progress("read", seen, None)
    if progress:
        progress("read", seen, seen)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {reason}" for reason, number in counts.items()) or "no message was found"
