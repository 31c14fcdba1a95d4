"""Where a run's numbers go: the console and ``training.log``, ``metrics.jsonl``, W&B and TensorBoard."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from emailrl.errors import UsageError
from emailrl.evaluation import Evaluation
from emailrl.recording import MetricsWriter
from emailrl.settings import Settings, check_wandb
from emailrl.training.run.state import RunState, num_epochs, questions_per_step

RULE = "=" * 60
Say = Callable[[str], None]


class Sink(Protocol):
    """A tracking service: takes flat numbers a step."""

    def log(self, numbers: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Writes every line and every number of one run to all the places that want them.

    ``metrics.jsonl`` has one object a step, ``evaluations.jsonl`` one an evaluation (step 0 included); what they say
    of steps beyond ``step`` is removed, for those are done again.
    """

    def __init__(self, run_dir: Path, settings: Settings, *, run_id: str, step: int, say: Say) -> None:
        self._console = say
        self._logging_steps = settings.tracking.logging_steps
        self._log = open_log(run_dir / "training.log", verbose=settings.output.verbose)
        self._sinks: list[Sink] = []
        if settings.tracking.tensorboard:
            folder = settings.tracking.tensorboard_dir
            self._sinks.append(TensorBoard(folder / run_id if folder else run_dir / "tensorboard", step))
        if (wandb := start_wandb(settings, run_dir, run_id, self.say)) is not None:
            self._sinks.append(wandb)
        # Last, for opening them removes lines, and a service may refuse to begin.
        self._metrics = MetricsWriter(run_dir / "metrics.jsonl", after_step=step)
        self._evaluations = MetricsWriter(run_dir / "evaluations.jsonl", after_step=step)

    def say(self, text: str) -> None:
        """Print lines to the console and the log; what cannot be printed, as mail may hold it, becomes a space."""
        for line in text.splitlines():
            printable = "".join(char if char.isprintable() else " " for char in line)
            self._console(printable)
            logging.getLogger("emailrl.training").info("%s", printable)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Record one evaluation's numbers."""
        self._evaluations.write({"step": evaluation.step} | evaluation.metrics())
        self._send({f"eval/{name}": value for name, value in evaluation.metrics().items()}, evaluation.step)

    def step(self, metrics: Mapping[str, Any], line: str) -> None:
        """Record one step's numbers, and tell of every LOGGING_STEPS-th step: ``line`` on the console."""
        self._metrics.write(dict(metrics))
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


def open_log(path: Path, *, verbose: bool) -> logging.Handler:
    """Append what ``emailrl`` logs, from INFO up (``verbose``: from DEBUG), to a file, each line with its time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("emailrl")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.addHandler(handler)
    return handler


def flat_numbers(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a nested mapping, its levels joined by ``/``."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            numbers |= flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float)) and math.isfinite(value):
            numbers[prefix + name] = float(value)
    return numbers


# -- what is printed ------------------------------------------------------------------------------------------------


def header(settings: Settings, *, run_dir: Path, num_train: int, num_eval: int, start: int, total: int) -> str:
    """The lines a run begins with."""
    training = settings.training
    per_step = questions_per_step(training)
    begun = f"Resuming at step {start} of {total}" if start else f"Starting training: {total} steps"
    return "\n".join(
        (
            RULE,
            f"{begun} | mode {training.mode} | algorithm {training.algorithm} | model {settings.model.name}",
            f"Questions: {num_train} for training, {num_eval} for evaluation",
            f"Per step: {per_step} questions x {training.num_generations} rollouts;"
            f" {total} steps are {num_epochs(total, per_step, num_train):.2g} epochs",
            f"Target accuracy: {settings.evaluation.target_accuracy:.1%}",
            f"Output: {run_dir}",
            RULE,
        )
    )


def duration(seconds: float) -> str:
    """As people say it: 90 s, 12 min, 3.4 h, 5.1 days."""
    for length, most, unit in ((1, 120, "s"), (60, 7200, "min"), (3600, 172_800, "h")):
        if seconds < most:
            return f"{seconds / length:.{0 if length < 3600 else 1}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


def step_line(metrics: Mapping[str, Any], total: int, seconds_left: float = 0.0) -> str:
    """One step on one line, with what is left of the run; a number that the step does not have is a dash."""

    def shown(name: str, form: str) -> str:
        value = metrics.get(name)
        return "-" if value is None else format(value, form)

    parts = [
        f"Step {metrics['step']}/{total}",
        f"Loss {shown('loss', 'z.4f')}",
        f"Policy {shown('policy_loss', 'z.4f')}",
        f"KL {shown('kl', 'z.4f')}",
        f"Reward {shown('reward_mean', 'z.3f')}",
        f"Acc {shown('accuracy', '.1%')}",
        f"Trainable tokens: {metrics['trainable_tokens']}/{metrics['total_tokens']}"
        f" ({shown('trainable_share', '.1%')})",
        f"{metrics['seconds']['total']:.1f} s",
    ]
    if seconds_left:
        parts.append(f"about {duration(seconds_left)} left")
    if dropped := {reason: count for reason, count in metrics["dropped"].items() if count}:
        parts.append("Dropped: " + ", ".join(f"{count} {reason}" for reason, count in dropped.items()))
    return " | ".join(parts)


def percent(accuracy: float, interval: tuple[float, float]) -> str:
    """An accuracy with its 95 % interval."""
    low, high = interval
    return f"{accuracy:.1%} (95 % interval {low:.1%} to {high:.1%})"


def evaluation_block(evaluation: Evaluation, state: RunState, *, is_best: bool) -> str:
    """What an evaluation showed, and how it stands to the best so far, which ``state`` already knows of."""
    low, high = evaluation.interval
    reward = "-" if evaluation.reward is None else f"{evaluation.reward:.3f}"
    turns = evaluation.rubric.get("num_turns")
    lines = [
        f"--- Evaluation at step {evaluation.step} ---",
        f"Eval reward: {reward} | turns: {'-' if turns is None else f'{turns:.1f}'}"
        f" | exceptions: {evaluation.exceptions}",
        f"Eval accuracy: {evaluation.accuracy:.1%}"
        f" ({evaluation.num_correct} of {evaluation.num_judged}, 95 % interval {low:.1%} to {high:.1%})",
    ]
    if evaluation.unjudged:
        void = "so this evaluation does not count for the best model, patience or target."
        lines.append(
            f"{evaluation.unjudged} of {len(evaluation.trajectories)} answers have no verdict, "
            + (void if evaluation.is_void else "and are excluded from the accuracy.")
        )
    if state.best_accuracy == 0:
        lines.append(f"No correct answer yet; best_model stays at step {state.best_step} until there is one")
    elif is_best:
        lines.append(f"New best accuracy: {evaluation.accuracy:.1%}, saved to best_model")
    elif state.best_accuracy is not None and state.best_interval is not None:
        best = percent(state.best_accuracy, state.best_interval)
        lines.append(f"Best accuracy so far: {best} at step {state.best_step}")
    return "\n".join(lines)


# -- services -------------------------------------------------------------------------------------------------------


class WandB:
    """A W&B run."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Send a step's numbers."""
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the run, waiting for what is still to be sent."""
        self.run.finish()


def start_wandb(settings: Settings, run_dir: Path, run_id: str, say: Say) -> WandB | None:
    """Begin, or on a resume go on with, the W&B run of this id; None where WANDB_MODE is ``disabled``.

    ``online`` without login or network goes on offline and says so once.
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
            reason = str(error).strip().splitlines()[0]
        say(f"W&B logs offline: {reason}. Later: wandb login, then wandb sync {run_dir / 'wandb'}/offline-run-*")
    return begin("offline")


def check_services(settings: Settings) -> None:
    """Raise UsageError where a service's package is missing, or a folder's file that is not trusted steers W&B."""
    if settings.tracking.wandb_mode != "disabled":
        check_wandb(Path.cwd())
    if settings.tracking.tensorboard and find_spec("tensorboard") is None:
        raise UsageError(
            "TENSORBOARD needs the tensorboard package.", "Run in the clone: pip install -e '.[tensorboard]'"
        )


class TensorBoard:
    """A TensorBoard event file; events of steps beyond ``step``, left by a run cut short, are hidden."""

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
