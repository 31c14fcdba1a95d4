"""Files as a crash leaves them: whole or not there, on the disk before their name says so, and readable by others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Put ``content`` in place of the file in one step, on disk before the name points to it; ``mode`` less the umask.

    A device or a pipe is written to and never replaced. OSError, with the path as its ``filename``, where the content
    cannot be put there; nothing is then left beside it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path):
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
def naming(path: Path) -> Iterator[None]:
    """Give an OSError the path that it lacks: writing into an open file on a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def not_a_file(path: Path) -> str | None:
    """Return what a path is instead of a file, such as "a folder"; None for a file, a link to one, or a free name."""
    if path.is_file() or not os.path.lexists(path):
        return None
    if not path.exists():
        return "a broken link"
    return "a folder" if path.is_dir() else "a device or pipe"


def sync(path: Path) -> None:
    """Wait until the file's content, or the names in the folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def share_files(folder: Path) -> None:
    """Give every file of the folder the mode a new one gets; safetensors leaves its own to their owner alone (0600)."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~umask)
