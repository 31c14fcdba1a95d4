"""Finds runs under an output folder, and checkpoints by name or path."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from emailrl.base.errors import UsageError
from emailrl.checkpoints.reading import Checkpoint, list_checkpoints, read_checkpoint, verify
from emailrl.settings import run_root

MODES = ("masked", "rollout", "simple")
SFT = "sft"
"""Takes the place of the mode in the name of a supervised fine-tuning run."""


def run_folders(output_dir: Path, mode: str | None = None) -> list[Path]:
    """Return the run folders of OUTPUT_DIR by number, of one mode or all; some may have no checkpoint."""
    roots = {run_root(output_dir, each) for each in ([mode] if mode else (*MODES, SFT))} | {output_dir}
    found = {
        entry
        for root in roots
        if root.name and root.parent.is_dir()
        for entry in root.parent.iterdir()
        if re.fullmatch(re.escape(root.name) + r"(-\d+)?", entry.name) and entry.is_dir()
    }
    return sorted(found, key=lambda run: (number_of(run), run.name))


def number_of(run: Path) -> int:
    """Return the n of ``grpo_masked-n``, or 1 without a number; later runs of the same name have higher numbers."""
    found = re.search(r"-(\d+)$", run.name)
    return int(found[1]) if found else 1


def find_runs(
    output_dir: Path, mode: str | None = None, *, but: str | None = None, which: str = "latest"
) -> list[Path]:
    """Return the runs of OUTPUT_DIR with a checkpoint, the most recently written last: of one mode, or all ``but``.

    ``which="best"`` returns only those with a ``best_model``.
    """
    written = {
        run: max(checkpoint.created for checkpoint in checkpoints)
        for run in run_folders(output_dir, mode)
        if (checkpoints := list_checkpoints(run)) and checkpoints[-1].metadata.mode != but
        if which != "best" or any(map(_is_best, checkpoints))
    }
    return sorted(written, key=written.__getitem__)  # those of one time stay in the order they were begun


def created_after(runs: Iterable[Path]) -> str:
    """Return the creation time for a new checkpoint in ISO form, with microseconds, in UTC.

    It is the current time, or just after the latest checkpoint of ``runs`` if the clock was set back.
    """
    before = [checkpoint.created + timedelta(microseconds=1) for run in runs for checkpoint in list_checkpoints(run)]
    return max([datetime.now(UTC), *before]).astimezone(UTC).isoformat(timespec="microseconds")


def find_checkpoint(which: str | Path, output_dir: Path, mode: str | None = None) -> Checkpoint:
    """Return ``best`` or ``latest`` of OUTPUT_DIR, or the checkpoint at a path, with hashes checked.

    ``best`` is the ``best_model`` of the newest run that has one; ``latest`` is the checkpoint of any kind with the
    highest step in the newest run.
    """
    if which not in ("best", "latest"):
        return verify(read_checkpoint(Path(which)))
    which = str(which)
    return verify(checkpoint_of(newest_run(output_dir, mode, which=which), which))


def newest_run(output_dir: Path, mode: str | None = None, *, but: str | None = None, which: str = "latest") -> Path:
    """Return the last of ``find_runs``; UsageError if there is none."""
    if runs := find_runs(output_dir, mode, but=but, which=which):
        return runs[-1]
    kind, where = f"{mode} run" if mode else "run", f"(output folder: {output_dir})"
    if find_runs(output_dir, mode, but=but):
        raise UsageError(f"No {kind} has a best_model {where}.", "Use latest, or a checkpoint's path.")
    hint = "Train first (emailrl train), or pass a checkpoint's path."
    raise UsageError(f"No {kind} has a checkpoint {where}.", hint)


def runs_without_best(output_dir: Path, mode: str | None = None) -> list[Path]:
    """Return the runs that ``best`` passes over: those with a checkpoint that are newer than the newest best."""
    runs, bests = find_runs(output_dir, mode), find_runs(output_dir, mode, which="best")
    return runs[runs.index(bests[-1]) + 1 :] if bests else runs


def checkpoint_of(run: Path, which: str) -> Checkpoint:
    """Return a run's ``best`` or ``latest`` checkpoint with hashes unchecked; UsageError if it has none."""
    checkpoints = list_checkpoints(run)
    if which == "best":
        checkpoints = list(filter(_is_best, checkpoints))
    if not checkpoints:
        name = "best_model" if which == "best" else "checkpoint"
        raise UsageError(f"{run} has no {name}.", "Use latest, or a checkpoint's path.")
    return checkpoints[-1]


def _is_best(checkpoint: Checkpoint) -> bool:
    return checkpoint.metadata.kind in ("best", SFT)
