"""Which run and checkpoint ``--resume`` means, and what is lost by resuming from it."""

from __future__ import annotations

import pickle
import random
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from emailrl.base.disk import LOCK
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import counted, first_line
from emailrl.checkpoints import (
    SFT,
    Checkpoint,
    checkpoint_of,
    damage_of,
    find_runs,
    incomplete_checkpoints,
    list_checkpoints,
    newest_run,
    number_of,
    read_checkpoint,
    recover,
    remove_checkpoints,
    run_folders,
    verify,
    write_checkpoint,
)
from emailrl.model.lora import writing_tensors
from emailrl.records import read_records
from emailrl.settings import Settings, run_root
from emailrl.training.run.directory import held, remove_records
from emailrl.training.run.state import RunState


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


STATE_FILE = "trainer_state.pt"


# -- where to start -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run to resume, its directory locked; without a checkpoint it starts over, having died before its first."""

    directory: Path
    checkpoint: Checkpoint | None


@contextmanager
def resumed(settings: Settings, resume: str | None, *, overwrite: bool) -> Iterator[Resumed | None]:
    """Lock the run that ``resume`` means, and only then choose its checkpoint; None is a new run.

    ``auto`` is the latest run if there is one, even if it died before its first checkpoint; ``latest``, ``best``; or
    the path of a run (its latest) or of a checkpoint; ``overwrite`` allows losing the run's later work. Raises
    UsageError if there is none (except with ``auto``) or if later work would be lost without ``overwrite``,
    EmailRLError for a damaged one or if another process trains there.
    """
    directory = None if resume is None else run_to_resume(settings, resume)
    if resume is None or directory is None:
        yield None
        return
    with held(directory):
        checkpoint = _whole(checkpoint_to_resume(directory, settings, resume))
        if checkpoint and not overwrite and (loss := loss_of_going_back(directory, checkpoint)):
            raise UsageError(loss, "Add --overwrite to do so, or copy the run first to keep both.")
        yield Resumed(directory, checkpoint)


def _whole(checkpoint: Checkpoint | None) -> Checkpoint | None:
    if checkpoint is not None and not (verify(checkpoint).path / STATE_FILE).is_file():
        raise UsageError(
            f"{checkpoint.path} has no trainer state.", "Resume from a checkpoint written by emailrl train."
        )
    return checkpoint


def new_run_id(mode: str) -> str:
    """A unique name for a run."""
    return f"{mode}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


# -- state on disk --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at the end of a step: what a checkpoint stores besides weights and optimizer."""

    state: dict[str, Any]
    """``RunState`` as plain values."""
    generators: dict[str, Any]


def take_snapshot(state: RunState) -> Snapshot:
    """A snapshot of the run; later steps do not change it."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    generators: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state_all()
    return Snapshot(state.to_dict(), generators)


def seed_generators(seed: int) -> None:
    """Seed every global random generator: a custom reward or environment may use one."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_state(path: Path, snapshot: Snapshot, updater: dict[str, Any]) -> None:
    """Write ``trainer_state.pt``: tensors and plain values, readable without running any code in it."""
    with writing_tensors(path):
        torch.save({"state": snapshot.state, "generators": snapshot.generators, "updater": updater}, path)


def read_state(checkpoint: Checkpoint) -> RunState:
    """The state of a checkpoint's run."""
    with reading_state(checkpoint) as saved:
        return RunState.from_dict(saved["state"])


def load_state(checkpoint: Checkpoint) -> tuple[RunState, dict[str, Any]]:
    """The states of a checkpoint's run and updater; restores the random generators."""
    with reading_state(checkpoint) as saved:
        state, generators = RunState.from_dict(saved["state"]), saved["generators"]
        random.setstate(generators["python"])
        np.random.set_state(generators["numpy"])
        torch.set_rng_state(generators["torch"])
        # A machine with fewer GPUs than the run had restores only the states it can use.
        for device, generator in enumerate(generators.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
        return state, saved["updater"]


@contextmanager
def reading_state(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """What ``save_state`` wrote; EmailRLError if it cannot be read."""
    path = checkpoint.path / STATE_FILE
    try:
        yield torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # not torch's text, which advises to load it unprotected
        raise EmailRLError(
            f"{path} contains objects other than tensors and plain values, or is damaged.",
            "Do not use this run unless you trust its source; start a new one without --resume.",
        ) from None
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError) as error:
        raise EmailRLError(
            f"{path} cannot be read ({first_line(error)}).",
            "Use another checkpoint (emailrl checkpoints list), or start a new run without --resume.",
        ) from None


def rewind(run_dir: Path, state: RunState) -> list[str]:
    """Remove records beyond the state's step, so that no step appears twice; return notes on what was removed.

    ``metrics.jsonl`` and ``evaluations.jsonl`` are truncated by their writers. A later or damaged ``best_model`` is
    replaced by the checkpoint of the best step if that still exists. Otherwise a later one stays until a better one is
    found, and a damaged one until the next evaluation, as ``state`` then has no best. A damaged ``final`` is removed.
    """
    recover(run_dir)
    said = _mend(run_dir, state)
    remove_records(run_dir, after=state.step)
    beyond = [item for item in list_checkpoints(run_dir) if item.metadata.step > state.step]
    numbered = [item.path for item in beyond if item.metadata.kind != "best"]
    damaged = damaged_after(run_dir, state.step)
    remove_checkpoints([*numbered, *damaged])
    said += [f"removed {path.name}, which is after step {state.step}" for path in numbered]
    said += [f"removed {path.name}, which is damaged: {why}" for path, why in damaged.items()]
    for best in (item for item in beyond if item.metadata.kind == "best" and damage_of(item.path) is None):
        if _restored(best.path, state):
            said.append(f"best_model restored to step {state.best_step}")
        else:
            said.append(f"best_model is from the later step {best.metadata.step}; it stays until a better one")
    return said


def lost_metrics(run_dir: Path, step: int) -> list[str]:
    """A note that names the steps up to ``step`` without a line in ``metrics.jsonl``, if any."""
    path = run_dir / "metrics.jsonl"
    steps = [record.get("step") for record in read_records(path)] if path.exists() else []
    recorded = {number for number in steps if isinstance(number, int)}
    lost = [number for number in range(1, step + 1) if number not in recorded]
    if not lost:
        return []
    named = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
    return [f"{path} has no line of {counted(len(lost), 'step')} ({named}); curves and reports lack their numbers"]


def _mend(run_dir: Path, state: RunState) -> list[str]:
    """Remove a damaged ``final``, replace a damaged or missing ``best_model``; return notes on both."""
    said, final, best = [], run_dir / "final", run_dir / "best_model"
    if why := damage_of(final):
        remove_checkpoints([final])
        said.append(f"removed final, which is damaged and will be written again at the end: {why}")
    missing = state.best_step is not None and not best.exists()
    if why := "its folder does not exist" if missing else damage_of(best):
        problem = "missing" if missing else "damaged"
        if _restored(best, state):
            said.append(
                f"best_model, which was {problem}, is restored from the checkpoint of step {state.best_step}: {why}"
            )
        else:
            said.append(
                f"best_model is {problem}, no intact checkpoint of step {state.best_step} is left, and only a later"
                f" evaluation selects another: {why}"
            )
            state.best_step = state.best_accuracy = state.best_interval = None
    return said


def _restored(best: Path, state: RunState) -> bool:
    """Replace ``best_model`` by an intact checkpoint of the best step; False if there is none."""
    for item in list_checkpoints(best.parent):
        if item.metadata.step == state.best_step and item.path != best and damage_of(item.path) is None:
            copy_checkpoint(item, best, kind="best")
            return True
    return False


def copy_checkpoint(checkpoint: Checkpoint, path: Path, *, kind: str) -> Checkpoint:
    """Make the checkpoint at ``path`` a copy of ``checkpoint``, except for its kind."""

    def fill(directory: Path) -> None:
        for name in checkpoint.metadata.files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.path / name, directory / name)

    return write_checkpoint(path, replace(checkpoint.metadata, kind=kind), fill)
