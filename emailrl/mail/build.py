"""Builds a mail database from a stream of messages, or adds to one: filter, deduplicate, order by date, index.

Ids count from the newest email, so messages are first staged in a nameless temporary database until all are known. Then
they are written in order into a file beside the target, which is renamed at the end: an empty file, or a copy of the
old database if mail is added. Two builds that start from the same database would lose the emails of one, so the target
is locked throughout. Memory use is small: one or two hashes per message.

Old emails keep their ids where they can: newer emails get ids below all others, and undated ones, which come last, ids
above. The others are staged again; if there are many of them (old mail is added), all are written anew. Either way the
full-text index receives emails in the order of their ids, which is fastest.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from emailrl import __version__
from emailrl.base import disk
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.install import need
from emailrl.base.process import TEMPORARY
from emailrl.mail import database
from emailrl.mail.database import INDEXED
from emailrl.mail.languages import FOREIGN, Stems
from emailrl.mail.sieve import KEPT_BY, Keys, Listing, Sieve, SiftedMail, keys_of, sift
from emailrl.mail.sources import RawEmail, Skipped, Source
from emailrl.mail.threads import threads_of
from emailrl.settings import StoreSettings

Progress = Callable[[str, int, int | None], None]
"""Called with the phase (``read`` or ``index``), the messages done in it, and their total if known."""
_PROGRESS_MAILS = 1000
_LARGEST_SHARE = 4
"""All emails are written anew if more than one in this many would change its id, but not for ``_FEW_MAILS``."""
_FEW_MAILS = 1000
_OR_ANEW = "or build it anew with --overwrite; nothing was written."
_TO_ADD = f"Add what is new with --append, {_OR_ANEW}"
_FLUSH_MAILS = 1000
_INDEX_MAILS = 50_000  # each time a segment of the index is written, all of which are merged at the end
_LOADING = {"hashsize": 32 * 1024 * 1024, "automerge": 0, "usermerge": 2, "pgsz": 512}
"""Small pages let a search skip more of a common word's emails."""
_DEFAULTS = {"hashsize": 1024 * 1024, "automerge": 4, "usermerge": 4}
_MERGE_PAGES = 100_000


@dataclass(slots=True)
class BuildReport:
    """A build's counts: ``emails`` stored plus all ``skipped`` are the messages seen."""

    emails: int
    recipients: int  # stored recipients, without repeats within to, cc or bcc
    skipped: dict[str, int]  # messages not stored, by reason
    seconds: float
    db: Path
    repaired: dict[str, int]  # messages stored despite defects, by kind
    attachments: int = 0  # attached files of the stored messages
    added: int = 0  # stored emails that the database did not have
    removed: int = 0  # emails that it had and that ``sync`` did not find


def build_database(
    emails: Iterable[RawEmail | Skipped] | Source,
    db: Path,
    *,
    settings: StoreSettings | None = None,
    overwrite: bool = False,
    append: bool = False,
    sync: bool = False,
    limit: int | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    listing: Listing | None = None,
) -> BuildReport:
    """Write ``emails`` into the database file ``db``.
    ``append`` keeps the emails of an existing database and adds those it lacks; ``overwrite`` replaces it, and so does
    ``sync`` if anything has changed, which it reports; ``limit`` is the maximum number of emails to store. ``sift`` and
    ``Sieve`` decide what is skipped. A ``Source`` is parsed by ``workers`` other processes (None chooses a number for
    the machine).
    Raises ``UsageError`` if ``db`` exists and none of these is given, if it is not a database or cannot be written, or
    if nothing is left to store; ``EmailRLError`` if source or disk fails, or another build is writing ``db``."""
    started = time.monotonic()
    settings = settings or StoreSettings()
    progress = progress or (lambda phase, messages, total: None)
    if settings.attachment_text:
        need("pypdf", "ATTACHMENT_TEXT")
    if sync and limit:
        raise UsageError("--sync would remove the emails that --limit leaves out.", "Choose one.")
    sieve = Sieve(dedupe=settings.dedupe, listing=listing)
    judge = functools.partial(sift, settings=settings)
    with _claimed(Path(os.path.expanduser(db)), overwrite=overwrite, append=append, sync=sync) as (db, building):
        stamp = disk.stamp_of(db) if append or sync else None
        old = db if stamp else None
        with _naming(db), contextlib.closing(_Loader(building, None if sync else old)) as loader:
            before: set[bytes] = set()
            for keys in _keys_in(old, texts=settings.attachment_text) if old else ():
                if sync:
                    before.add(keys.id_key + keys.content_key)
                    sieve.keep_name(keys)
                else:
                    sieve.remember(keys)
            num_before, scratch = len(before), building.with_suffix(".unpacked")
            read = emails.read(judge, workers, scratch) if isinstance(emails, Source) else (judge(it) for it in emails)
            with contextlib.closing(read) as mails:
                seen = 0
                for seen, found in enumerate(mails, 1):
                    if mail := sieve.passed(found):
                        loader.add(mail)
                        before.discard(mail.keys.id_key + mail.keys.content_key)
                        if loader.mails == limit:
                            break
                    if seen % _PROGRESS_MAILS == 0:
                        progress("read", seen, None)
                else:
                    progress("read", seen, seen)
            added, removed = loader.mails - num_before + len(before), len(before)
            is_new = loader.mails > 0 and added + removed > 0
            if is_new:
                _check_removal(db, removed, num_before, sieve.unread)
                loader.write(progress, texts=settings.attachment_text)
        if is_new:
            _replace(db, building, stamp, overwrite=overwrite)
        elif not (append and old) and not loader.mails:
            counts = ", ".join(f"{number:,} {why}" for why, number in sieve.skipped.items()) or "no message was found"
            keeping = "".join(f" {KEPT_BY[why]} keeps {why}." for why in sieve.skipped if why in KEPT_BY)
            formats = " docs/guides/data.md lists the formats." if "not_mail" in sieve.skipped else ""
            raise UsageError(f"There is no mail to store ({counts}).", f"Nothing was written.{keeping}{formats}")
    seconds = round(time.monotonic() - started, 3)
    stored, people, files = loader.mails, loader.recipients, loader.attachments
    return BuildReport(stored, people, sieve.skipped, seconds, db, sieve.defects, files, added, removed)


def _check_removal(db: Path, removed: int, num_before: int, unread: str | None) -> None:
    """Raise UsageError if ``sync`` would remove what may be ``unread``, what another source has added, or most."""
    if removed:
        with database.opened(db) as connection:
            added_to = database.noted(connection, "appended") and ", added to by --append"
        cannot = unread is not None and f" while {unread or 'a part'} cannot be read; make it readable first"
        if why := cannot or added_to or (2 * removed > num_before and f", most of its {num_before:,}"):
            raise UsageError(f"--sync would remove {removed:,} emails from {db}{why}.", _TO_ADD)


def _keys_in(old: Path, *, texts: bool) -> Iterator[Keys]:
    """The keys of every email of a database; UsageError unless it has ``texts`` of files as this build will."""
    with contextlib.closing(database.connect(old, mapped=False)) as opened:
        if bool(database.noted(opened, "attachment_text")) != texts:
            holds, hint = ("no ", "Leave out") if texts else ("the ", "Repeat")
            raise UsageError(f"{old} holds {holds}texts of attached files.", f"{hint} --attachment-text, {_OR_ANEW}")
        keyed = "SELECT message_id, subject, from_address, body, date, attachments FROM emails"
        yield from (keys_of(*row) for row in database.driver(opened).execute(keyed))


# -- the target: what may be replaced, and by one build at a time -----------------------------------------------------


@contextlib.contextmanager
def _claimed(db: Path, *, overwrite: bool, append: bool, sync: bool) -> Iterator[tuple[Path, Path]]:
    """Lock the target: its real path, and the empty file beside it to build in, which is removed at the end."""
    if overwrite + append + sync > 1:
        raise UsageError("--overwrite, --append and --sync are mutually exclusive.", "Choose one.")
    disk.check_place(db, "--db")
    with contextlib.ExitStack() as at_end:
        try:
            db = db.resolve(strict=db.is_symlink())  # of links, check_place passes only a circle, which is an error
            building = db.with_name(f"{db.name}.building")
            at_end.callback(_remove, [folder for folder in db.parents if not folder.exists()], db)
            db.parent.mkdir(parents=True, exist_ok=True)
            lock = database.locked(db)
            at_end.callback(TEMPORARY.difference_update, (building, lock.path))
            at_end.callback(lock.close, remove=True)
            at_end.callback(building.unlink, missing_ok=True)
            TEMPORARY.update((building, lock.path))
            _check(db, overwrite=overwrite, append=append or sync)
            building.unlink(missing_ok=True)  # a build that was killed leaves it
            shutil.rmtree(building.with_suffix(".unpacked"), ignore_errors=True)
            building.touch(exist_ok=False)
        except FileExistsError as error:  # a folder cannot be made where a file stands
            raise _unwritable(db, f"{error.filename} is not a folder") from error
        except (OSError, RuntimeError) as error:  # RuntimeError: Python's word, up to 3.12, for links in a circle
            raise _unwritable(db, getattr(error, "strerror", None) or str(error)) from error
        yield db, building


def _remove(new_folders: list[Path], db: Path) -> None:
    for folder in new_folders if not db.exists() else ():
        with contextlib.suppress(OSError):  # something else has come to stand in it
            folder.rmdir()


def _check(db: Path, *, overwrite: bool, append: bool) -> None:
    disk.check_beside(db, "--db")
    try:
        is_file, exists = db.is_file(), db.exists()
    except OSError as error:
        raise _unwritable(db, error.strerror or str(error)) from error
    if not exists:
        return
    if not is_file:
        raise UsageError(f"{db} is {'a folder' if db.is_dir() else 'not a regular file'}.", database.OTHER_FILE)
    database.check_header(db)
    for journal in (f"{db.name}-wal", f"{db.name}-journal"):  # SQLite would apply them to the new file of that name
        if (beside := db.with_name(journal)).exists() and beside.stat().st_size:
            hint = f"Close that program or open the database once with sqlite3, so that {journal} disappears."
            raise UsageError(f"Another program is writing {db}, or died doing so: {journal} still exists.", hint)
    database.check_replaceable(db)
    if not overwrite:
        database.database_fingerprint(db)  # raises for one of another version
    if not (overwrite or append):
        hint = "Replace it with --overwrite, or add to it with --append."
        raise UsageError(f"The database {db} already exists.", hint)


def _replace(db: Path, building: Path, stamp: tuple[int, int, int] | None, *, overwrite: bool) -> None:
    """Put the new file in the target's place, if that has still the ``stamp`` of when it was read, or is still free."""
    try:
        disk.sync(building)
        if stamp or overwrite:
            _check(db, overwrite=overwrite, append=not overwrite)  # another program may have begun to write
        else:
            os.close(os.open(db, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        if stamp and disk.stamp_of(db) != stamp:
            raise EmailRLError(f"{db} has changed while gen-db ran.", "Run it again; nothing was written.")
        os.replace(building, db)
        disk.sync(db.parent)
    except OSError as error:
        raise EmailRLError(f"The database {db} cannot be written: {error.strerror or error}.") from error


def _unwritable(db: Path, why: str) -> UsageError:
    return UsageError(f"The database {db} cannot be written: {why}.", database.OTHER_FILE)


@contextlib.contextmanager
def _naming(db: Path) -> Iterator[None]:
    """Name the database in SQLite's errors: the old one if it is damaged, otherwise the one to be written."""
    try:
        yield
    except database.SQLITE_ERRORS as error:
        if database.error_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_INTERRUPT):
            with database.reading(db):
                raise
        hint = "The old database is unchanged." if db.exists() else "Nothing was written."
        raise EmailRLError(f"The database {db} cannot be written: {database.reason(error)}.", hint) from error


# -- loading ----------------------------------------------------------------------------------------------------------

_STAGING = """
    PRAGMA staging.journal_mode = OFF;
    PRAGMA staging.synchronous = OFF;
    CREATE TABLE staging.mail(
        n INTEGER PRIMARY KEY, message_id, subject, from_address, date, body, file_name, people,
        names, attachments, machine, refs, extra, parties);
    BEGIN"""
_STAGE = f"INSERT INTO staging.mail VALUES (NULL{', ?' * 13})"
_STAGED_BEFORE = """
    SELECT message_id, subject, from_address, date, body, file_name, coalesce((
        SELECT group_concat(recipient_type || ' ' || recipient_address, char(10))
        FROM (SELECT * FROM recipients WHERE email_id = emails.id ORDER BY rowid)), ''),
        names, attachments, machine, refs, extra, parties
    FROM emails WHERE id <= ? OR id >= ?"""
"""The emails of a database as they are staged, without those between two ids."""
_INDEX = f"INSERT INTO emails_fts(rowid, {INDEXED}) SELECT id, {INDEXED} FROM emails "
_UNINDEX = f"INSERT INTO emails_fts(emails_fts, rowid, {INDEXED}) SELECT 'delete', id, {INDEXED} FROM emails "
_STEMMED = f"""
    SELECT names || char(10) || attachments, subject, body FROM emails
    WHERE id BETWEEN ? AND ? AND extra LIKE '%{FOREIGN}'"""
_COMPARED = f"SELECT subject, body FROM emails WHERE id % ? = 0 AND extra NOT LIKE '%{FOREIGN}'"
_COMPARED_MAILS = 1000
_THREADED = "SELECT id, message_id, subject, refs, date, parties FROM emails ORDER BY id DESC"
_CONFIGURE = "INSERT INTO emails_fts(emails_fts, rank) VALUES (?, ?)"


class _PartyWords(dict[str, str]):
    """The party word of every address; a new address gets the next number."""

    def __init__(self) -> None:
        super().__init__()
        self._last = 0

    def __missing__(self, address: str) -> str:
        self._last += 1
        self[address] = word = database.party_word(self._last)
        return word

    def know(self, numbered: Iterable[tuple[str, int]]) -> None:
        for address, number in numbered:
            self[address] = database.party_word(number)
            self._last = max(self._last, number)

    def numbers(self, above: int) -> Iterator[tuple[str, int]]:
        found = ((address, int(word.strip(database.PARTY))) for address, word in self.items())
        return (each for each in found if each[1] > above)


class _Loader:
    """Stages emails, then writes them, and all of the database ``old``, into the empty file ``path``."""

    def __init__(self, path: Path, old: Path | None) -> None:
        self.mails = self.recipients = self.attachments = 0
        self._fingerprint = 0  # the sum of the digests of the old and the added emails, whatever their order
        self._words = _PartyWords()  # of every address, old and new
        self._old = database.connect(old, mapped=False) if old else None
        if self._old:
            self._fingerprint = int(database.noted(self._old, "fingerprint") or "0", 16)
            self._words.know(database.driver(self._old).execute("SELECT address, id FROM addresses"))
        self._connection = database.connect_for_loading(path)
        self._sql = database.driver(self._connection)
        staging = path.with_name(f"{path.name}-staging")
        staging.unlink(missing_ok=True)  # a build that was killed may leave it
        staging.touch(exist_ok=False)
        try:
            self._sql.execute("ATTACH ? AS staging", (os.fsencode(staging),))
        finally:
            staging.unlink()  # SQLite keeps it open, and nobody else sees it
        self._sql.executescript(_STAGING)
        self._unstaged: list[tuple[object, ...]] = []

    def add(self, mail: SiftedMail) -> None:
        """Stage a new email."""
        people = mail.people.split("\n") if mail.people else []
        parties = [mail.from_address] if mail.from_address else []
        parties += [line.partition(" ")[2] for line in people]
        self._unstaged.append((*mail[:12], database.parties_text(map(self._words.__getitem__, parties))))
        self.mails += 1
        if mail.attachments:
            self.attachments += 1 + mail.attachments.count("\n")
        self.recipients += len(people)
        self._fingerprint += int.from_bytes(mail.digest, "big")
        if len(self._unstaged) >= _FLUSH_MAILS:
            self._flush()

    def close(self) -> None:
        self._connection.close()
        if self._old:
            self._old.close()

    def write(self, progress: Progress, *, texts: bool) -> None:
        """Write all emails in order of date, newest first, then of Message-ID, undated ones last. ``texts``: of files,
        noted as the append is."""
        self._flush()
        staying = self._staying()
        sql, known, ends = self._sql, 0, None
        if self._old:
            sql.executemany(_STAGE, database.driver(self._old).execute(_STAGED_BEFORE, staying or (-1, 0)))
        sql.execute("CREATE TABLE staging.ranked AS SELECT n FROM mail ORDER BY date DESC, message_id DESC")
        sql.execute("COMMIT")
        if staying and self._old:
            database.driver(self._old).backup(sql)
            sql.execute("PRAGMA journal_mode = OFF")  # the copy has the journal of the original
        sql.execute("BEGIN")
        if staying:
            for head in database.TRIGGERS:
                sql.execute(f"DROP TRIGGER IF EXISTS {head.partition(' ')[0]}")
            (known,) = sql.execute("SELECT coalesce(max(id), 0) FROM addresses").fetchone()
            sql.execute(f"{_UNINDEX} WHERE id <= ? OR id >= ?", staying)
            for table, key in (("recipients", "email_id"), ("emails", "id")):
                sql.execute(f"DELETE FROM {table} WHERE {key} <= ? OR {key} >= ?", staying)
            above = staying[0]
            query = "SELECT coalesce(min(id) - 1, ?), coalesce(max(id), ?) FROM emails"
            ends = sql.execute(query, (above, above)).fetchone()
        else:
            for statement in database.TABLES:
                self._connection.execute(statement)
        self._load(ends, progress)
        sql.executemany("INSERT INTO addresses(address, id) VALUES (?, ?)", self._words.numbers(above=known))
        sql.execute("DELETE FROM threads")
        sql.executemany("INSERT INTO threads VALUES (?, ?)", threads_of(sql.execute(_THREADED)))
        if staying:
            # Every segment of the index slows down searches a little. Merging those of similar size in pairs keeps them
            # few without rewriting the whole index; FTS5 counts two changes if there was something to merge.
            done = -1
            while sql.total_changes - done >= 2:
                done = sql.total_changes
                sql.execute(_CONFIGURE, ("merge", _MERGE_PAGES))
        else:
            sql.execute("INSERT INTO emails_fts(emails_fts) VALUES ('optimize')")
            for statement in database.INDEXES:
                self._connection.execute(statement)
        for head, body in database.TRIGGERS.items():
            sql.execute(f"CREATE TRIGGER {head} BEGIN {body} END")
        sql.executemany(_CONFIGURE, _DEFAULTS.items())
        values = {
            "schema_version": str(database.SCHEMA_VERSION),
            "fingerprint": f"{self._fingerprint % (1 << 128):032x}",
            "emails": str(sql.execute("SELECT count(*) FROM emails").fetchone()[0]),
            "written_by": f"{database.MARK}{__version__}",
        }
        values |= {name: "true" for name, is_so in (("attachment_text", texts), ("appended", self._old)) if is_so}
        sql.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
        sql.execute("COMMIT")

    def _flush(self) -> None:
        self._sql.executemany(_STAGE, self._unstaged)
        self._unstaged.clear()

    def _staying(self) -> tuple[int, int] | None:
        """The ids around the old emails that keep theirs (older than all new ones); None to write all anew."""
        if self._old is None:
            return None
        old, new = database.driver(self._old), self._sql
        dated = "SELECT date, message_id FROM mail WHERE date IS NOT NULL ORDER BY date, message_id LIMIT 1"
        date, message_id = new.execute(dated).fetchone() or ("~", "")  # which sorts after all dates
        (last,) = new.execute("SELECT coalesce(max(message_id), '') FROM mail WHERE date IS NULL").fetchone()
        extent = "SELECT count(*), coalesce(min(id), 1) - 1, coalesce(max(id), 0) + 1 FROM emails"
        mails, above, below = old.execute(extent).fetchone()
        newer = "SELECT count(*), coalesce(max(id), ?) FROM emails WHERE (date, message_id) > (?, ?)"
        num_newer, above = old.execute(newer, (above, date, message_id)).fetchone()
        behind = "SELECT count(*), coalesce(min(id), ?) FROM emails WHERE date IS NULL AND message_id < ?"
        num_behind, below = old.execute(behind, (below, last)).fetchone()
        return (above, below) if num_newer + num_behind <= max(_FEW_MAILS, mails // _LARGEST_SHARE) else None

    def _load(self, ends: tuple[int, int] | None, progress: Progress) -> None:
        """Insert the staged emails: dated ones with ids up to the first of ``ends``, undated ones above the second."""
        sql = self._sql
        dated, mails = sql.execute("SELECT count(date), count(*) FROM mail").fetchone()
        low, high = ends or (dated, dated)
        before, behind = low - dated, high - dated
        ranked = f"r.rowid + iif(r.rowid <= {dated}, {before}, {behind})"
        source = "staging.ranked r CROSS JOIN staging.mail m ON m.n = r.n"
        columns = "message_id, subject, from_address, date, body, file_name, parties, names, attachments, machine, refs"
        sql.execute(f"INSERT INTO emails SELECT {ranked}, {columns}, extra FROM {source} ORDER BY r.rowid")
        people = sql.execute(f"SELECT {ranked}, people FROM {source} WHERE people <> '' ORDER BY r.rowid")
        rows = ((number, *line.partition(" ")[::2]) for number, lines in people for line in lines.split("\n"))
        sql.executemany("INSERT INTO recipients(email_id, recipient_type, recipient_address) VALUES (?, ?, ?)", rows)
        sql.executemany(_CONFIGURE, _LOADING.items())
        done, stems = 0, Stems()
        for start, end in ((before, before + dated), (behind + dated, behind + mails)):
            for first in range(start + 1, end + 1, _INDEX_MAILS):
                progress("index", done, mails)
                last = min(first + _INDEX_MAILS - 1, end)
                sql.execute(f"{_INDEX} WHERE id BETWEEN ? AND ?", (first, last))
                for text in sql.execute(_STEMMED, (first, last)):
                    stems.add(*text)
                done += last - first + 1
        (stored,) = sql.execute("SELECT count(*) FROM emails").fetchone()
        times = max(1, stored // _COMPARED_MAILS)
        for subject, body in sql.execute(_COMPARED, (times,)):
            stems.compare(subject, body, times)
        sql.executemany("INSERT OR IGNORE INTO stems VALUES (?, ?)", sorted(stems.rows()))
        progress("index", mails, mails)
