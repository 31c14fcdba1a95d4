"""Crash-safe files: complete or absent, on disk before they are renamed, readable by others, and inside their folder.

A folder may come from a stranger, and a link in it would lead writes and removals elsewhere: ``check_place`` and
``check_own`` refuse it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from emailrl.base.errors import UsageError

LOCK: Final = ".lock"  # in a run's directory: the file that the process writing there has locked (flock)
_NAMES_ANOTHER: Final = bytes.fromhex("d9d505f920a163d7")  # the end of an SQLite journal that names a super-journal


def check_place(path: Path, option: str) -> None:
    """Raise UsageError if a file or folder to write is reached through a link; it may be missing. Inside the working
    folder, which may be a stranger's, no part of the path may be a link. Elsewhere the user has named the folders, so
    only the last part may not. ``option`` is the one with which to name the real place."""
    named, here = Path(os.path.abspath(path)), Path.cwd()
    anchor = here if here in named.parents else named.parent
    real = os.path.realpath(path)
    if real != os.path.join(os.path.realpath(anchor), named.relative_to(anchor)):
        hint = f"Name that place itself: {option}{'=' if option.isupper() else ' '}{shlex.quote(real)}"
        raise UsageError(f"A link leads from {path} to {real}; nothing is written through it.", hint)


def check_out(out: Path, *, may_exist: bool, option: str = "--out") -> None:
    """Raise UsageError if a file to write is a folder, exists but may not be replaced, or is reached through a link. A
    device or a pipe, which the user must have named, may always exist; outside the working folder also through a link,
    as ``/dev/stdout`` is one."""
    if out.is_dir():
        raise UsageError(f"{out} is a folder.", "Pass a file name.", "not-a-file")
    is_stream = out.exists() and not out.is_file()
    if not is_stream or Path.cwd() in Path(os.path.abspath(out)).parents:
        check_place(out, option)
    if out.exists() and not (is_stream or may_exist):
        raise UsageError(f"{out} already exists.", "Choose another file, or add --overwrite.", "exists")


@contextmanager
def new_folder(out: Path, option: str = "--out", *, replaces: bool = False) -> Iterator[Path]:
    """A folder to fill in the block, which becomes ``out`` at its end: it is complete or absent. UsageError if ``out``
    is reached through a link, or has files and the folder ``replaces`` none."""
    incoming, outgoing = (out.with_name(f".{out.name}.{end}") for end in ("incoming", "outgoing"))
    check_place(out, option)
    for beside in (incoming, outgoing):
        check_own(beside, option)
        shutil.rmtree(beside, ignore_errors=True)
    if not replaces and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} already exists.", f"Choose another folder ({option}).", "exists")
    incoming.mkdir(parents=True)
    try:
        yield incoming
        if out.exists():
            out.rename(outgoing)
        incoming.rename(out)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    shutil.rmtree(outgoing, ignore_errors=True)


def write_out(path: Path, content: bytes) -> None:
    """``replace_bytes`` for a path that ``check_out`` lets pass: a device or a pipe is written to and not replaced."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        replace_bytes(path, content)


def check_own(path: Path, option: str) -> None:
    """``check_place``, and UsageError for links, hard links, pipes and devices at the path or below it. W&B's own
    links, in folders named ``wandb``, are allowed."""
    check_place(path, option)
    waiting = [path]
    while waiting:
        entry = waiting.pop()
        with suppress(FileNotFoundError, NotADirectoryError):  # missing, or another process has just removed it
            status = entry.lstat()
            if stat.S_ISDIR(status.st_mode):
                waiting += entry.iterdir()
                continue
            what = "a device or pipe"
            if stat.S_ISREG(status.st_mode):
                what = "a hard link, a file with another name elsewhere" if status.st_nlink > 1 else ""
            elif stat.S_ISLNK(status.st_mode):
                wandb = [folder for folder in entry.parents if folder.name == "wandb" and path in folder.parents]
                inside = {Path(os.path.realpath(folder)) for folder in wandb} & {*Path(os.path.realpath(entry)).parents}
                # The log leads to W&B's cache and is only ever created.
                is_own = inside or (wandb and entry.name == "debug-core.log")
                what = "" if is_own else f"a link to {os.readlink(entry)}"
            if what:
                raise UsageError(f"{entry} is {what}.", "Remove it, or write elsewhere.")


def check_cache(path: Path, option: str) -> None:
    """``check_own`` for an SQLite file and those beside it. Its journal must not name another file, which SQLite would
    delete."""
    check_own(path, option)
    check_beside(path, option)
    journal = path.with_name(f"{path.name}-journal")
    if journal.is_file() and journal.read_bytes().endswith(_NAMES_ANOTHER):
        raise UsageError(f"{journal} is not of this cache.", "Remove it.")


def check_beside(path: Path, option: str) -> None:
    """``check_own`` for the files that SQLite reads and writes beside a database."""
    for suffix in ("-wal", "-shm", "-journal"):
        check_own(path.with_name(path.name + suffix), option)


def is_locked(path: Path) -> bool:
    """Whether a process has locked the file; False for one that is missing or cannot be opened."""
    try:
        with open(path, "rb+", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # also from a file system without locks
        return False
    return False


class Lock:
    """A file locked against other processes (flock) until ``close`` or the end of the process: the file that the path
    names, not one that its holder removed meanwhile."""

    def __init__(self, path: Path, *, wait: bool = False, create: bool = True) -> None:
        """Open and lock the file, which is created if missing and ``create``; a link is not followed. ``wait`` for
        another process that holds it, otherwise BlockingIOError; OSError if it cannot be opened or locked."""
        self.path = path
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        is_held = False
        while not is_held:
            self.descriptor = os.open(path, flags, 0o666)
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                with suppress(FileNotFoundError):
                    is_held = os.path.samestat(os.fstat(self.descriptor), path.stat())
            finally:
                if not is_held:
                    os.close(self.descriptor)

    def close(self, *, remove: bool = False) -> None:
        """Release the lock; ``remove`` the file first, while no other process can take it for its own."""
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def replace_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically with ``content``, which is on disk before the rename; ``mode`` is masked by the umask.
    A link, a device or a pipe there is itself replaced. OSError has the path as its ``filename``; no temporary file is
    left."""
    beside = path.with_name(f".{path.name}.{secrets.randbelow(10**9)}")  # not to be guessed: it may be planted
    with naming(path, beside):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
            sync(beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Add the path to an OSError without one, such as a write on a full disk, or with that of a ``temporary`` file."""
    try:
        yield
    except OSError as error:
        if error.filename is None or error.filename == str(temporary):
            error.filename = str(path)
        raise


def not_a_file(path: Path) -> str | None:
    """Return what a path is instead of a file, such as "a folder"; None for a file, a link to one, or a free name."""
    if path.is_file() or not os.path.lexists(path):
        return None
    if not path.exists():
        return "a broken link"
    return "a folder" if path.is_dir() else "a device or pipe"


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """A stamp that changes with the file's content; None if there is no file."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def share_files(folder: Path) -> None:
    """Give every file of the folder the mode of a new file; safetensors creates files as 0600."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~umask)
