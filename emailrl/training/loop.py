"""The training loop, the same for every mode and algorithm: both are data. A step's line in ``metrics.jsonl`` is
written after its evaluation, so that one line holds both, and before its checkpoint, so that a checkpoint's step is
always recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from emailrl.engines.vllm.servers import VllmServers
from emailrl.ranks import joined
from emailrl.runs.log import Clock, Display, Say, pace, silent
from emailrl.settings import Settings
from emailrl.training.assemble import opened
from emailrl.training.batch import make_samples, terminal_rewards
from emailrl.training.report import complete, rollout_metrics, step_line, update_metrics
from emailrl.training.run import NothingLeft, TrainingRun


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run."""

    run_dir: Path
    best_accuracy: float  # Best evaluation accuracy, 0 to 1; its weights are in ``best_model``
    best_step: int
    steps: int  # Steps done, including those before a resume
    steps_without_update: int
    learned_nothing: bool  # Whether no step had an update, or no update changed an evaluation


def train(
    settings: Settings,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    progress: Say = silent,
    display: Display | None = None,
) -> TrainResult:
    """Train with the given settings and return the outcome. ``progress`` gets each line for the console, or
    ``display``, if given, and what else there is to show of the run. ``resume`` is ``auto``, ``latest``, ``best`` or
    the path of a run or checkpoint; without it a new run takes a free directory, or with ``overwrite`` replaces the
    first one. Resuming from a checkpoint before the latest needs ``overwrite``, because it removes the run's later
    work. A KeyboardInterrupt, or any error between two updates, leaves the last complete step saved. Under torchrun,
    this is rank 0; the other ranks call ``training.team.follow``. Raises UsageError for what the user must change,
    EmailRLError for a run that cannot continue."""
    display = display or Display(progress)
    skipped: list[str] | None = None  # What is left to do once everything is saved; None before that
    try:
        with (
            joined(settings.training, device=settings.model.device) as ranks,
            opened(settings, ranks, display, resume=resume, overwrite=overwrite) as run,
            run.interrupts.installed(),
        ):
            ranks.stop_with(run.interrupts.request)
            with run.rescued():
                run.finish(loop(run))
            export = ["the export"] if settings.output.export_dir else []
            skipped = ["measuring best_model again", *export] if run.confirms else export
            run.interrupts.check()  # an interrupt during the last step also stops what follows the run
            run.confirm_best()
            if run.bill.spent:
                run.tracker.say(f"The judge cost ${run.bill.spent:.4g}.", is_result=True)
            skipped = export
            run.interrupts.check()
            directory, state = run.directory, run.state
    except NothingLeft as finished:
        said, directory, state = finished.args
        display.result(said)
    except (Exception, KeyboardInterrupt):
        if skipped is not None:  # a rank may also be lost while the others are released
            display.result(complete(skipped))
        raise
    finally:
        display.end()
    best = state.best_accuracy or 0.0, state.best_step or 0
    return TrainResult(directory.absolute(), *best, state.step, state.steps_without_update, state.learned_nothing)


def loop(run: TrainingRun) -> str:
    """Repeat: collect groups, make samples, train, evaluate, log, checkpoint; return why it ended."""
    state, droppable = run.state, run.interrupts.droppable
    with droppable():
        evaluated = run.evaluate_if_due()
    if evaluated:
        run.end_step()
    seconds_to = pace(state.step)
    while (reason := run.stop_reason()) is None:
        clock = Clock()
        with droppable(), clock.phase("rollout"):
            collected, questions = run.collect()
        paid = terminal_rewards(collected.kept, run.algorithm)
        samples, counts = make_samples(collected.kept, run.mode.loss_mask, mask_truncated=run.mask_truncated)
        with clock.phase("update"):
            trained = run.train(samples, paid)
        run.record_training(collected, samples, trained.tokens)
        rollouts = rollout_metrics(collected, state.step)
        state.end_step(questions.cursor, rollouts["accuracy"])
        metrics = {"step": state.step, "epoch": state.cursor.epoch} | update_metrics(trained.metrics) | rollouts
        evaluation = None
        try:
            with clock.phase("evaluation"):
                evaluation = run.evaluate_if_due()
        finally:  # an evaluation cut short does not cost the step: it is saved, and the resumed run evaluates it
            metrics |= {"accuracy_moving": state.moving_accuracy, "accuracy_best": state.best_accuracy}
            metrics |= {f"eval_{name}": value for name, value in (evaluation.metrics() if evaluation else {}).items()}
            metrics |= {
                "servers_up": len(run.engine.alive) if isinstance(run.engine, VllmServers) else None,
                "dropped": collected.dropped() | counts,
                "seconds": clock.seconds() | (run.ahead.seconds if run.ahead else {}),
            }
            seconds_left = seconds_to(state.step, run.total_steps)
            run.tracker.step(metrics, step_line(metrics, run.total_steps, seconds_left), seconds_left)
            run.complete_step()
        run.end_step(metrics)
    return reason
