"""Files as a crash leaves them: whole or not there, on the disk before their name says so, and readable by others."""

from __future__ import annotations

import os
from pathlib import Path


def replace_bytes(path: Path, content: bytes) -> None:
    """Put ``content`` in place of the file in one step, on disk before the name points to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    sync(beside)
    beside.replace(path)


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
