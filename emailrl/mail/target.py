"""A build's target file: its lock, temporary files and atomic rename.

A build locks a file next to the target from before it examines the target until it has replaced it. Otherwise two
concurrent builds would start from the same database, and the emails of one would be lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from emailrl.base.disk import Lock, check_place, sync
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.connection import OTHER_FILE, check_header, check_replaceable, database_fingerprint

_LEFT = r"\.(?:building|staging)-\d+(?:-journal)?"
"""Suffixes of a build's own files after the target's name: process id, and SQLite's journal."""


@dataclass(frozen=True)
class Target:
    """A database file locked by this build."""

    db: Path
    """Its real path."""
    building: Path
    staging: Path
    replaces: bool
    """Whether ``publish`` may replace a file."""

    def publish(self) -> None:
        """Rename the finished file once its content is on disk.

        Raises ``UsageError`` if a file has appeared there that this build may not replace; ``EmailRLError`` if the disk
        fails.
        """
        try:
            sync(self.building)
            if not self.replaces:
                os.close(os.open(self.db, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            os.replace(self.building, self.db)
            sync(self.db.parent)
        except FileExistsError as error:
            raise _exists(self.db) from error
        except OSError as error:
            raise EmailRLError(f"The database {self.db} cannot be written: {error.strerror or error}.") from error


@contextlib.contextmanager
def claim(db: Path, *, overwrite: bool, append: bool) -> Iterator[Target]:
    """Lock the target and create the temporary files, which are always removed at the end.

    Raises ``UsageError`` if a link leads there, the existing file may not be replaced or nothing can be written;
    ``EmailRLError`` if another build holds the lock.
    """
    check_place(db, "--db")
    _check(db, overwrite=overwrite, append=append)
    with _errors_of(db):
        db = db.resolve()
        new_folders = [folder for folder in db.parents if not folder.exists()]
    try:
        with _errors_of(db):
            db.parent.mkdir(parents=True, exist_ok=True)
        with _locked(db):
            _check(db, overwrite=overwrite, append=append)
            replaces = overwrite or (append and db.exists())
            with _files_beside(db) as (building, staging):
                yield Target(db, building, staging, replaces)
    finally:
        for folder in new_folders if not db.exists() else ():
            with contextlib.suppress(OSError):  # something else has come to stand in it
                folder.rmdir()


def _check(db: Path, *, overwrite: bool, append: bool) -> None:
    if overwrite and append:
        raise UsageError("--overwrite and --append are mutually exclusive.", "Choose one.")
    try:
        mode = db.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise _unwritable(db, error.strerror or str(error)) from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"{db} is a folder, not a database file.", "Name a file with --db.")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{db} is not a regular file.", OTHER_FILE)
    check_header(db)
    _check_journals(db)
    if append:
        database_fingerprint(db)  # raises where it is not a database of ours
    elif overwrite:
        check_replaceable(db)
    else:
        raise _exists(db)


def _check_journals(db: Path) -> None:
    """Refuse leftover journals of another program: SQLite would apply them to the new file of that name."""
    for name in (f"{db.name}-wal", f"{db.name}-journal"):
        with contextlib.suppress(FileNotFoundError):
            if db.with_name(name).stat().st_size:
                raise UsageError(
                    f"Another program is writing {db}, or died doing so: {name} still exists.",
                    f"Close that program or open the database once with sqlite3, so that {name} disappears.",
                )


def _exists(db: Path) -> UsageError:
    return UsageError(f"The database {db} already exists.", "Replace it with --overwrite, or add to it with --append.")


def _unwritable(db: Path, reason: str) -> UsageError:
    return UsageError(f"The database {db} cannot be written: {reason}.", OTHER_FILE)


@contextlib.contextmanager
def _errors_of(db: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:  # a folder cannot be made where a file stands
        raise _unwritable(db, f"{error.filename} is not a folder") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: Python's word, up to 3.12, for links in a circle
        raise _unwritable(db, getattr(error, "strerror", None) or str(error)) from error


@contextlib.contextmanager
def _locked(db: Path) -> Iterator[None]:
    with _errors_of(db):
        try:
            lock = Lock(db.with_name(f"{db.name}.gen-db-lock"))
        except BlockingIOError:
            busy = EmailRLError(f"Another gen-db is writing {db}.", "Wait for it to finish, or choose another --db.")
            raise busy from None
    try:
        yield
    finally:
        lock.close(remove=True)


@contextlib.contextmanager
def _files_beside(db: Path) -> Iterator[tuple[Path, Path]]:
    """Create two empty temporary files, and remove those of builds that died (this one holds the lock)."""
    building, staging = (db.with_name(f"{db.name}.{part}-{os.getpid()}") for part in ("building", "staging"))
    with _errors_of(db):
        for path in list(db.parent.iterdir()):
            if re.fullmatch(re.escape(db.name) + _LEFT, path.name):
                path.unlink(missing_ok=True)
    try:
        with _errors_of(db):
            building.touch()
            staging.touch()
        yield building, staging
    finally:
        for path in (building, staging):
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
