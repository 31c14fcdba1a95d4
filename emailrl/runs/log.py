"""Where a run's numbers go: the console, ``training.log``, ``metrics.jsonl``, ``status.json``, and three trackers."""

from __future__ import annotations

import io
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from emailrl.base.disk import check_own, naming, replace_bytes
from emailrl.base.install import need
from emailrl.base.plain import first_line, plain, plain_line
from emailrl.checkpoints import STATUS
from emailrl.records.trajectory import MetricsWriter, Trajectory
from emailrl.settings import Settings, TrackingSettings, trust

if TYPE_CHECKING:
    from emailrl.measure.evaluation import Evaluation

RULE: Final = "=" * 60
STATUS_SECONDS: Final = 2.0  # minimum interval between two writes of status.json within a phase

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Say nothing."""


class Display:
    """Follows a run: this one passes its lines on; others also show progress. Methods must not raise."""

    def __init__(self, say: Say = silent) -> None:
        self._say = say

    def say(self, line: str) -> None:
        self._say(line)

    def result(self, line: str) -> None:
        """Print a line of the outcome, which a command prints as its result."""
        self.say(line)

    # The run starts or resumes after ``step`` steps, with its earlier records in ``run_dir``; a phase starts, with this
    # number of rollouts; one has ended, unscored; some are scored and in ``file``; a step has this in metrics.jsonl.
    def start(self, run_dir: Path, step: int, total: int) -> None: ...
    def phase(self, name: str, total: int = 0) -> None: ...
    def played(self, trajectory: Trajectory) -> None: ...
    def recorded(self, file: Path, trajectories: Sequence[Trajectory]) -> None: ...
    def evaluation(self, evaluation: Evaluation) -> None: ...
    def step(self, metrics: Mapping[str, Any], seconds_left: float) -> None: ...
    def end(self) -> None: ...


class Status(Display):
    """Passes everything on to another display, and keeps ``status.json`` in the run's directory up to date: ``state``
    (``running``, ``finished``, ``interrupted``, ``failed``), ``reason`` it finished or failed, ``step`` of ``steps``,
    ``phase`` with ``done`` of ``rollouts``, and in seconds since 1970 when it was written (``at``) and will ``end``."""

    def __init__(self, display: Display, run_dir: Path, step: int) -> None:
        super().__init__(display.say)
        self.display, self._path, self._written = display, run_dir / STATUS, 0.0
        self._now: dict[str, Any] = {"state": "running", "reason": None, "step": step, "steps": None, "end": None}

    def _write(self, **changes: Any) -> None:
        self._now |= changes
        self._written = time.monotonic()
        # A full disk ends the run where it writes its records; this file decides nothing.
        with suppress(OSError):
            replace_bytes(self._path, (json.dumps(self._now | {"at": time.time()}) + "\n").encode())

    def result(self, line: str) -> None:
        self.display.result(line)

    def start(self, run_dir: Path, step: int, total: int) -> None:
        self._write(step=step, steps=total)
        self.display.start(run_dir, step, total)

    def phase(self, name: str, total: int = 0) -> None:
        self._write(phase=name, done=0, rollouts=total)
        self.display.phase(name, total)

    def played(self, trajectory: Trajectory) -> None:
        self._now["done"] = self._now.get("done", 0) + 1
        if time.monotonic() - self._written >= STATUS_SECONDS:
            self._write()
        self.display.played(trajectory)

    def recorded(self, file: Path, trajectories: Sequence[Trajectory]) -> None:
        self.display.recorded(file, trajectories)

    def evaluation(self, evaluation: Evaluation) -> None:
        self.display.evaluation(evaluation)

    def step(self, metrics: Mapping[str, Any], seconds_left: float) -> None:
        self._write(step=metrics["step"], end=time.time() + seconds_left if seconds_left else None)
        self.display.step(metrics, seconds_left)

    def ended(self, reason: str) -> None:
        """Note why the last step was the last, whatever still follows."""
        self._now["reason"] = reason

    def close(self) -> None:
        """Write how the run ended: by a reason noted before, else by the exception that is being raised, if any."""
        state, error = "finished", sys.exception()
        if self._now["reason"] is None and error is not None:
            is_asked = isinstance(error, KeyboardInterrupt)
            state, self._now["reason"] = ("interrupted", None) if is_asked else ("failed", first_line(error))
        self._write(state=state, phase=None)


Service = tuple[Callable[[dict[str, float], int], None], Callable[[], None]]
"""A tracking service: sends a step's flat numbers, and ends, waiting for pending uploads."""


class Tracker:
    """Writes every line and number of one run to all its destinations. ``metrics.jsonl`` has one object per step,
    ``evaluations.jsonl`` one per evaluation (including step 0); entries beyond ``step``, and evaluations beyond
    ``evaluated``, are removed, because those are repeated."""

    def __init__(
        self, run_dir: Path, settings: Settings, display: Display, *, run_id: str, mode: str, step: int, evaluated: int
    ) -> None:
        self.display = Status(display, run_dir, step)  # Shows the run while it trains.
        tracking = settings.tracking
        self._logging_steps = tracking.logging_steps
        shared = tracking.tensorboard_dir
        events = shared / run_id if shared else run_dir / "tensorboard"
        check_own(events, "TENSORBOARD_DIR")
        self._log = open_log(run_dir / "training.log", verbose=settings.output.verbose)
        self._services = [_tensorboard(events, step)] if tracking.tensorboard else []
        if tracking.trackio:
            self._services.append(_trackio(tracking.wandb_project, run_id, settings.public(), self.say))
        if tracking.wandb_mode != "disabled":
            tracking = tracking.model_copy(update={"wandb_name": tracking.wandb_name.replace("{mode}", mode)})
            self._services.append(_wandb(tracking, run_dir, run_id, settings.public(), self.say))
        # Last, because opening them removes lines, and a service may fail to start.
        self._metrics = MetricsWriter(run_dir / "metrics.jsonl", after_step=step)
        self._evaluations = MetricsWriter(run_dir / "evaluations.jsonl", after_step=evaluated)

    def say(self, text: str, *, is_result: bool = False) -> None:
        """Print lines to the console and the log; a command prints the outcome of a run as its result."""
        for line in text.splitlines():
            (self.display.result if is_result else self.display.say)(line)
            logging.getLogger("emailrl.training").info("%s", line)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._evaluations.write({"step": evaluation.step} | evaluation.metrics())
        self.display.evaluation(evaluation)
        self._send({f"eval/{name}": value for name, value in evaluation.metrics().items()}, evaluation.step)

    def step(self, metrics: Mapping[str, Any], line: str, seconds_left: float = 0.0) -> None:
        """Record one step's numbers, and print ``line`` every LOGGING_STEPS steps."""
        self._metrics.write(dict(metrics))
        self.display.step(metrics, seconds_left)
        if metrics["step"] % self._logging_steps:
            return
        self.say(line)
        self._send({name: value for name, value in metrics.items() if not name.startswith("eval_")}, metrics["step"])

    def _send(self, metrics: Mapping[str, Any], step: int) -> None:
        numbers = flat_numbers(metrics)
        for log, _ in self._services:
            log(numbers, step)

    def close(self) -> None:
        self.display.close()
        for _, end in self._services:
            end()
        self._metrics.close()
        self._evaluations.close()
        logging.getLogger("emailrl").removeHandler(self._log)
        self._log.close()


class _LogFile(logging.FileHandler):
    """Raises an OSError that names the file, for which ``logging`` would print a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exception(), OSError):
            raise
        super().handleError(record)

    def flush(self) -> None:
        with naming(Path(self.baseFilename)):
            super().flush()


class _PlainFormatter(logging.Formatter):
    """Formats a record as one line, and its traceback on more, all of it ``plain``."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def open_log(path: Path, *, verbose: bool) -> logging.Handler:
    """Append ``emailrl``'s log from INFO up (``verbose``: from DEBUG) to a file, with timestamps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("emailrl")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.addHandler(handler)
    return handler


def flat_numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            numbers |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float)) and math.isfinite(value):
            numbers[prefix + name] = float(value)
    return numbers


class Clock:
    """Seconds of one step by phase."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``; a phase entered twice adds up."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        return self.phases | {"total": time.perf_counter() - self._begun}


def pace(first: int) -> Callable[[int, int], float]:
    """Seconds after some step until ``total`` steps are done, at the mean pace since now, the end of step ``first``."""
    begun = time.perf_counter()
    return lambda step, total: (time.perf_counter() - begun) / (step - first) * (total - step)


def check_services(tracking: TrackingSettings) -> None:
    """Raise UsageError if a service's package is missing, or an untrusted file of the folder configures W&B."""
    if tracking.wandb_mode != "disabled":
        trust.check(trust.wandb_risks(Path.cwd()), Path.cwd())
    for name in ("tensorboard", "trackio"):
        if getattr(tracking, name):
            need(name, f"EMAILRL_{name.upper()}")


def _wandb(tracking: TrackingSettings, run_dir: Path, run_id: str, config: dict[str, Any], say: Say) -> Service:
    """The W&B run with a run's id, started or resumed; ``online`` without login or network is offline, and says so."""
    import wandb

    def begin(mode: Literal["online", "offline"]) -> Any:
        return wandb.init(
            project=tracking.wandb_project,
            entity=tracking.wandb_entity,
            name=tracking.wandb_name,
            id=run_id,
            resume="allow" if mode == "online" else None,
            dir=run_dir,
            mode=mode,
            config=config,
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )

    run: Any = None
    if tracking.wandb_mode == "online":
        reason = "not logged in"
        try:
            run = begin("online") if wandb.login(prompt=False) else None
        except wandb.errors.Error as error:
            reason = first_line(error)
        if run is None:
            later = f"wandb login, then wandb sync {run_dir / 'wandb'}/offline-run-*"
            say(f"W&B logs offline: {reason}. Later: {later}")
    run = run or begin("offline")
    return lambda numbers, step: run.log(numbers, step=step), run.finish


def _tensorboard(directory: Path, step: int) -> Service:
    """A TensorBoard event file; events beyond ``step``, left by an interrupted run, are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory), purge_step=step + 1)

    def log(numbers: dict[str, float], step: int) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return log, writer.close


def _trackio(project: str, run_id: str, config: dict[str, Any], say: Say) -> Service:
    """The Trackio run with a run's id, started or resumed; it has steps that an interrupted run left, too."""
    import trackio

    def quietly(call: Callable[..., Any], **given: Any) -> Any:
        with redirect_stdout(io.StringIO()):  # stdout is for results
            return call(**given)

    off: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = quietly(trackio.init, project=project, name=run_id, config=config, resume="allow", **off)
    say(f"Trackio: trackio show --project {shlex.quote(project)}")

    def log(numbers: dict[str, float], step: int) -> None:
        quietly(run.log, metrics={name: value for name, value in numbers.items() if name != "step"}, step=step)

    return log, partial(quietly, trackio.finish)  # run.finish would be called again at exit
