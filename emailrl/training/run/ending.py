"""The end of a run: ``final``, the curves, and the best model measured on other questions."""

from __future__ import annotations

import json
from pathlib import Path

from emailrl.checkpoints import CONFIRMED, confirmed_of, damage_of, list_checkpoints
from emailrl.disk import replace_bytes
from emailrl.plain import counted
from emailrl.training.run.curve import LAST_CURVE, draw_curves
from emailrl.training.run.directory import remove_records
from emailrl.training.run.printing import outcome, percent
from emailrl.training.run.questions import RunData
from emailrl.training.run.run import Run
from emailrl.training.run.state import RunState


class NothingLeft(Exception):
    """The run to resume has ended, and everything that a run leaves at its end is there."""

    def __init__(self, directory: Path, state: RunState, reason: str) -> None:
        super().__init__(f"Nothing left to do in {directory}: it ended after step {state.step}, {reason}.")
        self.directory, self.state = directory, state


def check_unfinished(directory: Path, state: RunState, reason: str | None, data: RunData) -> None:
    """Raise NothingLeft if the run ended for ``reason`` (None: it continues) and lacks nothing that a run leaves."""
    saved = {item.metadata.kind: item for item in list_checkpoints(directory)}
    if reason is None or "final" not in saved or saved["final"].metadata.step != state.step:
        return
    if not (directory / LAST_CURVE).exists() or any(damage_of(directory / name) for name in ("final", "best_model")):
        return
    if not _confirms(state, data) or ("best" in saved and confirmed_of(saved["best"]) is not None):
        raise NothingLeft(directory, state, reason)


def finish(run: Run, reason: str) -> None:
    """Write ``final`` and the curves, report why the run ended, and measure the best model on other questions."""
    if run.ahead is not None:
        run.ahead.close()
        remove_records(run.directory, after=run.state.step)
    run.save("final")
    run.tracker.say(f"Curves saved to: {draw_curves(run.directory, run.settings)[0]}")
    run.tracker.conclude(outcome(run.state, reason, len(run.data.val), run.settings))
    run.remaining = ["the export"] if run.settings.output.export_dir is not None else []
    if _confirms(run.state, run.data):
        run.remaining.insert(0, "measuring best_model again")
        _confirm(run)
        del run.remaining[0]


def _confirms(state: RunState, data: RunData) -> bool:
    return bool(state.best_accuracy and data.confirm)


def _confirm(run: Run) -> None:
    """Measure the best model on other questions: the best of many evaluations is partly luck."""
    step = run.state.best_step
    with run.interrupts.droppable():
        run.engine.resume()
        run.engine.load_adapter(run.directory / "best_model", f"best-{step}")
        confirmed = run.measure(run.data.confirm, step or 0, "confirm")
    run.rollouts.record(f"confirm-{step:06d}.jsonl", confirmed.trajectories, run.tracker.display)
    record = {"step": step} | confirmed.metrics()
    replace_bytes(run.directory / CONFIRMED, (json.dumps(record, indent=2) + "\n").encode())
    run.tracker.conclude(
        f"best_model measured again on {counted(confirmed.num_questions, 'validation question')} that did not"
        f" select it: {percent(confirmed.accuracy, confirmed.interval)}"
    )
