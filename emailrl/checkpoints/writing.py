"""Writes, replaces and removes checkpoints; a crash at any moment leaves a complete one, old or new."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from emailrl.base.disk import naming, replace_bytes, sync
from emailrl.checkpoints.reading import (
    METADATA,
    Checkpoint,
    Metadata,
    incoming_of,
    list_checkpoints,
    outgoing_of,
    sha256_of,
    standing_of,
)
from emailrl.records import finite


def write_checkpoint(path: Path, metadata: Metadata, fill: Callable[[Path], None]) -> Checkpoint:
    """Write or replace the checkpoint at ``path`` with the files that ``fill`` writes into the given directory.

    ``metadata.files`` is filled in here. A crash at any moment leaves a complete checkpoint, old or new. An OSError of
    ``fill`` without a file name, such as that of a full disk, gets ``path`` as its ``filename``.
    """
    _settle(path)
    incoming, outgoing = incoming_of(path), outgoing_of(path)
    incoming.mkdir(parents=True)
    with naming(path):
        fill(incoming)
    names = sorted(file.relative_to(incoming).as_posix() for file in incoming.rglob("*") if file.is_file())
    for name in names:
        sync(incoming / name)
    metadata = replace(metadata, files={name: sha256_of(incoming / name) for name in names})
    text = json.dumps(finite(asdict(metadata)), indent=2, allow_nan=False)
    replace_bytes(incoming / METADATA, text.encode() + b"\n")
    sync(incoming)
    if path.exists():
        path.rename(outgoing)
    incoming.rename(path)
    sync(path.parent)
    _delete(outgoing)
    return Checkpoint(path, metadata)


def recover(run_dir: Path) -> None:
    """Complete or undo a replacement that a crash interrupted; called by the run's own process before it writes."""
    for name in sorted({hidden.name[1:].rsplit(".", 1)[0] for hidden in run_dir.glob(".*.*ing")}):
        _settle(run_dir / name)
    for leftover in run_dir.glob(".*.trash"):
        _delete(leftover)


def _settle(path: Path) -> None:
    if not path.exists() and (standing := standing_of(path)) != path:
        standing.rename(path)
    _delete(incoming_of(path))
    _delete(outgoing_of(path))


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Remove all but the last ``keep`` of the run's ``checkpoint-N``; ``best_model`` and ``final`` always stay."""
    removed = prunable(run_dir, keep)
    remove_checkpoints(removed)
    return removed


def prunable(run_dir: Path, keep: int) -> list[Path]:
    """Return what ``prune`` would remove, the oldest first."""
    numbered = [item.path for item in list_checkpoints(run_dir) if item.metadata.kind == "checkpoint"]
    return numbered[: max(len(numbered) - keep, 0)]


def remove_checkpoints(paths: Iterable[Path]) -> None:
    """Remove checkpoints, each atomically, so that none is ever seen partly removed."""
    for path in paths:
        trash = path.with_name(f".{path.name}.trash")
        _delete(trash)
        path.rename(trash)
        _delete(trash)


def _delete(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
