"""Where a run's numbers go: the console and ``training.log``, ``metrics.jsonl``, W&B and TensorBoard."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from emailrl.base.disk import check_own, naming
from emailrl.base.errors import UsageError
from emailrl.base.plain import first_line, plain, plain_line
from emailrl.measure.evaluation import Evaluation
from emailrl.records import MetricsWriter
from emailrl.settings import Settings, check_wandb
from emailrl.training.run.display import SILENT, Display

Say = Callable[[str], None]


class Sink(Protocol):
    """A tracking service that receives flat numbers per step."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writes every line and number of one run to all its destinations.

    ``metrics.jsonl`` has one object per step, ``evaluations.jsonl`` one per evaluation (including step 0); entries
    beyond ``step``, and evaluations beyond ``evaluated`` (None: ``step``), are removed, because those are repeated.
    """

    def __init__(
        self, run_dir: Path, settings: Settings, *, run_id: str, step: int, say: Say, evaluated: int | None = None
    ) -> None:
        self._console = say
        self.results: Say = say
        """Prints the lines of ``conclude``."""
        self.display: Display = SILENT
        """Shows the run while it trains."""
        self._logging_steps = settings.tracking.logging_steps
        shared = settings.tracking.tensorboard_dir
        events = shared / run_id if shared else run_dir / "tensorboard"
        check_own(events, "TENSORBOARD_DIR")
        self._log = open_log(run_dir / "training.log", verbose=settings.output.verbose)
        self._sinks: list[Sink] = []
        if settings.tracking.tensorboard:
            self._sinks.append(TensorBoard(events, step))
        if (wandb := start_wandb(settings, run_dir, run_id, self.say)) is not None:
            self._sinks.append(wandb)
        # Last, because opening them removes lines, and a service may fail to start.
        self._metrics = MetricsWriter(run_dir / "metrics.jsonl", after_step=step)
        last = step if evaluated is None else evaluated
        self._evaluations = MetricsWriter(run_dir / "evaluations.jsonl", after_step=last)

    def say(self, text: str) -> None:
        """Print lines to the console and the log."""
        self._print(text, self._console)

    def conclude(self, text: str) -> None:
        """``say`` the outcome of the run, which a command prints as its result."""
        self._print(text, self.results)

    def _print(self, text: str, console: Say) -> None:
        for line in text.splitlines():
            console(line)
            logging.getLogger("emailrl.training").info("%s", line)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record one evaluation's numbers."""
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
        for sink in self._sinks:
            sink.log(numbers, step)

    def close(self) -> None:
        """Flush and close everything."""
        for sink in self._sinks:
            sink.close()
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
    """The finite numbers of a nested mapping, keys joined by ``/``."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            numbers |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float)) and math.isfinite(value):
            numbers[prefix + name] = float(value)
    return numbers


# -- services -------------------------------------------------------------------------------------------------------


class WandB:
    """A W&B run."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Send a step's numbers."""
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the run, waiting for pending uploads."""
        self.run.finish()


def start_wandb(settings: Settings, run_dir: Path, run_id: str, say: Say) -> WandB | None:
    """Start or resume the W&B run with this id; None if WANDB_MODE is ``disabled``.

    ``online`` without login or network continues offline and says so once.
    """
    tracking = settings.tracking
    if tracking.wandb_mode == "disabled":
        return None
    import wandb

    def begin(mode: Literal["online", "offline"]) -> WandB:
        run = wandb.init(
            project=tracking.wandb_project,
            entity=tracking.wandb_entity,
            name=tracking.wandb_name.replace("{mode}", settings.training.mode),
            id=run_id,
            resume="allow" if mode == "online" else None,
            dir=run_dir,
            mode=mode,
            config=settings.public(),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        return WandB(run)

    if tracking.wandb_mode == "online":
        try:
            if wandb.login(prompt=False):
                return begin("online")
            reason = "not logged in"
        except wandb.errors.Error as error:
            reason = first_line(error)
        say(f"W&B logs offline: {reason}. Later: wandb login, then wandb sync {run_dir / 'wandb'}/offline-run-*")
    return begin("offline")


def check_services(settings: Settings) -> None:
    """Raise UsageError if a service's package is missing, or an untrusted file of the folder configures W&B."""
    if settings.tracking.wandb_mode != "disabled":
        check_wandb(Path.cwd())
    if settings.tracking.tensorboard and find_spec("tensorboard") is None:
        raise UsageError(
            "TENSORBOARD needs the tensorboard package.", "Run in the clone: pip install -e '.[tensorboard]'"
        )


class TensorBoard:
    """A TensorBoard event file; events beyond ``step``, left by an interrupted run, are hidden."""

    def __init__(self, directory: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=step + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Write a step's numbers."""
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Flush and close the file."""
        self.writer.close()
