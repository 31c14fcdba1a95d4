"""Runs under an output folder, and the checkpoint that a word or a path means."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from emailrl.checkpoints.reading import Checkpoint, list_checkpoints, read_checkpoint, verify
from emailrl.errors import EmailRLError, UsageError
from emailrl.settings import run_root

MODES = ("masked", "rollout", "simple")
SFT = "sft"
"""What stands in a mode's place for a run of supervised fine-tuning."""


def run_folders(output_dir: Path, mode: str | None = None) -> list[Path]:
    """The folders under OUTPUT_DIR named as runs are, by number, of one mode or of all; some may hold no checkpoint."""
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
    """The n of ``grpo_masked-n``, 1 for a run without: a run begun later under the same name has a higher one."""
    found = re.search(r"-(\d+)$", run.name)
    return int(found[1]) if found else 1


def find_runs(output_dir: Path, mode: str | None = None) -> list[Path]:
    """The runs under OUTPUT_DIR that hold a checkpoint, of one mode or of all; the one last written to comes last."""
    written = {
        run: max(checkpoint.created for checkpoint in checkpoints)
        for run in run_folders(output_dir, mode)
        if (checkpoints := list_checkpoints(run))
    }
    return sorted(written, key=written.__getitem__)  # those of one time stay in the order they were begun


def created_after(runs: Iterable[Path]) -> str:
    """The time to write on a new checkpoint: now, but later than all there is, should the clock have been set back.

    In ISO form, to the microsecond, UTC.
    """
    before = [checkpoint.created + timedelta(microseconds=1) for run in runs for checkpoint in list_checkpoints(run)]
    return max([datetime.now(UTC), *before]).astimezone(UTC).isoformat(timespec="microseconds")


def find_checkpoint(which: str | Path, output_dir: Path, mode: str | None = None) -> Checkpoint:
    """``best`` or ``latest`` of the newest run under OUTPUT_DIR, or the checkpoint at a path; its hashes are checked.

    ``best`` is the run's ``best_model``, ``latest`` its checkpoint with the highest step, of whatever kind.
    """
    if which not in ("best", "latest"):
        return verify(read_checkpoint(Path(which)))
    return verify(checkpoint_of(newest_run(output_dir, mode), str(which)))


def newest_run(output_dir: Path, mode: str | None = None, *, but: str | None = None) -> Path:
    """The run last written to under OUTPUT_DIR, of any mode ``but`` that; EmailRLError where there is none."""
    runs = [run for run in find_runs(output_dir, mode) if list_checkpoints(run)[-1].metadata.mode != but]
    if not runs:
        where = run_root(output_dir, mode) if mode else output_dir
        hint = "Train first (emailrl train), or pass a checkpoint's path."
        raise EmailRLError(f"No checkpoint under {where}*.", hint)
    return runs[-1]


def checkpoint_of(run: Path, which: str) -> Checkpoint:
    """A run's ``best`` or ``latest`` checkpoint, its hashes unchecked; UsageError where the run holds none."""
    checkpoints = list_checkpoints(run)
    if which == "best":
        checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.metadata.kind in ("best", SFT)]
    if not checkpoints:
        name = "best_model" if which == "best" else "checkpoint"
        raise UsageError(f"{run} has no {name}.", "Use latest, or a checkpoint's path.")
    return checkpoints[-1]
