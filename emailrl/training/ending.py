"""The end of a run: ``final``, the curves, and the best model measured on other questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from emailrl.base.disk import replace_bytes
from emailrl.base.drawing import FAINT, FIRST, new_figure, save
from emailrl.base.plain import counted
from emailrl.checkpoints import CONFIRMED, confirmed_of, damage_of, list_checkpoints
from emailrl.records import Record, read_records
from emailrl.runs.folder import remove_records
from emailrl.settings import PolicySettings
from emailrl.training.report import percent
from emailrl.training.run import TrainingRun
from emailrl.training.state import RunState

LAST_CURVE: Final = "curve.svg"  # In a run's folder: the file that ``draw_curves`` writes last
RATES: Final = {"nano": 2e-3, "smol": 3e-4, "smol-base": 3e-4}  # Measured learning rates (docs/guides/learning_rate.md)


class NothingLeft(Exception):
    """The run to resume has ended, and everything that a run leaves at its end is there."""

    def __init__(self, directory: Path, state: RunState, reason: str) -> None:
        super().__init__(f"Nothing left to do in {directory}: it ended after step {state.step}, {reason}.")
        self.directory, self.state = directory, state


def check_unfinished(directory: Path, state: RunState, reason: str | None, *, confirms: bool) -> None:
    """Raise NothingLeft if the run ended for ``reason`` (None: it continues) and lacks nothing that a run leaves.

    ``confirms``: there are questions to measure the best model on.
    """
    saved = {item.metadata.kind: item for item in list_checkpoints(directory)}
    if reason is None or "final" not in saved or saved["final"].metadata.step != state.step:
        return
    if not (directory / LAST_CURVE).exists() or any(damage_of(directory / name) for name in ("final", "best_model")):
        return
    confirms = confirms and bool(state.best_accuracy)
    if not confirms or ("best" in saved and confirmed_of(saved["best"]) is not None):
        raise NothingLeft(directory, state, reason)


def finish(run: TrainingRun, reason: str) -> None:
    """Write ``final`` and the curves, and report why the run ended."""
    if run.ahead is not None:
        run.ahead.close()
        remove_records(run.directory, after=run.state.step)
    run.save("final")
    run.tracker.say(f"Curves saved to: {draw_curves(run.directory, run.settings)[0]}")
    run.tracker.say(outcome(run.state, reason, len(run.val), run.settings), is_result=True)


def confirms(run: TrainingRun) -> bool:
    """Whether ``confirm_best`` measures anything."""
    return bool(run.state.best_accuracy and run.confirm)


def confirm_best(run: TrainingRun) -> None:
    """Measure the best model on other questions: the best of many evaluations is partly luck."""
    if not confirms(run):
        return
    step = run.state.best_step
    with run.interrupts.droppable():
        run.engine.resume()
        run.engine.load_adapter(run.directory / "best_model", f"best-{step}")
        confirmed = run.measure(run.confirm, step or 0, "confirm")
    run.rollouts.record(f"confirm-{step:06d}.jsonl", confirmed.trajectories, run.tracker.display)
    record = {"step": step} | confirmed.metrics()
    replace_bytes(run.directory / CONFIRMED, (json.dumps(record, indent=2) + "\n").encode())
    asked = counted(confirmed.num_questions, "validation question")
    found = percent(confirmed.accuracy, confirmed.interval)
    run.tracker.say(f"best_model measured again on {asked} that did not select it: {found}", is_result=True)


def outcome(state: RunState, reason: str, num_eval: int, settings: PolicySettings) -> str:
    """The result of a run that ended for ``reason``."""
    best, interval, step = state.best_accuracy, state.best_interval, state.best_step
    steps = counted(state.step, "step")
    if best is None or interval is None:
        said = "No evaluation selected a best_model"
    elif best == 0:
        said = f"No evaluation had a correct answer; best_model is from step {step}"
    else:
        questions = f"the {counted(num_eval, 'validation question')} that selected best_model"
        start = "; best_model has the weights of the start" if step == 0 < state.step else ""
        said = f"Best accuracy {percent(best, interval)} at step {step}, on {questions}{start}"
    said = f"Done after step {state.step}: {reason}. {said}."
    if 0 < state.step == state.steps_without_update:
        kept = "final has" if best is None else "best_model and final have"
        return (
            f"{said}\nNothing was learned: {steps} without an update, so {kept} the weights of the start."
            " The step lines say why; if the rewards of each group are equal, raise --temperature, or start with"
            " emailrl sft (docs/guides/troubleshooting.md)."
        )
    if not state.learned_nothing:
        return said
    if not best:
        return (
            f"{said}\nNothing was learned in {steps}: start with emailrl sft, or with a stronger model or an easier"
            " mailbox (docs/guides/troubleshooting.md)."
        )
    model, rate = settings.model.name, settings.training.learning_rate
    higher = max(RATES.get(model, 0), rate)
    return (
        f"{said}\nNothing was learned: every evaluation in {steps} had the same {best:.1%} correct."
        f" The learning rate {rate:g} is probably too small for {model}: try --learning-rate"
        f" {higher if higher > rate else 10 * rate:g} (docs/guides/learning_rate.md)."
    )


def complete(skipped: Sequence[str]) -> str:
    """The line of a run that was interrupted after its last step."""
    return f"The run is complete and saved{'; skipped: ' * bool(skipped)}{' and '.join(skipped)}."


def curve(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Return ``(step, number)`` of every record that has the number."""
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def draw_curves(run_dir: Path, settings: PolicySettings) -> list[Path]:
    """Draw a run's ``metrics.jsonl`` and ``evaluations.jsonl`` as ``curve.png`` and ``curve.svg`` in its folder."""
    steps, evaluations = (list(read_records(run_dir / f"{name}.jsonl")) for name in ("metrics", "evaluations"))
    figure = new_figure(9, 3.6)
    accuracy, reward = figure.subplots(1, 2)
    for axes, of_steps, of_evaluations in ((accuracy, "accuracy", "accuracy"), (reward, "reward_mean", "reward")):
        for points, style in (
            (curve(steps, of_steps), {"color": FAINT, "label": "training rollouts"}),
            (curve(evaluations, of_evaluations), {"color": FIRST, "marker": "o", "label": "evaluations"}),
        ):
            axes.plot([step for step, _ in points], [value for _, value in points], **style)
    if whole := [each for each in evaluations if each.get("accuracy") is not None]:
        at = [each["step"] for each in whole]
        accuracy.vlines(at, *([each[f"accuracy_{end}"] for each in whole] for end in ("low", "high")), color=FIRST)
    accuracy.set(title="Accuracy, 95 % interval", xlabel="training step", ylim=(0, 1.02))
    accuracy.yaxis.set_major_formatter("{x:.0%}")
    reward.set(title="Reward", xlabel="training step")
    reward.legend(loc="lower right")
    title = f"{settings.model.name}, {settings.training.algorithm}, mode {settings.training.mode}"
    figure.suptitle(title, fontsize=11, parse_math=False)  # names may hold a $
    return save(figure, run_dir / "curve")
