"""Save the last complete step of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emailrl.checkpoints import Checkpoint, Metadata, created_after, prune, run_folders, write_checkpoint
from emailrl.policy.load import Policy
from emailrl.settings import Settings
from emailrl.training.run.directory import discard_replaced
from emailrl.training.run.provenance import git_commit, versions
from emailrl.training.run.questions import RunData
from emailrl.training.run.resume import STATE_FILE, Snapshot, save_state, take_snapshot
from emailrl.training.run.sources import save_digests
from emailrl.training.run.state import RunState
from emailrl.training.update import Updater


@dataclass
class CheckpointWriter:
    """Writes the last complete step of a run: its snapshot and the current weights."""

    directory: Path
    settings: Settings
    data: RunData
    policy: Policy
    updater: Updater
    run_id: str
    parent: str | None
    """The checkpoint or adapter the weights started from."""
    snapshot: Snapshot
    saved_step: int | None = None
    """The step of the last checkpoint on disk."""
    resumed_from: str | None = None
    """The checkpoint this process resumed from."""
    keep_ahead: Callable[[Path, int], None] = lambda folder, step: None
    """Saves rollouts of later steps in the checkpoint's folder."""

    @property
    def step(self) -> int:
        """The last complete step."""
        step: int = self.snapshot.state["step"]
        return step

    def take(self, state: RunState) -> None:
        """Record the run's current state as a complete step."""
        self.snapshot = take_snapshot(state)

    def write(self, kind: str) -> Checkpoint:
        """Write ``best_model``, ``final`` or ``checkpoint-N``, and prune the last."""
        name = {"best": "best_model", "final": "final", "checkpoint": f"checkpoint-{self.step}"}[kind]

        def fill(directory: Path) -> None:
            self.policy.save_adapter(directory)
            save_state(directory / STATE_FILE, self.snapshot, self.updater.state_dict())
            save_digests(directory, self.data.sources)
            self.keep_ahead(directory, self.step)

        checkpoint = write_checkpoint(self.directory / name, self._metadata(kind), fill)
        self.saved_step = self.step
        discard_replaced(self.directory)
        prune(self.directory, self.settings.output.save_total_limit)
        return checkpoint

    def _metadata(self, kind: str) -> Metadata:
        training = self.settings.training
        return Metadata(
            run_id=self.run_id,
            kind=kind,
            step=self.step,
            mode=training.mode,
            algorithm=training.algorithm,
            base_model=self.policy.base_model,
            lora=self.policy.lora,
            metrics=self.snapshot.state["last_metrics"],
            settings=self.settings.public(),
            parent=self.parent,
            resumed_from=self.resumed_from,
            seed=training.seed,
            versions=versions(),
            database_fingerprint=self.data.database_fingerprint,
            questions_fingerprint=self.data.questions_fingerprint,
            git_commit=git_commit(),
            created_at=created_after({*run_folders(self.settings.output.output_dir), self.directory}),
        )
