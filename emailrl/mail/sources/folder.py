"""Reads a folder tree of mail: one message per file (CMU Enron release, Maildir), or files of many messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from emailrl.mail.sources.archive import BLOCK
from emailrl.mail.sources.files import may_hold_many, open_file, under
from emailrl.mail.sources.parallel import Item
from emailrl.mail.sources.raw_email import Reading, Skipped


class FolderShare:
    """The fraction of a folder tree that has been read, in files; they are counted on the first call."""

    def __init__(self, root: Path) -> None:
        self.read = 0
        self._root = root
        self._all: int | None = None

    def __call__(self) -> float:
        """Return the fraction, 0 to 1."""
        if self._all is None:
            self._all = sum(len(files) for _, _, files in os.walk(self._root))
        return min(self.read / max(self._all, 1), 1.0)


def read_folder(root: Path, reading: Reading, share: FolderShare) -> Iterator[Item]:
    """Yield the messages under ``root`` in a fixed order of files, named by their path below it.

    A file of many messages yields all of them; any other file counts as one message. Links and devices are not
    followed.
    """
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            yield Skipped("unreadable", os.path.relpath(folder, root))
            continue
        for entry in listed:
            share.read += not entry.is_dir(follow_symlinks=False)
            if entry.is_file(follow_symlinks=False):
                yield from _read_file(entry.path, os.path.relpath(entry.path, root), reading)
            elif not entry.is_dir(follow_symlinks=False):
                yield Skipped("not_a_file", os.path.relpath(entry.path, root))
        folders += [Path(entry.path) for entry in reversed(listed) if entry.is_dir(follow_symlinks=False)]


def _read_file(path: str, name: str, reading: Reading) -> Iterator[Item]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            start = os.read(descriptor, BLOCK)
        finally:
            os.close(descriptor)
        opened = open_file(Path(path), name, reading) if may_hold_many(start) else None
    except OSError:
        yield Skipped("unreadable", name)
        return
    if opened is None:
        yield name, Path(path)
    elif opened.kind in ("archive", "table"):
        yield from under(name, opened.items)
    else:
        yield from opened.items
