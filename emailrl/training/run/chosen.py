"""Which run and checkpoint ``--resume`` means, and what is lost by resuming from it."""

from __future__ import annotations

from pathlib import Path

from emailrl.checkpoints import (
    SFT,
    Checkpoint,
    checkpoint_of,
    find_runs,
    incomplete_checkpoints,
    list_checkpoints,
    newest_run,
    number_of,
    read_checkpoint,
    run_folders,
)
from emailrl.disk import LOCK
from emailrl.recording import read_records
from emailrl.settings import Settings, run_root


def begun_in_vain(settings: Settings) -> Path | None:
    """The newest run under this name if it has no checkpoint, damaged or intact: it died before its first."""
    base = run_root(settings.output.output_dir, settings.training.mode)
    last = next((run for run in reversed(run_folders(base, settings.training.mode)) if (run / LOCK).exists()), None)
    if last is None or list_checkpoints(last):
        return None
    damaged = any(path.exists() for path in incomplete_checkpoints(last))  # a first one, half-written, has no name yet
    return None if damaged else last


def run_to_resume(settings: Settings, resume: str) -> Path | None:
    """The directory of the run that ``resume`` means (`resume.resumed`); None if ``auto`` finds none.

    If no mode was named, ``auto``, ``latest`` and ``best`` refer to the newest run of any mode.
    """
    output_dir, training = settings.output.output_dir, settings.training
    mode = training.mode if "mode" in training.model_fields_set else None
    if resume == "auto":
        runs, vain = find_runs(output_dir, mode, but=SFT), begun_in_vain(settings)
        if vain is not None and not any(_outlasts(run, vain, training.mode) for run in runs):
            return vain
        return runs[-1] if runs else None
    if resume in ("latest", "best"):
        return newest_run(output_dir, mode, but=SFT, which=resume)
    path = Path(resume)
    return path if list_checkpoints(path) else read_checkpoint(path).path.parent


def _outlasts(run: Path, vain: Path, mode: str) -> bool:
    """Whether a run was begun after one of ``mode`` without checkpoint, or, if of another mode, written since."""
    last = list_checkpoints(run)[-1]
    if last.metadata.mode == mode:
        return number_of(run) > number_of(vain)
    return last.created.timestamp() > (vain / LOCK).stat().st_mtime


def checkpoint_to_resume(directory: Path, settings: Settings, resume: str) -> Checkpoint | None:
    """The run's checkpoint that ``resume`` means, hashes unchecked; None if the run died before its first."""
    if resume == "auto" and directory == begun_in_vain(settings):
        return None
    path = Path(resume)
    if resume in ("auto", "latest", "best") or path == directory:
        return checkpoint_of(directory, "best" if resume == "best" else "latest")
    return read_checkpoint(path)


def loss_of_going_back(directory: Path, checkpoint: Checkpoint) -> str | None:
    """What resuming from this checkpoint removes; None if ``latest`` would resume from the same step."""
    step, checkpoints = checkpoint.metadata.step, list_checkpoints(directory)
    later = {item.path: item.metadata.step for item in checkpoints if item.metadata.step > step}
    damaged = damaged_after(directory, step)
    if not later and not damaged:
        return None
    metrics = directory / "metrics.jsonl"
    recorded = [record["step"] for record in read_records(metrics)] if metrics.exists() else []
    last = max([*recorded, *later.values(), *map(_step_in_name, damaged)])
    names = ", ".join(path.name for path in (*later, *damaged))
    steps = f"step {last}" if last == step + 1 else f"steps {step + 1} to {last}"
    loss = f"Resuming from step {step} removes later work in {directory}: {steps}, {names}."
    return " ".join([*damaged.values(), loss])


def damaged_after(directory: Path, step: int) -> dict[Path, str]:
    """A run's damaged ``checkpoint-N`` of steps after this one, each with what is wrong."""
    damaged = incomplete_checkpoints(directory).items()
    return {path: why for path, why in damaged if path.exists() and _step_in_name(path) > step}


def _step_in_name(path: Path) -> int:
    """The N of ``checkpoint-N``; 0 for other names."""
    digits = path.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() else 0
