"""Takes a mailbox out of everything below a folder. Content alone decides what goes: what names the address or a mail
of it, or quotes words of one that no other mail has. Mails go out of databases, lines out of JSONL files, and other
files that emailrl wrote go whole; the rest that has such traces is reported and left. Only regular files are opened,
and no link is followed."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import zipfile
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pyarrow import CompressedInputStream
from pyarrow.parquet import ParquetFile

from emailrl.base.disk import LOCK, check_cache, is_locked, replace_bytes
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.database import LOCK_END, PARTY, emails, locked
from emailrl.mail.sources.reading import BROKEN, decompressed
from emailrl.measure.export import MARKER
from emailrl.records.index import index_path

_RUN: Final = 6  # words of a quotation
_GZIP, _ZSTANDARD, _ZIP, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\3\4", b"PAR1"
_PIECE, _OVERLAP, _START = 1 << 26, 1 << 12, 1 << 12  # bytes read at once; read again; by which text is told
_NO_TEXT: Final = re.compile(rb"[\x01-\x07\x0e-\x1a\x1c-\x1f]")  # NULs stand in UTF-16 and tar archives, too
_LINED: Final = (".jsonl", "/training.log")
_WRITTEN: Final = ("", ".eval", ".html", ".json", ".jsonl")
_OURS: Final = re.compile(
    rb'"agent":\{"name":"emailrl"|"harness":"emailrl"|"packages":\{"emailrl"|\A\{"inbox": "|<script [^>]*id="run">'
)
"""What only conversions, ``ask.json`` and pages have, of files that end as those in ``_WRITTEN``."""
_BASE64: Final = re.compile(rb"(?:[A-Za-z0-9+/]{4}\r?\n?){15,}(?:[A-Za-z0-9+/]{2,3}={1,2})?")  # in a page, in mail
_ESCAPED: Final = re.compile(r"\\+(?:u([0-9a-f]{4})|[nrt\"/])|</?b>")
_NAMED: Final = "has traces of it, or its path has: yours to change or delete"
_MAILS: Final = f"""
    emails WHERE {" OR ".join(f"names({column.name})" for column in emails.columns)}
    OR id IN (SELECT email_id FROM recipients WHERE names(recipient_address))"""
_UNUSED: Final = """
    DELETE FROM addresses WHERE address NOT IN (SELECT recipient_address FROM recipients)
    AND address NOT IN (SELECT from_address FROM emails WHERE from_address IS NOT NULL)"""


@dataclass(slots=True)
class Forgotten:
    """What goes, or went: mails or lines by file, whole files; and what stays, with the reason."""

    removed: dict[Path, int] = field(default_factory=dict)
    deleted: list[Path] = field(default_factory=list)
    left: dict[Path, str] = field(default_factory=dict)


class _Traces:
    """An address, and of its mails the ids and the runs of words that stand in no other mail."""

    def __init__(self, inbox: str) -> None:
        self._inbox, self.ids, self._runs = inbox, set[str](), set[tuple[str, ...]]()
        # Not as the end or the start of another address; but after =20 and %3C, and before .pdf.
        self._address = re.compile(rf"(?:(?<![\w.+-])|(?<=[%=]..)){re.escape(inbox)}(?![\w-]|\.[a-z]{{2}}\b)")

    def learn(self, connection: sqlite3.Connection) -> int:
        """Note its mails in a database, returns their number."""
        mails = connection.execute(f"SELECT message_id, body FROM {_MAILS}").fetchall()
        self.ids.update(name.lower() for name, _ in mails)
        lines = (line for _, body in mails for line in (body or "").splitlines())
        self._runs.update(run for line in lines for run in _runs_of(line)[::_RUN])
        for (body,) in connection.execute(f"SELECT body FROM emails WHERE id NOT IN (SELECT id FROM {_MAILS})"):
            self._runs.difference_update(_runs_of(body or ""))
        return len(mails)

    def names(self, text: object) -> bool:
        """Whether the address stands in a text."""
        return self._inbox in (lower := str(text).lower()) and self._address.search(lower) is not None

    def are_in(self, content: bytes) -> bool:
        """Whether some are in text, or in what it has packed in it; in other bytes only the address is sought."""
        content = content.replace(b"\0", b"")
        if _NO_TEXT.search(content[:_START]):
            return self._inbox.encode() in content.lower()
        text = content.decode(errors="replace").lower()
        text = _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else " ", text)
        named = self.names(text) or not self.ids.isdisjoint(re.findall(r"<[^<>\s]+>", text))
        quoted = named or not self._runs.isdisjoint(_runs_of(text))
        packed = map(b64decode, _BASE64.findall(content))
        return quoted or any(self.are_in(zlib.decompress(each, 31) if each[:2] == _GZIP else each) for each in packed)


def _runs_of(text: str) -> list[tuple[str, ...]]:
    words = re.findall(r"[^\W_]+", text.lower())
    return list(zip(*(words[start:] for start in range(_RUN)), strict=False))


def forget(inbox: str, folder: Path, agreed: Callable[[Forgotten], bool]) -> Forgotten:
    """Find the mailbox below ``folder``, and remove it there if what was found is ``agreed``. Raises UsageError if
    there is no trace of it or a run writes there, EmailRLError for a damaged database."""
    traces, done = _Traces(inbox.strip().lower()), Forgotten()
    files = {path: _tables(path) for path in _files(folder, done.left)}
    databases = [path for path, tables in files.items() if {"emails", "emails_fts", "meta"} <= tables]
    for path in databases:
        with _opened(path, traces) as connection:
            done.removed |= {path: count} if (count := traces.learn(connection)) else {}
    caches = [path for path, tables in files.items() if tables == {"kept"}]
    for path in files:
        if path not in (*databases, *caches) and path.exists():  # SQLite removes what it has beside a database
            _sort(path, traces, done)
    paths = (path for path in files if traces.names(path.relative_to(folder)) and path not in done.deleted)
    done.left = dict.fromkeys(paths, _NAMED) | done.left
    done.deleted += caches if done.removed else []  # of replies, which quote mail without naming it
    if not (done.removed or done.deleted or _NAMED in done.left.values()):
        raise UsageError(f"Nothing below {folder} names {inbox}.", "Check --inbox, and the folder.")
    if agreed(done):
        for path in (Path(f"{path}{end}") for path in done.deleted for end in ("", "-wal", "-shm", "-journal")):
            path.unlink(missing_ok=True)
        for path in done.removed:
            if path in databases:
                _filter_database(path, traces)
            else:
                replace_bytes(path, b"".join(line for line in _pieces(path) if not traces.are_in(line)))
    return done


def _files(folder: Path, left: dict[Path, str]) -> list[Path]:
    """The regular files below, through no link; ``left`` gets devices and pipes."""
    found = []
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent, name) for name in sorted([*folders, *names])):
            if (path.name == LOCK or path.name.endswith(LOCK_END)) and is_locked(path):
                raise UsageError(f"A run or gen-db is writing in {path.parent}.", "Wait for its end.")
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                found.append(path)
            elif not (stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                left[path] = "a device or pipe"
    return found


def _sort(path: Path, traces: _Traces, done: Forgotten) -> None:
    """Put a file with traces where it belongs."""
    try:
        if not (count := sum(map(traces.are_in, _pieces(path)))):
            return
        is_exported = path.with_name(MARKER).is_file()
        is_ours = is_exported or (path.suffix in _WRITTEN and any(map(_OURS.search, _pieces(path))))
    except (*BROKEN, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        done.left[path] = f"cannot be unpacked: {error}"
        return
    if is_ours:
        done.deleted.append(path)
    elif str(path).endswith(_LINED):
        done.removed[path] = count
        done.deleted += [index for index in [index_path(path)] if index.is_file()]
    elif path not in done.deleted:
        done.left[path] = _NAMED


def _pieces(path: Path) -> Iterator[bytes]:
    """The content in pieces, or by line; of a zip archive, a compressed or a Parquet file, what is in it."""
    with path.open("rb") as file:
        magic = file.peek(4)[:4]
        if magic == _PARQUET:
            for rows in ParquetFile(file).iter_batches():
                yield json.dumps(rows.to_pylist(), default=str).encode()
            return
        archive = zipfile.ZipFile(file) if magic == _ZIP else None
        whole = CompressedInputStream(file, "zstd") if magic == _ZSTANDARD else decompressed(file)
        for part in map(archive.open, archive.namelist()) if archive else [whole]:
            kept, is_lined = b"", str(path).endswith(_LINED)
            while piece := part.readline() if is_lined else part.read(_PIECE):
                yield kept + piece
                kept = b"" if is_lined else piece[-_OVERLAP:]


def _tables(path: Path) -> set[str]:
    """The tables of an SQLite file; none of any other."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as connection:
            return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            return set()
        raise EmailRLError(f"{path} is a damaged database ({error}).", "Delete it, or move it elsewhere.") from None


@contextmanager
def _opened(path: Path, traces: _Traces) -> Iterator[sqlite3.Connection]:
    check_cache(path, "--folder")
    lock = locked(path)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.create_function("names", 1, traces.names, deterministic=True)
            yield connection
    except (sqlite3.Error, ValueError) as error:
        raise EmailRLError(f"{path} cannot be rewritten ({error}).", "Close what uses it, and run it again.") from None
    finally:
        lock.close(remove=True)


def _filter_database(path: Path, traces: _Traces) -> None:
    """Remove the mails that the address sent, got or stands in. What goes is overwritten, the index made anew and the
    file written without gaps, so that no word or page of theirs stays."""
    has_stems = "stems" in _tables(path)
    with _opened(path, traces) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("BEGIN IMMEDIATE")
        removed = connection.execute(f"DELETE FROM {_MAILS}").rowcount
        connection.execute(_UNUSED)
        connection.execute("INSERT INTO emails_fts(emails_fts) VALUES ('rebuild')")
        if has_stems:
            connection.execute("CREATE VIRTUAL TABLE temp.kept USING fts5vocab(main, emails_fts, row)")
            connection.execute(f"DELETE FROM stems WHERE word NOT IN (SELECT ltrim(term, '{PARTY}') FROM temp.kept)")
        connection.execute("UPDATE meta SET value = (SELECT count(*) FROM emails) WHERE key = 'emails'")
        (old,) = connection.execute("SELECT max(value) FROM meta WHERE key = 'fingerprint'").fetchone()
        new = f"{int(old or '0', 16) + removed:032x}"[-32:]
        connection.execute("UPDATE meta SET value = ? WHERE key = 'fingerprint'", (new,))
        connection.execute("COMMIT")
        connection.execute("VACUUM")
