"""The training loop, the same for every mode and algorithm: both are data.

A step's line in ``metrics.jsonl`` is written after its evaluation, so that one line holds both, and before its
checkpoint, so that a checkpoint's step is always recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emailrl.base.errors import EmailRLError
from emailrl.ranks import joined
from emailrl.settings import Settings
from emailrl.training.batch import make_samples
from emailrl.training.run.assemble import open_run
from emailrl.training.run.display import SILENT, Display
from emailrl.training.run.ending import NothingLeft, finish
from emailrl.training.run.metrics import Clock, Pace, evaluation_metrics, policy_ages, rollout_metrics, update_metrics
from emailrl.training.run.printing import complete, step_line
from emailrl.training.run.run import Run
from emailrl.training.run.state import RunState
from emailrl.training.shaping import terminal_rewards


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run."""

    run_dir: Path
    best_accuracy: float
    """Best evaluation accuracy, 0 to 1; its weights are in ``best_model``."""
    best_step: int
    steps: int
    """Steps done, including those before a resume."""
    steps_without_update: int
    learned_nothing: bool
    """Whether no step had an update, or no update changed an evaluation."""

    @classmethod
    def of(cls, directory: Path, state: RunState) -> TrainResult:
        """The result of the run in this directory."""
        return cls(
            directory.absolute(),
            state.best_accuracy or 0.0,
            state.best_step or 0,
            state.step,
            state.steps_without_update,
            state.learned_nothing,
        )


def train(
    settings: Settings,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda line: None,
    results: Callable[[str], None] | None = None,
    display: Display = SILENT,
) -> TrainResult:
    """Train with the given settings and return the outcome.

    ``progress`` gets each line for the console; ``results``, if given, gets the final lines instead, which summarize
    the run. ``display`` is notified of rollouts, steps and evaluations as they end.

    ``resume`` is ``auto``, ``latest``, ``best`` or the path of a run or checkpoint; without it a new run takes a free
    directory, or with ``overwrite`` replaces the first one. Resuming from a checkpoint before the latest needs
    ``overwrite``, because it removes the run's later work. A KeyboardInterrupt, or any error between two updates,
    leaves the last complete step saved. Under torchrun, this is rank 0; the other ranks call
    ``training.run.follower.follow``. Raises UsageError for what the user must change, EmailRLError for a run that
    cannot continue.
    """
    result: TrainResult | None = None
    try:
        with (
            joined(settings) as ranks,
            open_run(settings, resume=resume, overwrite=overwrite, say=progress, display=display, ranks=ranks) as run,
            run.interrupts.installed(),
        ):
            run.tracker.results = results or progress
            if not ranks.is_alone:
                ranks.on_stop = run.interrupts.request
            _loop_or_rescue(run)
            result = TrainResult.of(run.directory, run.state)
    except NothingLeft as finished:
        (results or progress)(str(finished))
        return TrainResult.of(finished.directory, finished.state)
    except (EmailRLError, KeyboardInterrupt):
        if result is not None:  # a rank was lost, or Ctrl-C pressed, while the others were released
            progress(complete(skipped=["the export"] if settings.output.export_dir else []))
        raise
    return result


def _loop_or_rescue(run: Run) -> None:
    """``loop``, and what has to be saved or shown however it ends."""
    try:
        loop(run)
        run.interrupts.check()  # an interrupt during the last step also stops what follows the run
    except (Exception, KeyboardInterrupt):
        run.rescue()
        raise
    finally:
        run.tracker.display.end()


def loop(run: Run) -> None:
    """Repeat: refresh the engine, collect groups, make samples, train, evaluate, log, checkpoint."""
    state, droppable = run.state, run.interrupts.droppable
    with droppable():
        evaluated = run.evaluate_if_due()
    if evaluated:
        run.end_step()
    pace = Pace(state.step)
    while (reason := run.stop_reason()) is None:
        clock = Clock()
        with droppable(), clock.phase("rollout"):
            collected, questions = run.collect()
        paid = terminal_rewards(collected.kept, run.algorithm)
        samples, counts = make_samples(collected.kept, run.mode.loss_mask, mask_truncated=run.mask_truncated)
        with clock.phase("update"):
            trained = run.train(samples, paid)
        run.record_training(collected, samples, trained.tokens)
        rollouts = rollout_metrics(collected)
        state.end_step(questions.cursor, rollouts["accuracy"])
        metrics = {"step": state.step, "epoch": state.cursor.epoch} | update_metrics(trained.metrics) | rollouts
        metrics |= policy_ages(collected, state.step - 1)
        evaluation = None
        try:
            with clock.phase("evaluation"):
                evaluation = run.evaluate_if_due()
        finally:  # an evaluation cut short does not cost the step: it is saved, and the resumed run evaluates it
            metrics |= {"accuracy_moving": state.moving_accuracy, "accuracy_best": state.best_accuracy}
            metrics |= evaluation_metrics(evaluation)
            metrics |= {"dropped": collected.dropped() | counts, "seconds": clock.seconds() | run.waits}
            seconds_left = pace.seconds_left(state.step, run.total_steps)
            run.tracker.step(metrics, step_line(metrics, run.total_steps, seconds_left), seconds_left)
            run.complete_step()
        run.end_step(metrics)
    finish(run, reason)
