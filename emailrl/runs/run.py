"""What every run does at the end of its steps: keep the last complete one, write checkpoints, end orderly."""

from __future__ import annotations

import os
import pickle
import platform
import random
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Final, Generic, Protocol, Self, TypeVar

import numpy as np
import torch

import emailrl
from emailrl import checkpoints
from emailrl.base.custom import is_path
from emailrl.base.errors import EmailRLError
from emailrl.base.plain import first_line
from emailrl.base.process import handled_by, is_importing
from emailrl.checkpoints import SFT, Checkpoint, Metadata
from emailrl.model.lora import writing_tensors
from emailrl.model.policy import Policy
from emailrl.runs.folder import REPLACED, STATE_FILE
from emailrl.runs.log import Tracker
from emailrl.settings import Settings

MAX_SKIPPED_IN_A_ROW: Final = 3  # This many consecutive updates with a non-finite loss or gradient end the run.
NAMES: Final = {"best": "best_model", SFT: "best_model", "final": "final"}  # By kind; any other is ``checkpoint-N``.


@dataclass(slots=True)
class State:
    """What changes from step to step in every run, except weights, optimizer and random generators."""

    step: int = 0  # Steps done.
    best_step: int | None = None
    last_evaluated: int | None = None
    evaluations_without_better: int = 0
    last_metrics: dict[str, Any] = field(default_factory=dict)
    """What was measured last, for the metadata of checkpoints."""

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


def load_state(checkpoint: Checkpoint, kind: type[S]) -> S:
    """The state of a checkpoint's run."""
    with _trainer_state(checkpoint) as saved:
        return kind.from_dict(saved["state"])


def restore(checkpoint: Checkpoint, updater: Updates) -> None:
    """Continue with the updater and the random generators of a checkpoint."""
    with _trainer_state(checkpoint) as saved:
        generators, moments = saved["generators"], saved["updater"]
        random.setstate(generators["python"])
        np.random.set_state(generators["numpy"])
        torch.set_rng_state(generators["torch"])
        # A machine with fewer GPUs than the run had restores only the states it can use.
        for device, generator in enumerate(generators.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
    updater.load_state_dict(moments)


@contextmanager
def _trainer_state(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """What ``save_state`` wrote; EmailRLError if it cannot be read."""
    path = checkpoint.path / STATE_FILE
    try:
        yield torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # not torch's text, which advises to load it unprotected
        problem = f"{path} contains objects other than tensors and plain values, or is damaged."
        raise EmailRLError(problem, "Do not use a run of unknown origin; start a new one without --resume.") from None
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError) as error:
        hint = "Use another checkpoint (emailrl checkpoints list), or start a new run without --resume."
        raise EmailRLError(f"{path} cannot be read ({first_line(error)}).", hint) from None


class Interrupts:
    """Turns the first SIGINT or SIGTERM into a KeyboardInterrupt when nothing is lost by it.
    Inside ``droppable()`` it is raised at once, since that work can be repeated; elsewhere, and during an import, which
    may swallow it, it waits for ``check()``. A SIGINT after it raises immediately. Works only in the main thread; in
    others the signals are left alone."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._requested = self._droppable = self._from_rank = False
        self.impatient = False  # Whether a SIGINT came after the first signal: save nothing more.

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handled_by(self._handle):
            yield

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Mark work that may be interrupted anywhere."""
        self.check()
        self._droppable = True
        try:
            yield
        finally:
            self._droppable = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Mark work inside ``droppable()`` that must not be interrupted because other ranks take part."""
        before, self._droppable = self._droppable, False
        try:
            yield
        finally:
            self._droppable = before
        if before:
            self.check()

    def request(self) -> None:
        """Request an interrupt from another thread, as a first signal would: a rank was lost or asked to stop."""
        self._from_rank = True
        main = threading.main_thread().ident
        if not self._requested and main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    def check(self) -> None:
        if self._requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested and number == signal.SIGTERM:
            return  # one comes from the service manager, which signals every process, and one from the launcher
        self.impatient = self._requested
        self._requested = True
        if self.impatient or (self._droppable and not is_importing(frame)):
            raise KeyboardInterrupt
        # In a thread: the main thread may be writing the same log, and its stream refuses to be entered twice.
        notice = "Stopping after this step."
        if number == signal.SIGINT and not self._from_rank:
            notice = "Interrupted: stopping after this step (press again to stop now without saving)."
        threading.Thread(target=self._notify, args=(notice,)).start()


def new_run_id(mode: str) -> str:
    return f"{mode}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


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
    teacher: str | None = None  # What identifies its weights.


class Updates(Protocol):
    skipped_in_a_row: int  # Consecutive updates that were not finite.

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on besides the weights, for ``torch.save``."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


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
    half_done: bool = field(default=False, init=False)  # The weights have moved since the snapshot.

    def __post_init__(self) -> None:
        self._snapshot = take_snapshot(self.state)
        # As they are now: the user's own files may be edited while it runs.
        self._public, self._versions = self.settings.public(), versions(self.settings)

    def complete_step(self) -> None:
        """Make the current state the one that the next checkpoint holds."""
        self._snapshot = take_snapshot(self.state)
        self.half_done = False

    def check_skipped(self, broken: dict[str, float], step: int, hint: str) -> None:
        """Raise EmailRLError if too many updates in a row were not finite; ``broken`` is what is not, by name."""
        if self.updater.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            name, value = next(iter(broken.items()))
            problem = f"The {name} is {value} at step {step}, in the third update in a row"
            raise EmailRLError(f"{problem}; the weights are as before them.", hint)

    def save(self, kind: str) -> None:
        """Write a checkpoint (``write``) and say so."""
        self.tracker.say(f"Model saved to: {self.write(kind).path}")

    def write(self, kind: str) -> Checkpoint:
        """Write ``best_model``, ``final`` or ``checkpoint-N`` with the last complete step, and prune the last."""
        origin, output = self.origin, self.settings.output
        runs = checkpoints.run_folders(output.output_dir)
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
            settings=self._public,
            parent=origin.parent,
            resumed_from=origin.resumed_from,
            seed=self.settings.training.seed,
            versions=self._versions | ({"teacher": origin.teacher} if origin.teacher else {}),
            database_fingerprint=origin.database_fingerprint,
            questions_fingerprint=origin.questions_fingerprint,
            git_commit=git_commit(),
            created_at=checkpoints.created_after({*runs, self.directory}),
        )
        checkpoint = checkpoints.write_checkpoint(path, metadata, lambda folder: self.fill(folder, kind))
        if kind != SFT:
            self.saved_step = self._step
        if (replaced := self.directory / REPLACED).exists():  # the new run has a checkpoint now
            shutil.rmtree(replaced)
        checkpoints.remove_checkpoints(checkpoints.prunable(self.directory, output.save_total_limit))
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
            step, saved, later = self._step, self.saved_step, "the same command with --resume latest continues"
            up_to = "there is no checkpoint yet" if saved is None else f"saved up to step {saved}; {later}"
            if saved == step:
                said = f"after step {step}, which is saved; {later}"
            elif not step:
                replaced = (self.directory / REPLACED).exists()
                then = "the run being replaced is restored" if replaced else "nothing was trained or saved"
                said = f"before the first step; {then}"
            elif self.half_done or self.interrupts.impatient:
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


def versions(settings: Settings) -> dict[str, str]:
    """What runs: emailrl, Python, the packages, and the content of the user's own files (by their settings' names)."""
    packages = {package: version(package) for package in ("torch", "transformers", "peft")}
    named = {"reward": settings.rewards.reward, "environment": settings.agent.environment}
    files = {use: Path(os.path.expanduser(name.rpartition(":")[0])) for use, name in named.items() if is_path(name)}
    own = {use: checkpoints.sha256_of(file) for use, file in files.items() if file.suffix == ".py" and file.is_file()}
    return {"emailrl": emailrl.__version__, "python": platform.python_version(), **packages, **own}


@cache
def git_commit() -> str | None:
    """The checked-out commit if emailrl runs from its repository; None if it is installed."""
    root = Path(emailrl.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=root, stderr=subprocess.DEVNULL, timeout=10)
        return found.decode().strip()
    return None
