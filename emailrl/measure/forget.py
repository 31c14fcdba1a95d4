"""Takes a mailbox out of everything below a folder: mails out of databases and lines out of JSONL files; what emailrl
derived from such files is deleted whole, since it can be made again. Only regular files are opened, and no link is
followed; what names the address all the same is reported and left."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
from contextlib import closing
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Final

from emailrl.base.disk import LOCK, check_cache, is_locked, replace_bytes
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.records.lines import parse

_BENCHMARK: Final = frozenset({"results.json", "results.csv", "questions.csv", "conditions.json"})
_TEXTS: Final = "message_id subject from_address body file_name names attachments machine refs"
_MAILS: Final = f"""
    emails WHERE {" OR ".join(f"instr(lower({column}), ?1)" for column in _TEXTS.split())}
    OR id IN (SELECT email_id FROM recipients WHERE instr(lower(recipient_address), ?1))"""
_UNUSED: Final = """
    DELETE FROM addresses WHERE address NOT IN (SELECT recipient_address FROM recipients)
    AND address NOT IN (SELECT from_address FROM emails WHERE from_address IS NOT NULL)"""


@dataclass(slots=True)
class Forgotten:
    """What goes, or went: mails or lines by file, whole files; and what stays, with the reason."""

    removed: dict[Path, int] = field(default_factory=dict)
    deleted: list[Path] = field(default_factory=list)
    left: dict[Path, str] = field(default_factory=dict)


def forget(inbox: str, folder: Path, *, dry: bool) -> Forgotten:
    """Remove the mailbox below ``folder``; ``dry`` only says what would go. Raises UsageError if nothing names it or a
    run writes there, EmailRLError for a damaged database."""
    inbox, done = inbox.strip().lower(), Forgotten()
    files = _files(folder, done.left)
    for path in files:
        if path.suffix == ".jsonl":
            _filter_lines(path, inbox, done, dry=dry)
        elif {"emails", "emails_fts", "meta"} <= (tables := _tables(path)):
            _filter_database(path, inbox, done, dry=dry)
        elif tables == {"kept"} or _is_derived(path):  # a cache of replies names nobody, and may quote mail
            done.deleted.append(path)
    if not done.removed and not any(_holds(path, inbox) for path in files):
        raise UsageError(f"Nothing below {folder} names {inbox}.", "Check --inbox, and the folder.")
    for path in done.deleted if not dry else ():
        for end in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + end).unlink(missing_ok=True)
    treated = {*done.deleted, *(done.removed if dry else ())}
    for path in files:
        if path.suffix == ".eval":
            done.left[path] = "a compressed log: delete it if it is of this mailbox"
        elif path not in treated and path.exists() and _holds(path, inbox):
            done.left.setdefault(path, "names the address, and emailrl cannot make it again")
    return done


def _files(folder: Path, left: dict[Path, str]) -> list[Path]:
    """The regular files below; ``left`` gets links, devices and pipes."""
    found = []
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent, name) for name in sorted([*folders, *names])):
            if path.name == LOCK and is_locked(path):
                raise UsageError(f"A run is writing in {path.parent}.", "Wait for its end.")
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                found.append(path)
            elif not stat.S_ISDIR(mode):
                left[path] = "a link, which is not followed" if stat.S_ISLNK(mode) else "a device or pipe"
    return found


def _holds(path: Path, text: str) -> bool:
    """Whether the bytes of the file hold the text, in any case."""
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
        return re.search(re.escape(text.encode()), mapped, re.IGNORECASE) is not None


def _is_derived(path: Path) -> bool:
    """Whether emailrl made the file, of trajectories or mail."""
    name, folder = path.name, path.parent
    if path.suffix == ".html" or name == "ask.json":
        return _holds(path, "emailrl" if path.suffix == ".html" else '{"inbox"')
    if name in _BENCHMARK or name == "training.log":
        return (folder / "conditions.json").exists() or (folder / "metrics.jsonl").exists()
    return name.endswith(".jsonl.index") or (folder.name == "skipped" and (folder.parent / "metrics.jsonl").exists())


def _filter_lines(path: Path, inbox: str, done: Forgotten, *, dry: bool) -> None:
    """Keep the lines that do not name the address, unreadable ones among them."""
    kept, removed, unread = list[bytes](), 0, 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            text = json.dumps(parse(line), ensure_ascii=False)
        except (ValueError, RecursionError):
            text, unread = line.decode("utf-8", "replace"), unread + bool(line.strip())
        if inbox in text.lower():
            removed += 1
        else:
            kept.append(line)
    if unread:
        done.left[path] = f"{unread} of its lines cannot be read: kept, unless the address stands in them"
    if removed:
        done.removed[path] = removed
        if not dry:
            replace_bytes(path, b"".join(kept))


def _tables(path: Path) -> set[str]:
    """The tables of an SQLite file; none of any other."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as connection:
            return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
            return set()
        raise EmailRLError(f"{path} is a damaged database ({error}).", "Delete it, or move it elsewhere.") from None


def _filter_database(path: Path, inbox: str, done: Forgotten, *, dry: bool) -> None:
    """Remove the mails that the address sent, got or stands in. The index is made anew and the file written without
    gaps, so that no word or page of theirs stays; a file where this was interrupted still holds the address."""
    check_cache(path, "--folder")
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            (removed,) = connection.execute(f"SELECT count(*) FROM {_MAILS}", (inbox,)).fetchone()
            if not removed and not _holds(path, inbox):
                return
            done.removed[path] = removed
            if dry:
                return
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(f"DELETE FROM {_MAILS}", (inbox,))
            connection.execute(_UNUSED)
            connection.execute("INSERT INTO emails_fts(emails_fts) VALUES ('rebuild')")
            connection.execute("UPDATE meta SET value = (SELECT count(*) FROM emails) WHERE key = 'emails'")
            (old,) = connection.execute("SELECT max(value) FROM meta WHERE key = 'fingerprint'").fetchone()
            new = f"{int(old or '0', 16) + removed:032x}"[-32:]
            connection.execute("UPDATE meta SET value = ? WHERE key = 'fingerprint'", (new,))
            connection.execute("COMMIT")
            connection.execute("VACUUM")
    except (sqlite3.Error, ValueError) as error:
        raise EmailRLError(f"{path} cannot be rewritten ({error}).", "Close what uses it, and run it again.") from None
