"""A folder tree of mail, one file a message, as in the CMU Enron release or a Maildir."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from emailrl.store.sources.message import Skipped


def read_folder(root: Path) -> Iterator[tuple[str, Path] | Skipped]:
    """The files under ``root`` in a fixed order, named by their path below it; links and devices are not followed."""
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
            if entry.is_file(follow_symlinks=False):
                yield os.path.relpath(entry.path, root), Path(entry.path)
            elif not entry.is_dir(follow_symlinks=False):
                yield Skipped("not_a_file", os.path.relpath(entry.path, root))
        folders += [Path(entry.path) for entry in reversed(listed) if entry.is_dir(follow_symlinks=False)]
