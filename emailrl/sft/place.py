"""The location of a supervised fine-tuning run: a new folder, or a checkpoint to resume from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emailrl.checkpoints import SFT, Checkpoint, find_runs, list_checkpoints, read_checkpoint, run_folders, verify
from emailrl.disk import LOCK
from emailrl.errors import UsageError
from emailrl.settings import Settings, run_root
from emailrl.training.run.directory import free_directory

PRODUCT = "best_model"
"""The subfolder of a run that holds its result."""


@dataclass(frozen=True, slots=True)
class Place:
    """A run's folder, and the checkpoint to resume from (None: start at step 0)."""

    directory: Path
    checkpoint: Checkpoint | None = None


def find_place(settings: Settings, out: Path | None, resume: str | None) -> Place:
    """Where to train: in ``out``, by default the free folder ``<output_dir>_sft``, or in the run that ``resume``
    selects.

    ``auto`` resumes the run in ``out`` (by default the newest) if there is one, ``latest`` requires it, and a path
    names the run or its last checkpoint. Raises UsageError for a folder that holds something else, a missing run, and a
    checkpoint that is not the last.
    """
    if resume is None:
        if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(
                f"{out} already exists.", "Choose another folder with --out, or continue it with --resume latest."
            )
        return Place(out or free_directory(run_root(settings.output.output_dir, SFT)))
    directory = _run_of(settings, out, resume)
    there = list_checkpoints(directory) if directory is not None else []
    if other := next((item for item in there if item.metadata.mode != SFT), None):
        raise UsageError(f"{directory} is a run of mode {other.metadata.mode}.", "Continue it with emailrl train.")
    checkpoints = [item for item in there if item.metadata.kind == "checkpoint"]
    if directory is None or not checkpoints:
        if resume != "auto":
            raise UsageError("There is no sft run to resume.", "Start one without --resume.")
        return Place(directory or free_directory(run_root(settings.output.output_dir, SFT)))
    last = checkpoints[-1]
    if Path(resume).name.startswith("checkpoint-") and Path(resume).resolve() != last.path.resolve():
        raise UsageError(f"{directory} already has {last.path.name}.", f"Resume from that, or copy {resume} elsewhere.")
    return Place(directory, verify(last))


def _run_of(settings: Settings, out: Path | None, resume: str) -> Path | None:
    if resume not in ("auto", "latest"):
        path = Path(resume)
        return path if list_checkpoints(path) else read_checkpoint(path).path.parent
    if out is not None:
        return out
    root = run_root(settings.output.output_dir, SFT)
    if resume == "auto":  # also one that died before its first checkpoint
        begun = [run for run in run_folders(root, SFT) if (run / LOCK).exists()]
    else:
        begun = find_runs(root, SFT)
    return begun[-1] if begun else None
