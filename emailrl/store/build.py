"""Build a mail database from a stream of messages: filter, dedupe, put in order of date, index.

Messages are first staged in a file of their own, since their ids follow their dates; then tables and full-text index
are written once, in order, into a file beside the target that takes its name when all is done. A build that is killed
leaves the old database as it was. Memory stays flat: what is kept of every message is a hash or two.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from emailrl.errors import EmailRLError, UsageError
from emailrl.settings import StoreSettings
from emailrl.store.mailbox import connect, database_fingerprint
from emailrl.store.sieve import DATE_FORMAT, Listing, Mail, Sieve, as_mail, sift
from emailrl.store.sources import RawEmail, Skipped, Source
from emailrl.store.staging import Stage

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

    Raises ``UsageError`` where ``db`` exists and neither flag is given, where it cannot be written, or where nothing is
    left to store; ``EmailRLError`` where the source or the disk fails. An existing database then stays as it was.
    """
    started = time.monotonic()
    db = Path(db).expanduser()
    _check_target(db, overwrite=overwrite, append=append)
    db = db.resolve()  # the file that a link leads to is replaced, not the link
    settings = settings or StoreSettings()
    sieve = Sieve(dedupe=settings.dedupe, listing=listing)
    with _beside(db) as (building, staging):
        try:
            with contextlib.closing(Stage(staging, progress)) as stage:
                if append and db.exists():
                    for email in stored_emails(db):
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
                stage.write(building)
            _put_in_place(building, db)
        except sqlite3.Error as error:
            raise EmailRLError(f"The database {db} cannot be written: {error}.", "It was left as it was.") from error
    return BuildReport(
        stage.added, stage.added_recipients, sieve.skipped, time.monotonic() - started, db, sieve.defects
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


def _check_target(db: Path, *, overwrite: bool, append: bool) -> None:
    if overwrite and append:
        raise UsageError("Both overwrite and append were asked for.", "Choose one of them.")
    if db.is_dir():
        raise UsageError(f"{db} is a folder, not a database file.", "Name a file with --db.")
    if not db.exists():
        return
    if append:
        database_fingerprint(db)  # raises where it is not a database of ours
    elif not overwrite:
        raise UsageError(f"The database {db} exists.", "Replace it with --overwrite, or add to it with --append.")


@contextlib.contextmanager
def _beside(db: Path) -> Iterator[tuple[Path, Path]]:
    """Two files beside ``db`` to build in, removed at the end whatever happens, as are those of builds that died."""
    paths = tuple(db.with_name(f"{db.name}.{part}-{os.getpid()}") for part in ("building", "staging"))
    new_folders = [folder for folder in db.parents if not folder.exists()]
    try:
        db.parent.mkdir(parents=True, exist_ok=True)
        for left in (*db.parent.glob(f"{db.name}.building-*"), *db.parent.glob(f"{db.name}.staging-*")):
            if not _is_running(left.name.rpartition("-")[2]):
                left.unlink(missing_ok=True)
        for path in paths:
            path.touch()
    except OSError as error:
        raise UsageError(f"The database {db} cannot be written: {error.strerror or error}.") from error
    try:
        yield paths  # type: ignore[misc]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
        for folder in new_folders if not db.exists() else ():
            with contextlib.suppress(OSError):  # something else has come to stand in it
                folder.rmdir()


def _is_running(pid: str) -> bool:
    if not pid.isdigit():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _put_in_place(building: Path, db: Path) -> None:
    """Give the finished file its name, once its content is on the disk."""
    for path in (building, building.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if path == building:
            os.replace(building, db)


def stored_emails(db: Path) -> Iterator[RawEmail]:
    """The mails of a database, oldest first.

    Raises ``UsageError`` where it is none of ours.
    """
    with contextlib.closing(connect(db)) as connection:
        people = connection.cursor()
        for key, message_id, subject, sender, date, body, file_name in connection.execute(
            "SELECT id, message_id, subject, from_address, date, body, file_name FROM emails ORDER BY id DESC"
        ):
            lists: dict[str, list[str]] = {"to": [], "cc": [], "bcc": []}
            for address, kind in people.execute(
                "SELECT recipient_address, recipient_type FROM recipients WHERE email_id = ? ORDER BY rowid", (key,)
            ):
                lists[kind].append(address)
            moment = None if date is None else datetime.strptime(date, DATE_FORMAT).replace(tzinfo=UTC)
            yield RawEmail(message_id, subject, sender, lists["to"], lists["cc"], lists["bcc"], moment, body, file_name)
