"""Which run and checkpoint ``--resume`` means, what is lost by resuming from it, and a run's state on disk."""

from __future__ import annotations

import pickle
import random
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import numpy as np
import torch

from emailrl import checkpoints
from emailrl.base.disk import LOCK
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import counted, first_line
from emailrl.checkpoints import SFT, Checkpoint, damage_of, incomplete_checkpoints, list_checkpoints, read_checkpoint
from emailrl.model.lora import writing_tensors
from emailrl.records import read_records
from emailrl.runs.folder import OPTION, held, remove_records

STATE_FILE: Final = "trainer_state.pt"
GO_BACK: Final = "Add --overwrite to do so, or copy the run first to keep both."

# -- which run ------------------------------------------------------------------------------------------------------


def run_to_resume(resume: str, output_dir: Path, mode: str, *, any_mode: bool = False) -> Path | None:
    """The directory of the run that ``resume`` means; None if ``auto`` finds none.

    ``auto`` is the run of ``mode`` begun last if it died before its first checkpoint, else the ``latest``; ``latest``
    and ``best`` are the newest run that has such a checkpoint, with ``any_mode`` of all modes but sft; a path is that
    of a run or of a checkpoint.
    """
    but, searched = (SFT, None) if any_mode else (None, mode)
    if resume == "auto":
        begun = [run for run in checkpoints.run_folders(output_dir, mode) if (run / LOCK).exists()]
        vain = begun[-1] if begun and _is_vain(begun[-1]) else None
        since = (vain / LOCK).stat().st_mtime if vain else 0.0
        runs = checkpoints.find_runs(output_dir, searched, but=but)
        later = [run for run in runs if list_checkpoints(run)[-1].created.timestamp() > since]
        return later[-1] if later else vain
    if resume in ("latest", "best"):
        return checkpoints.newest_run(output_dir, searched, but=but, which=resume)
    path = Path(resume)
    return path if list_checkpoints(path) else read_checkpoint(path).path.parent


def _is_vain(run: Path) -> bool:
    """Whether a run has no checkpoint to resume, damaged or intact; a first one, half-written, has no name yet."""
    only_products = all(item.metadata.kind == SFT for item in list_checkpoints(run))
    return only_products and not any(path.exists() for path in incomplete_checkpoints(run))


def _resumable(run: Path) -> list[Checkpoint]:
    """A run's checkpoints with a trainer state, by step; what sft has made has none."""
    return [item for item in list_checkpoints(run) if STATE_FILE in item.metadata.files]


def checkpoint_to_resume(directory: Path, resume: str) -> Checkpoint | None:
    """The run's checkpoint that ``resume`` means, hashes unchecked; None if the run died before its first."""
    if resume == "auto" and _is_vain(directory):
        return None
    path = Path(resume)
    if resume in ("auto", "latest", "best") or path == directory:
        found = [item for item in _resumable(directory) if resume != "best" or item.metadata.kind == "best"]
        if not found:
            raise UsageError(f"{directory} has no checkpoint to resume from.", "Start a run without --resume.")
        return found[-1]
    return read_checkpoint(path)


def loss_of_going_back(directory: Path, checkpoint: Checkpoint) -> str | None:
    """What resuming from this checkpoint removes; None if ``latest`` would resume from the same step."""
    step = checkpoint.metadata.step
    later = {item.path: item.metadata.step for item in _resumable(directory) if item.metadata.step > step}
    damaged = _damaged_after(directory, step)
    if not later and not damaged:
        return None
    last = max([*_recorded_steps(directory), *later.values(), *map(_step_in_name, damaged)])
    names = ", ".join(path.name for path in (*later, *damaged))
    steps = f"step {last}" if last == step + 1 else f"steps {step + 1} to {last}"
    loss = f"Resuming from step {step} removes later work in {directory}: {steps}, {names}."
    return " ".join([*damaged.values(), loss])


def _damaged_after(directory: Path, step: int) -> dict[Path, str]:
    """A run's damaged ``checkpoint-N`` of steps after this one, each with what is wrong."""
    damaged = incomplete_checkpoints(directory).items()
    return {path: why for path, why in damaged if path.exists() and _step_in_name(path) > step}


def _step_in_name(path: Path) -> int:
    digits = path.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() else 0


def _recorded_steps(directory: Path) -> set[int]:
    path = directory / "metrics.jsonl"
    steps = [record.get("step") for record in read_records(path)] if path.exists() else []
    return {step for step in steps if isinstance(step, int)}


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run to resume, its directory locked; without a checkpoint it starts over, having died before its first."""

    directory: Path
    checkpoint: Checkpoint | None


@contextmanager
def resumed(
    resume: str, directory: Path, *, option: str = OPTION, overwrite: bool = False, remedy: str = GO_BACK
) -> Iterator[Resumed]:
    """Lock the run in ``directory``, and only then choose its checkpoint that ``resume`` means.

    ``overwrite`` allows losing the run's later work; ``remedy`` is the advice without it. Raises UsageError if later
    work would be lost, EmailRLError for a damaged checkpoint or if another process trains there.
    """
    with held(directory, option):
        checkpoint = checkpoint_to_resume(directory, resume)
        if checkpoint is not None and not (checkpoints.verify(checkpoint).path / STATE_FILE).is_file():
            raise UsageError(
                f"{checkpoint.path} has no trainer state.", "Resume from a checkpoint-N that emailrl wrote."
            )
        if checkpoint and not overwrite and (loss := loss_of_going_back(directory, checkpoint)):
            raise UsageError(loss, remedy)
        yield Resumed(directory, checkpoint)


def new_run_id(mode: str) -> str:
    return f"{mode}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


# -- state on disk --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class State:
    """What changes from step to step in every run, except weights, optimizer and random generators."""

    step: int = 0  # Steps done.
    best_step: int | None = None
    last_evaluated: int | None = None
    evaluations_without_better: int = 0
    last_metrics: dict[str, Any] = field(default_factory=dict)
    """What was measured last, for the metadata of checkpoints."""

    @property
    def evaluated(self) -> int:
        """The step of the last evaluation; -1 before the first."""
        return -1 if self.last_evaluated is None else self.last_evaluated

    def count_evaluation(self, *, is_best: bool) -> None:
        self.last_evaluated = self.step
        self.evaluations_without_better = 0 if is_best else self.evaluations_without_better + 1
        self.best_step = self.step if is_best else self.best_step

    def forget_best(self) -> None:
        """No weights are left of the best step: the next evaluation selects others."""
        self.best_step = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The state of these plain values (``dataclasses.asdict``)."""
        return cls(**values)


S = TypeVar("S", bound=State)


Snapshot = dict[str, dict[str, Any]]
"""A run at the end of a step, as a checkpoint stores it besides weights and optimizer: its state as plain values, and
the random generators."""


def take_snapshot(state: State) -> Snapshot:
    """A snapshot of the run; later steps do not change it."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    generators: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state_all()
    return {"state": asdict(state), "generators": generators}


def seed_generators(seed: int) -> None:
    """Seed every global random generator: a custom reward or environment may use one."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_state(path: Path, snapshot: Snapshot, updater: dict[str, Any]) -> None:
    """Write ``trainer_state.pt``: tensors and plain values, readable without running any code in it."""
    with writing_tensors(path):
        torch.save(snapshot | {"updater": updater}, path)


def load_state(checkpoint: Checkpoint, kind: type[S], *, draws: bool = True) -> tuple[S, dict[str, Any]]:
    """The states of a checkpoint's run and updater; with ``draws`` restores the random generators."""
    path = checkpoint.path / STATE_FILE
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        state, generators = kind.from_dict(saved["state"]), saved["generators"]
        if draws:
            random.setstate(generators["python"])
            np.random.set_state(generators["numpy"])
            torch.set_rng_state(generators["torch"])
            # A machine with fewer GPUs than the run had restores only the states it can use.
            for device, generator in enumerate(generators.get("cuda", [])[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(generator, device)
        return state, saved["updater"]
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


# -- going back -----------------------------------------------------------------------------------------------------


def rewind(run_dir: Path, state: State) -> list[str]:
    """Remove records beyond the state's step, so that no step appears twice; return notes on what was removed.

    ``metrics.jsonl`` and ``evaluations.jsonl`` are truncated by their writers. A later or damaged ``best_model`` is
    replaced by the checkpoint of the best step if that still exists. Otherwise a later one stays until a better one is
    found, and a damaged one until the next evaluation, as ``state`` then has no best. A damaged ``final`` is removed.
    """
    checkpoints.recover(run_dir)
    said, final, best = [], run_dir / "final", run_dir / "best_model"
    gone: dict[Path, str] = {}
    if why := damage_of(final):
        gone[final] = f"which is damaged and will be written again at the end: {why}"
    missing = state.best_step is not None and not best.exists()
    if why := "its folder does not exist" if missing else damage_of(best):
        problem = "missing" if missing else "damaged"
        if _restored(best, state):
            said.append(f"best_model, which was {problem}, is restored from the checkpoint of its step: {why}")
        else:
            said.append(f"best_model is {problem}, and only a later evaluation selects another: {why}")
            state.forget_best()
    remove_records(run_dir, after=state.step)
    for item in list_checkpoints(run_dir):
        later = item.metadata.step > state.step
        if later and item.metadata.kind != "best":
            gone[item.path] = f"which is after step {state.step}"
        elif later and damage_of(item.path) is None:
            kept = f"is from the later step {item.metadata.step}; it stays until a better one"
            said.append(f"best_model {f'restored to step {state.best_step}' if _restored(item.path, state) else kept}")
    gone |= {path: f"which is damaged: {why}" for path, why in _damaged_after(run_dir, state.step).items()}
    checkpoints.remove_checkpoints(gone)
    return [*said, *(f"removed {path.name}, {why}" for path, why in gone.items())]


def lost_metrics(run_dir: Path, step: int) -> list[str]:
    """A note that names the steps up to ``step`` without a line in ``metrics.jsonl``, if any."""
    lost = sorted({*range(1, step + 1)} - _recorded_steps(run_dir))
    if not lost:
        return []
    named = ", ".join(map(str, lost[:10])) + (", ..." if len(lost) > 10 else "")
    path, steps = run_dir / "metrics.jsonl", counted(len(lost), "step")
    return [f"{path} has no line of {steps} ({named}); curves and reports lack their numbers"]


def _restored(best: Path, state: State) -> bool:
    """Replace ``best_model`` by an intact checkpoint of the best step; False if there is none."""
    of_step = (item for item in list_checkpoints(best.parent) if item.metadata.step == state.best_step)
    for source in (item for item in of_step if item.path != best and damage_of(item.path) is None):

        def fill(directory: Path, source: Checkpoint = source) -> None:
            for name in source.metadata.files:
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.path / name, directory / name)

        checkpoints.write_checkpoint(best, replace(source.metadata, kind="best"), fill)
        return True
    return False
