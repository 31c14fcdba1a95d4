"""Crash-safe files: complete or absent, on disk before they are renamed, and readable by others."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK: Final = ".lock"
"""In a run's directory: the file that the process writing there has locked (flock)."""


def is_locked(path: Path) -> bool:
    """Whether a process has locked the file; False for one that is missing or cannot be opened."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(lock)
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, created if missing, after waiting for any other process that holds it."""
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def replace_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically with ``content``, which is on disk before the rename; ``mode`` is masked by the umask.

    A device or a pipe is written to and never replaced. Raises OSError, with the path as its ``filename``, if the
    content cannot be written; no temporary file is then left.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path, beside):
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.touch(mode)
            beside.write_bytes(content)
            sync(beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Add the path to an OSError without one, such as a write to an open file on a full disk.

    It also replaces the name of a ``temporary`` file, which means nothing to a user.
    """
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
