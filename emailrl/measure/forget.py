"""Takes a mailbox out of everything below a folder. Databases and JSONL files are written anew beside themselves,
without what names its address; whatever is derived from such files is deleted whole, since it can be made again. Only
regular files are opened, and no link is followed; what holds the address all the same is reported and left."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from emailrl.base.disk import LOCK, check_beside, is_locked, replace_bytes, sync
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.records.lines import parse

_CHUNK: Final = 1 << 22
_SQLITE: Final = b"SQLite format 3\0"
_DERIVED: Final = frozenset({".index", ".html", ".eval", ".csv", ".log"})
_OURS: Final = frozenset({"ask.json", "results.json", "conditions.json"})
_BESIDE: Final = ("-wal", "-shm", "-journal")
_TEXTS: Final = (
    "message_id", "subject", "from_address", "body", "file_name", "names", "attachments", "machine", "refs"
)  # fmt: skip


@dataclass(slots=True)
class Forgotten:
    """What was found, or changed: rows or lines removed by file, files deleted, and what stays with the reason."""

    removed: dict[Path, int] = field(default_factory=dict)
    deleted: list[Path] = field(default_factory=list)
    left: dict[Path, str] = field(default_factory=dict)


def forget(inbox: str, folder: Path, *, dry: bool) -> Forgotten:
    """Remove the mailbox below ``folder``; ``dry`` only says what would go. Raises UsageError while a run writes there,
    EmailRLError for a damaged database."""
    inbox, done, files = inbox.strip().lower(), Forgotten(), []
    for path, status in _entries(folder):
        if not stat.S_ISREG(status.st_mode):
            if stat.S_ISLNK(status.st_mode) or not stat.S_ISDIR(status.st_mode):
                done.left[path] = (
                    "a link, which is not followed" if stat.S_ISLNK(status.st_mode) else "a device or pipe"
                )
        elif path.name == LOCK and is_locked(path):
            raise UsageError(f"A run is writing in {path.parent}.", "Wait for its end.")
        else:
            files.append(path)
    gone: set[str] = set()
    for path in files:
        if path.suffix == ".jsonl":
            _filter_lines(path, inbox, gone, done, dry=dry)
    for path in files:
        if path.suffix == ".jsonl" and path.parent.name == "training":  # ids and numbers under a trajectory's id
            _filter_ids(path, gone, done, dry=dry)
    for path in files:
        if _head(path) == _SQLITE and (kind := _kind_of(path)):
            if kind == "cache":  # its keys are hashes, and its replies quote mail without an address
                done.deleted.append(path)
            else:
                _filter_database(path, inbox, done, dry=dry)
    if not done.removed and not any(_holds(path, inbox) for path in files):
        raise UsageError(f"Nothing below {folder} names {inbox}.", "Check --inbox, and the folder.")
    done.deleted += [each for each in files if _is_derived(each)]
    for path in done.deleted if not dry else ():
        for beside in (path, *(path.with_name(path.name + end) for end in _BESIDE)):
            beside.unlink(missing_ok=True)
    whole = {*done.deleted, *(done.removed if dry else ())}
    for path in files:
        if path not in whole and path.exists() and _holds(path, inbox):
            done.left.setdefault(path, "names the address, and is not a file of emailrl's that can be made again")
    return done


def _entries(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for parent, folders, names in os.walk(folder):
        for name in sorted([*folders, *names]):
            path = Path(parent, name)
            with suppress(FileNotFoundError):
                yield path, path.lstat()


def _open(path: Path) -> Any:
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))


def _head(path: Path) -> bytes:
    with _open(path) as file:
        return bytes(file.read(len(_SQLITE)))


def _holds(path: Path, inbox: str) -> bool:
    """Whether the bytes of the file hold the address, in any case."""
    wanted, kept = inbox.encode(), b""
    with _open(path) as file:
        while block := file.read(_CHUNK):
            kept = kept[-len(wanted) :] + block.lower()
            if wanted in kept:
                return True
    return False


def _is_derived(path: Path) -> bool:
    return path.suffix in _DERIVED or path.name in _OURS or path.parent.name == "skipped"


def _filter_lines(path: Path, inbox: str, gone: set[str], done: Forgotten, *, dry: bool) -> None:
    """Keep the lines that do not name the address; those that are no JSON are kept and reported, unless they do."""
    kept, removed, bad = [], 0, 0
    with _open(path) as file:
        for line in file:
            try:
                record, text = parse(line), ""
                text = json.dumps(record, ensure_ascii=False).lower()
            except (ValueError, RecursionError):
                record, text = None, line.decode("utf-8", "replace").lower()
                bad += bool(line.strip())
            if inbox in text:
                removed += 1
                gone |= {str(record["id"])} if isinstance(record, dict) and "id" in record else set()
            else:
                kept.append(line)
    if bad:
        done.left[path] = f"{bad} lines are not JSON: those that do not name the address were kept unread"
    _replace(path, kept, removed, done, dry=dry)


def _filter_ids(path: Path, gone: set[str], done: Forgotten, *, dry: bool) -> None:
    kept, removed = [], 0
    with _open(path) as file:
        for line in file:
            with suppress(ValueError, RecursionError, AttributeError):
                if str(parse(line).get("id")) in gone:
                    removed += 1
                    continue
            kept.append(line)
    _replace(path, kept, removed, done, dry=dry)


def _replace(path: Path, kept: list[bytes], removed: int, done: Forgotten, *, dry: bool) -> None:
    if removed:
        done.removed[path] = done.removed.get(path, 0) + removed
        if not dry:
            replace_bytes(path, b"".join(kept))


def _kind_of(path: Path) -> str | None:
    """What an SQLite file is: a mail database, a cache of replies, or None."""
    with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro&immutable=1", uri=True)) as connection:
        try:
            names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        except sqlite3.Error as error:
            raise EmailRLError(f"{path} is a damaged database ({error}).", "Delete it, or move it elsewhere.") from None
    return "mail" if {"emails", "recipients", "emails_fts"} <= names else "cache" if "kept" in names else None


def _filter_database(path: Path, inbox: str, done: Forgotten, *, dry: bool) -> None:
    """Remove the mails that the address sent, got or stands in, in a copy that SQLite then writes without gaps."""
    check_beside(path, "--folder")
    beside = path.with_name(f".{path.name}.forgetting")
    beside.unlink(missing_ok=True)
    named = " OR ".join(f"instr(lower({name}), :inbox)" for name in _TEXTS)
    mails = f"SELECT id FROM emails WHERE {named} UNION "
    mails += "SELECT email_id FROM recipients WHERE instr(lower(recipient_address), :inbox)"
    try:
        shutil.copyfile(path, copy := beside.with_suffix(".copy"))
        for end in _BESIDE:
            if (more := path.with_name(path.name + end)).exists():
                shutil.copyfile(more, copy.with_name(copy.name + end))
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            given = {"inbox": inbox}
            (removed,) = connection.execute(f"SELECT count(*) FROM ({mails})", given).fetchone()
            if not removed:
                return
            done.removed[path] = removed
            if dry:
                return
            connection.execute("BEGIN")
            connection.execute("CREATE TEMP TABLE going AS " + mails, given)
            for table, column in (("recipients", "email_id"), ("threads", "email_id"), ("emails", "id")):
                connection.execute(f"DELETE FROM {table} WHERE {column} IN (SELECT id FROM going)")
            connection.execute(
                "DELETE FROM addresses WHERE address NOT IN (SELECT recipient_address FROM recipients) "
                "AND address NOT IN (SELECT from_address FROM emails WHERE from_address IS NOT NULL)"
            )
            connection.execute("COMMIT")
            connection.execute("INSERT INTO emails_fts(emails_fts) VALUES ('rebuild')")
            connection.execute("VACUUM INTO ?", (str(beside),))
        sync(beside)
        os.replace(beside, path)
        for end in _BESIDE:
            path.with_name(path.name + end).unlink(missing_ok=True)
    except sqlite3.Error as error:
        raise EmailRLError(f"{path} cannot be rewritten ({error}).", "It is unchanged.") from None
    finally:
        for name in (beside, *(copy.with_name(copy.name + end) for end in ("", *_BESIDE))):
            name.unlink(missing_ok=True)
