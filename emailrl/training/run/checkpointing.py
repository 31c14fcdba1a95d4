"""What a run writes for later: the policy after each step for samplers, and checkpoints of complete steps."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

import emailrl
from emailrl.base.disk import naming, replace_bytes
from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import (
    Checkpoint,
    Metadata,
    created_after,
    prune,
    remove_checkpoints,
    run_folders,
    sha256_of,
    write_checkpoint,
)
from emailrl.model.policy import Policy
from emailrl.settings import Settings
from emailrl.training.run.data import RunData, save_digests
from emailrl.training.run.directory import discard_replaced
from emailrl.training.run.resume import STATE_FILE, Snapshot, save_state, take_snapshot
from emailrl.training.run.state import RunState
from emailrl.training.update import Updater

PACKAGES = ("torch", "transformers", "peft")


@cache
def versions() -> dict[str, str]:
    """Name → version."""
    return {
        "emailrl": emailrl.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


@cache
def git_commit() -> str | None:
    """The checked-out commit if emailrl runs from its repository; None if it is installed."""
    package = Path(emailrl.__file__).parent
    if not (package.parent / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=package, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


Hashes = dict[str, str]
"""SHA-256 by file name."""

_RECORD: Final = TypeAdapter(dict[str, Hashes])


def version_of(step: int) -> str:
    """The name of the policy after ``step``, as trajectories record it."""
    return f"v-{step:06d}"


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions of one run."""

    run_dir: Path

    def at(self, step: int) -> Path:
        """The directory of the policy after ``step``."""
        return self.run_dir / "policy" / version_of(step)

    def save(self, step: int, policy: Policy) -> None:
        """Write the policy after ``step``, whose directory is then never written again."""
        version = self.at(step)
        beside = version.with_name(f".{version.name}")
        beside.mkdir(parents=True, exist_ok=True)
        with naming(version):
            policy.save_adapter(beside, with_tokenizer=False)  # samplers get ids
        kept = {path.name for path in self._all()}
        record = {name: hashes for name, hashes in self._recorded().items() if name in kept}
        record[version.name] = _hashes(beside)
        replace_bytes(self.run_dir / "versions.json", (json.dumps(record, indent=2) + "\n").encode())
        beside.rename(version)

    def remove_outdated(self, *, newest: int, needed: range) -> None:
        """Remove all but the last ``newest`` versions and those after the ``needed`` steps.

        Atomically, like checkpoints: a killed process must not leave a partial version that looks complete.
        """
        kept = {self.at(step) for step in needed}
        remove_checkpoints(path for path in self._all()[:-newest] if path not in kept)

    def check(self) -> None:
        """Raise EmailRLError for a version that is not what the run wrote, before it is sampled from."""
        recorded = self._recorded()
        for kept in self._all():
            if _hashes(kept) != recorded.get(kept.name):
                raise EmailRLError(
                    f"{kept} is not what the run wrote.", "Delete it: the checkpoint's policy samples in its place."
                )

    def _all(self) -> list[Path]:
        return sorted((self.run_dir / "policy").glob("v-*"))

    def _recorded(self) -> dict[str, Hashes]:
        """What the run wrote, by version; nothing if the file is damaged."""
        file = self.run_dir / "versions.json"
        try:
            return _RECORD.validate_json(file.read_bytes()) if file.exists() else {}
        except ValidationError:
            return {}


def _hashes(folder: Path) -> Hashes:
    """Of all files; empty if one cannot be read."""
    try:
        return {name: sha256_of(folder / name) for name in sorted(path.name for path in folder.iterdir())}
    except OSError:
        return {}


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
