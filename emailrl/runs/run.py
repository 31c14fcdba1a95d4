"""What every run does at the end of its steps: keep the last complete one, write checkpoints, end orderly."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Generic, Protocol

import emailrl
from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import (
    SFT,
    Checkpoint,
    Metadata,
    created_after,
    prunable,
    remove_checkpoints,
    run_folders,
    write_checkpoint,
)
from emailrl.model.policy import Policy
from emailrl.runs.folder import REPLACED, discard_replaced
from emailrl.runs.interrupts import Interrupts
from emailrl.runs.log import Tracker
from emailrl.runs.resume import STATE_FILE, S, Snapshot, save_state, take_snapshot
from emailrl.settings import Settings

MAX_SKIPPED_IN_A_ROW: Final = 3  # This many consecutive updates with a non-finite loss or gradient end the run.
NAMES: Final = {"best": "best_model", SFT: "best_model", "final": "final"}
"""The folders of checkpoints by kind; any other is ``checkpoint-N``."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run's weights and data come from, as its checkpoints record it."""

    run_id: str
    mode: str
    algorithm: str
    database_fingerprint: str
    questions_fingerprint: str
    parent: str | None = None  # The checkpoint or adapter the weights started from.
    resumed_from: str | None = None  # The checkpoint this process resumed from.


class Updates(Protocol):
    skipped_in_a_row: int  # Consecutive updates that were not finite.

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on besides the weights, for ``torch.save``."""
        ...


@dataclass(kw_only=True)
class Run(Generic[S]):
    """One run: what it trains, its folder, and the last complete step, which alone is ever saved."""

    settings: Settings
    directory: Path
    origin: Origin
    state: S
    policy: Policy
    updater: Updates
    tracker: Tracker
    interrupts: Interrupts
    saved_step: int | None = None  # The step of the last checkpoint on disk.
    _snapshot: Snapshot = field(init=False)
    _half_done: bool = field(default=False, init=False)  # The weights have moved since the snapshot.

    def __post_init__(self) -> None:
        self._snapshot = take_snapshot(self.state)

    def begin_update(self) -> None:
        """From here to ``complete_step`` the weights belong to no step."""
        self._half_done = True

    def complete_step(self) -> None:
        """Make the current state the one that the next checkpoint holds."""
        self._snapshot = take_snapshot(self.state)
        self._half_done = False

    def check_skipped(self, broken: dict[str, float], step: int, hint: str) -> None:
        """Raise EmailRLError if too many updates in a row were not finite; ``broken`` is what is not, by name."""
        if self.updater.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            name, value = next(iter(broken.items()))
            raise EmailRLError(
                f"The {name} is {value} at step {step}, in the third update in a row; the weights are as before them.",
                hint,
            )

    def save(self, kind: str) -> None:
        """Write a checkpoint (``write``) and say so."""
        self.tracker.say(f"Model saved to: {self.write(kind).path}")

    def write(self, kind: str) -> Checkpoint:
        """Write ``best_model``, ``final`` or ``checkpoint-N`` with the last complete step, and prune the last."""
        settings, origin = self.settings, self.origin
        path = self.directory / NAMES.get(kind, f"checkpoint-{self._step}")
        metadata = Metadata(
            run_id=origin.run_id,
            kind=kind,
            step=self._step,
            mode=origin.mode,
            algorithm=origin.algorithm,
            base_model=self.policy.base_model,
            lora=self.policy.lora,
            metrics=self._snapshot["state"]["last_metrics"],
            settings=settings.public(),
            parent=origin.parent,
            resumed_from=origin.resumed_from,
            seed=settings.training.seed,
            versions=versions(),
            database_fingerprint=origin.database_fingerprint,
            questions_fingerprint=origin.questions_fingerprint,
            git_commit=git_commit(),
            created_at=created_after({*run_folders(settings.output.output_dir), self.directory}),
        )
        checkpoint = write_checkpoint(path, metadata, lambda folder: self.fill(folder, kind))
        if kind != SFT:
            self.saved_step = self._step
        discard_replaced(self.directory)
        remove_checkpoints(prunable(self.directory, settings.output.save_total_limit))
        return checkpoint

    def fill(self, folder: Path, kind: str) -> None:
        write_weights(self.policy, folder)
        save_state(folder / STATE_FILE, self._snapshot, self.updater.state_dict())

    @contextmanager
    def rescued(self) -> Iterator[None]:
        """Save the last complete step if the block is interrupted or fails and its weights are still available."""
        try:
            yield
        except (Exception, KeyboardInterrupt):
            step, saved, later = self._step, self.saved_step, "--resume latest continues"
            up_to = "there is no checkpoint yet" if saved is None else f"saved up to step {saved}; {later}"
            if saved == step:
                said = f"after step {step}, which is saved; {later}"
            elif not step:
                replaced = (self.directory / REPLACED).exists()
                then = "the run being replaced is restored" if replaced else "nothing was trained or saved"
                said = f"before the first step; {then}"
            elif self._half_done or self.interrupts.impatient:
                said = f"in step {step + 1}; {up_to}"
            else:
                try:
                    said = f"after step {step}, saved in {self.write('checkpoint').path}; {later}"
                except OSError as full:  # a full disk: what ended the run is raised, not this
                    said = f"after step {step}, which cannot be saved ({full.strerror}); {up_to}"
            self.tracker.say(f"Stopped {said}.")
            raise

    @property
    def _step(self) -> int:
        step: int = self._snapshot["state"]["step"]
        return step


def write_weights(policy: Policy, folder: Path) -> None:
    """Write a policy's adapter, or all its weights if it has none, with its tokenizer."""
    (policy.save_adapter if policy.lora else policy.save_model)(folder)


@cache
def versions() -> dict[str, str]:
    packages = {package: version(package) for package in ("torch", "transformers", "peft")}
    return {"emailrl": emailrl.__version__, "python": platform.python_version(), **packages}


@cache
def git_commit() -> str | None:
    """The checked-out commit if emailrl runs from its repository; None if it is installed."""
    package = Path(emailrl.__file__).parent
    if not (package.parent / ".git").exists():
        return None
    command = ["git", "rev-parse", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None
