"""A supervised fine-tuning run: steps, validations and checkpoints; built by ``assemble``.

The examples of each step depend only on the seed and the step, so that a resumed run equals an uninterrupted one, bit
for bit on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from emailrl.base.disk import LOCK
from emailrl.base.errors import UsageError
from emailrl.checkpoints import (
    SFT,
    Checkpoint,
    Metadata,
    created_after,
    find_runs,
    list_checkpoints,
    prune,
    read_checkpoint,
    run_folders,
    verify,
    write_checkpoint,
)
from emailrl.model.lora import writing_tensors
from emailrl.model.policy import Policy
from emailrl.settings import Settings, SftSettings, run_root
from emailrl.sft.data import Data
from emailrl.sft.fit import Fitter
from emailrl.training.run.checkpointing import git_commit, versions
from emailrl.training.run.directory import free_directory
from emailrl.training.run.interrupts import Interrupts
from emailrl.training.run.metrics import Clock, Pace
from emailrl.training.run.printing import duration
from emailrl.training.run.resume import STATE_FILE
from emailrl.training.run.tracking import Tracker

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


@dataclass(frozen=True, slots=True)
class SftResult:
    """The result of a run."""

    out: Path
    """The output folder: an adapter, or a model after full fine-tuning."""
    steps: int
    """Steps done, including those before a resume."""
    loss: float
    """Training loss of the last step, in nats per token."""
    val_loss: float | None
    """Validation loss of the weights in ``out``; None without held-out data."""


@dataclass(slots=True)
class State:
    """The mutable state besides weights and optimizer."""

    step: int = 0
    loss: float = float("nan")
    val_loss: float | None = None
    """The last."""
    best: float | None = None
    best_step: int = 0
    without_better: int = 0
    """Validations since the lowest loss."""
    unrecorded: dict[str, float] = field(default_factory=dict)
    """The metrics of ``step`` until it is validated, if due, and its line is written; then empty."""

    @property
    def recorded(self) -> int:
        """The last step with a line in ``metrics.jsonl``."""
        return self.step - bool(self.unrecorded)

    def note(self, val_loss: float | None) -> None:
        """Count a validation of the current step (None: there was none)."""
        if val_loss is None:
            return
        if self.is_lowest(val_loss):
            self.best, self.best_step, self.without_better = val_loss, self.step, 0
        else:
            self.without_better += 1

    def is_lowest(self, val_loss: float) -> bool:
        """Whether the loss is below all noted ones."""
        return self.best is None or val_loss < self.best

    def stop_reason(self, sft: SftSettings) -> str | None:
        """Why the run ends here, or None if it continues."""
        if self.step >= sft.sft_steps:
            return "all steps done"
        return "the validation loss stopped falling" if self.without_better >= sft.sft_patience else None

    def result(self, place: Place) -> SftResult:
        """The result of a run in ``place`` that ends here."""
        val_loss = self.best if self.best_step else self.val_loss
        return SftResult((place.directory / PRODUCT).absolute(), self.step, self.loss, val_loss)


@dataclass
class Run:
    """Everything one run holds."""

    settings: Settings
    policy: Policy
    data: Data
    fitter: Fitter
    tracker: Tracker
    interrupts: Interrupts
    place: Place
    parent: str | None
    run_id: str
    database: str
    state: State = field(default_factory=State)
    saved_step: int | None = None
    whole: bool = True
    """The weights are those of ``state.step``."""

    def train(self) -> str:
        """Run all remaining steps; returns why the run ended."""
        state, sft = self.state, self.settings.sft
        pace = Pace(state.recorded)
        with closing(_generator(self.data.batches(state.step))) as batches:
            if state.step == 0:
                state.note(self.validate())
            if state.unrecorded:  # an interrupt or an error came between the update and its line
                self.record(Clock(), pace)
            while (reason := state.stop_reason(sft)) is None:
                clock = Clock()
                with self.interrupts.droppable(), clock.phase("data"):
                    batch = next(batches)
                self.whole = False
                with clock.phase("update"):
                    metrics = self.fitter.step(batch, step=state.step + 1)
                state.step, state.loss, state.unrecorded = state.step + 1, metrics["loss"], metrics
                self.whole = True
                self.record(clock, pace)
        return reason

    def record(self, clock: Clock, pace: Pace) -> None:
        """Write the line of the last step; if a validation is due, measure its loss first and save it last.

        The state changes only when the line is written, so that a resumed run can repeat what did not finish.
        """
        state, sft, val_loss = self.state, self.settings.sft, None
        if due := state.step % sft.sft_eval_steps == 0 or state.step == sft.sft_steps:
            with clock.phase("evaluation"):
                val_loss = self.validate()
        metrics = state.unrecorded
        line = {"step": state.step} | metrics | {"val_loss": val_loss, "seconds": clock.seconds()}
        self.tracker.step(line, self._line(metrics, val_loss, pace))
        state.note(val_loss)
        state.unrecorded = {}
        if due:
            self.save()

    def validate(self) -> float | None:
        """Measure the validation loss, and save the weights if it is the lowest so far."""
        state, val = self.state, self.data.val
        if not val:
            return None
        with self.interrupts.droppable():
            state.val_loss = loss = self.fitter.loss(val)
        if state.step and state.is_lowest(loss):
            self.write_product()
        return loss

    def finish(self, reason: str) -> SftResult:
        """Report why the run ended and its result."""
        state = self.state
        if not self.data.val or not state.best_step:
            self.write_product()
        result = state.result(self.place)
        loss, step = result.val_loss, state.best_step or state.step
        said = "" if loss is None else f" Validation loss {loss:.4f} at step {step}."
        self.tracker.conclude(f"Done after step {state.step}: {reason}.{said} Wrote {self.place.directory / PRODUCT}.")
        return result

    def save(self) -> None:
        """Write ``checkpoint-N``, with everything the next step needs, and remove the oldest."""

        def fill(folder: Path) -> None:
            self._write_weights(folder)
            with writing_tensors(folder / STATE_FILE):
                torch.save({"state": asdict(self.state), "fitter": self.fitter.state_dict()}, folder / STATE_FILE)

        write_checkpoint(self.place.directory / f"checkpoint-{self.state.step}", self._metadata("checkpoint"), fill)
        self.saved_step = self.state.step
        prune(self.place.directory, self.settings.output.save_total_limit)

    def rescue(self) -> None:
        """Save the last complete step of an interrupted run."""
        step = self.state.step
        if self.whole and not self.interrupts.impatient and step and self.saved_step != step:
            with suppress(OSError):  # a full disk: what ended the run is raised, not this
                self.save()
        saved = (
            f"saved up to step {self.saved_step}; --resume latest continues" if self.saved_step else "nothing was saved"
        )
        self.tracker.say(f"Stopped after step {step}: {saved}.")

    def write_product(self) -> None:
        """Write the current weights to ``best_model``; a new model is saved in bf16 for distribution."""
        new = self.settings.sft.from_scratch
        policy = replace(self.policy, model=copy.deepcopy(self.policy.model).to(torch.bfloat16)) if new else self.policy
        path = self.place.directory / PRODUCT
        write_checkpoint(path, self._metadata(SFT), lambda folder: _write_weights(policy, folder))

    def _write_weights(self, folder: Path) -> None:
        _write_weights(self.policy, folder)

    def _line(self, metrics: dict[str, float], val_loss: float | None, pace: Pace) -> str:
        state, total = self.state, self.settings.sft.sft_steps
        parts = [f"step {state.step}/{total}", f"loss {metrics['loss']:.4f}"]
        parts += [] if val_loss is None else [f"val_loss {val_loss:.4f}"]
        parts += [f"lr {metrics['learning_rate']:.2e}", f"{duration(pace.seconds_left(state.step, total))} left"]
        return " | ".join(parts + (["update skipped: non-finite"] if metrics["updates_skipped"] else []))

    def _metadata(self, kind: str) -> Metadata:
        state, training = self.state, self.settings.training
        checkpoint = self.place.checkpoint
        return Metadata(
            run_id=self.run_id,
            kind=kind,
            step=state.step,
            mode=SFT,
            algorithm=SFT,
            base_model=self.policy.base_model,
            lora=self.policy.lora,
            metrics={"loss": state.loss, "val_loss": state.val_loss},
            settings=self.settings.public(),
            parent=self.parent,
            resumed_from=checkpoint.reference if checkpoint else None,
            seed=training.seed,
            versions=versions(),
            database_fingerprint=self.database,
            questions_fingerprint=self.data.fingerprint,
            git_commit=git_commit(),
            created_at=created_after([self.place.directory]),
        )


def _write_weights(policy: Policy, folder: Path) -> None:
    (policy.save_adapter if policy.lora else policy.save_model)(folder)


def _generator(batches: Iterator[Any]) -> Any:
    """A closable generator, which ends the processes that play demo worlds."""
    yield from batches
