"""The order of the questions, the end of a run, and early stopping."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs.run_files import evaluation

from emailrl.measure.evaluation import wilson_interval
from emailrl.records.trajectory import Scenario
from emailrl.settings import EvaluationSettings, TrainingSettings, load_settings
from emailrl.settings.load import PRESETS
from emailrl.training.algorithms import count_steps, questions_per_step
from emailrl.training.state import Cursor, RunState, StepQuestions, change, no_longer_rising

SCENARIOS = [Scenario(str(n), "?", "!", [], "a@x", "2001-01-01") for n in range(5)]


def walk(batches: int, count: int, seed: int = 1, cursor: Cursor | None = None) -> tuple[list[list[str]], Cursor]:
    taken, cursor = [], cursor or Cursor()
    for _ in range(batches):
        step = StepQuestions(SCENARIOS, cursor, seed, epochs=None)
        taken.append([question.id for question in step.take(count)])
        cursor = step.cursor
    return taken, cursor


def test_an_epoch_takes_each_question_once_and_its_last_batch_may_be_shorter() -> None:
    batches, cursor = walk(6, 2)
    assert [len(batch) for batch in batches] == [2, 2, 1, 2, 2, 1]
    first, second = (list(chain(*epoch)) for epoch in (batches[:3], batches[3:]))
    assert sorted(first) == sorted(second) == list("01234") and first != second
    assert cursor == Cursor(epoch=2, position=0)
    batches, cursor = walk(2, 9)  # more than there are
    assert [sorted(batch) for batch in batches] == [list("01234")] * 2 and cursor == Cursor(epoch=2)


def test_the_order_depends_on_the_seed_alone_and_goes_on_from_a_saved_cursor() -> None:
    whole, _ = walk(7, 2)
    first, cursor = walk(4, 2)
    state = RunState(step=4, cursor=cursor)
    restored = RunState.from_dict(json.loads(json.dumps(asdict(state))))
    rest, _ = walk(3, 2, cursor=restored.cursor)
    assert first + rest == whole
    assert walk(3, 2, seed=2)[0] != whole[:3]


def take(counts: list[int], cursor: Cursor | None = None, epochs: int | None = None) -> tuple[list[list[str]], Cursor]:
    """The rounds of one step."""
    step = StepQuestions(SCENARIOS, cursor or Cursor(), 1, epochs=epochs)
    return [[question.id for question in step.take(count)] for count in counts], step.cursor


def test_a_step_that_crosses_into_the_next_epoch_meets_no_question_twice_and_none_is_lost() -> None:
    (first, second), _ = walk(2, 5)
    rounds, cursor = take([2, 2, 1], Cursor(0, 3))
    met = first[3:]
    others = [name for name in second if name not in met]
    assert rounds == [met, others[:2], others[2:]] and cursor == Cursor(1, 3, last=tuple(met))
    # The epoch's rest are the two that were met before, in its own order; then the next one is as it always was.
    restored = RunState.from_dict(json.loads(json.dumps(asdict(RunState(cursor=cursor))))).cursor
    assert restored == cursor
    rest, behind = walk(1, 9, cursor=restored)
    assert rest == [[name for name in second if name in met]] and behind == Cursor(2)


def test_a_step_ends_where_it_has_met_every_question_or_no_epoch_follows() -> None:
    (first,), _ = walk(1, 5)
    rounds, cursor = take([2, 1, 1])
    assert list(chain(*rounds)) == first[:4] and cursor == Cursor(0, 4)
    rounds, cursor = take([3, 3, 3, 3])
    assert [len(one) for one in rounds] == [3, 2, 0, 0] and cursor.epoch == 1 and cursor.position == 0
    rounds, cursor = take([2, 2], Cursor(1, 3), epochs=2)
    assert [len(one) for one in rounds] == [2, 0] and cursor == Cursor(2)


def test_a_run_bound_by_epochs_ends_when_a_refill_has_passed_them() -> None:
    wanted = EvaluationSettings()
    state = RunState(step=3, cursor=Cursor(1, 4))
    assert state.stop_reason(wanted, 9, 2) is None and not state.is_last(9, 2)
    state.end_step(Cursor(2), 0.0)
    assert state.stop_reason(wanted, 9, 2) == "all epochs done" and state.is_last(9, 2)
    assert state.stop_reason(wanted, 9) is None
    assert state.stop_reason(wanted, 4, 2) == "all steps done"


@pytest.mark.parametrize(
    ("questions", "per_step", "max_steps", "epochs", "steps"),
    [(10, 2, 200, 2, 10), (10, 2, 7, 2, 7), (10, 4, 200, 2, 6), (10, 2, 200, None, 200), (3, 8, 200, 2, 2)],
)
def test_steps_of_a_run(questions: int, per_step: int, max_steps: int, epochs: int | None, steps: int) -> None:
    assert count_steps(questions, per_step, max_steps, epochs) == steps
    assert questions_per_step(TrainingSettings(per_device_train_batch_size=4, gradient_accumulation_steps=3)) == 12


def evaluated(*accuracies: float, patience: int = 2) -> RunState:
    state = RunState()
    for step, accuracy in enumerate(accuracies):
        state.step = step
        state.note_evaluation(evaluation(round(10 * accuracy), 10), patience)
    return state


def test_the_best_is_the_first_of_equals_and_step_0_counts() -> None:
    assert [evaluated(0.4).note_evaluation(evaluation(n, 10), 2) for n in (3, 4, 5)] == [False, False, True]
    state = evaluated(0.4, 0.2, 0.4)
    assert (state.best_accuracy, state.best_step, state.evaluations_without_better) == (0.4, 0, 2)
    state = evaluated(0.0, 0.5, 0.4)
    assert (state.best_accuracy, state.best_step, state.evaluations_without_better) == (0.5, 1, 1)
    assert state.best_interval == wilson_interval(5, 10)


@pytest.mark.parametrize(
    ("accuracies", "reason"),
    [
        # Patience is 2: the last two evaluations are compared with the two before them.
        ((0.5, 0.4, 0.4), None),
        ((0.5, 0.5, 0.5, 0.5), "no better accuracy in 2 evaluations (+0.0 points, 95% interval +0.0 to +0.0)"),
        # Five of ten questions are lost: mean -0.5, s = 0.527, ± 1.96 · 0.527 / √10 = 0.327.
        ((0.7, 0.7, 0.2, 0.2), "no better accuracy in 2 evaluations (-50.0 points, 95% interval -82.7 to -17.3)"),
        # One is lost: -0.1 ± 0.196 reaches above 0.
        ((0.5, 0.5, 0.4, 0.4), None),
        ((0.5, 0.4, 0.6, 0.6), None),
        ((0.2, 0.6, 0.5, 0.6), None),
        ((0.8,), "target accuracy 80.0% reached"),
        ((0.7,), None),
        ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), "all steps done"),
    ],
)
def test_early_stopping(accuracies: tuple[float, ...], reason: str | None) -> None:
    wanted = EvaluationSettings(target_accuracy=0.8, patience=2)
    assert evaluated(*accuracies).stop_reason(wanted, total_steps=5) == reason


def test_the_moving_accuracy_is_over_the_last_ten_steps() -> None:
    state = RunState()
    assert (state.moving_accuracy, state.step, state.evaluations_without_better, state.steps_without_update) == (0,) * 4
    for step in range(12):
        state.end_step(Cursor(), accuracy=float(step >= 11))
    assert state.moving_accuracy == pytest.approx(0.1) and state.step == 12


def verdicts(text: str) -> dict[str, bool]:
    """``"110"``: the questions a and b right, c wrong; a dot is a question that was not judged."""
    return {name: mark == "1" for name, mark in zip("abcdefgh", text, strict=False) if mark != "."}


def test_a_change_is_paired_by_question() -> None:
    # Shares before: 1, 1/2, 0, 1; after: 1, 1, 1/2, 1. Differences 0, 1/2, 1/2, 0: mean 1/4, s = √(4 · 1/16 / 3).
    found = change([verdicts("1101"), verdicts("1001")], [verdicts("1101"), verdicts("1111")])
    assert found is not None
    assert (found.mean, found.error) == pytest.approx((0.25, math.sqrt(1 / 12) / 2))
    assert str(found) == "+25.0 points, 95% interval -3.3 to +53.3"
    found = change([verdicts("11.0")], [verdicts("1.10")])  # a and d are judged in both, and did not change
    assert found is not None and (found.mean, found.error) == (0.0, 0.0)
    assert change([verdicts("1.")], [verdicts("11")]) is None


def test_patience_looks_back_twice_as_far_as_it_waits() -> None:
    worse = [verdicts("1111")] * 2 + [verdicts("0000")] * 2
    assert no_longer_rising(worse[1:], 2) is None
    found = no_longer_rising(worse, 2)
    assert found is not None and found.mean == -1
    assert no_longer_rising(worse[::-1], 2) is None
    assert no_longer_rising([verdicts("1010")] * 4, 2) is not None  # nothing at all has changed
    assert no_longer_rising([verdicts("0000")] * 2 + [verdicts("1111")] * 4, 2) is not None  # what was before is over
    mixed = [verdicts("1110")] * 2 + [verdicts("1101")] * 2  # one question lost, one won
    assert no_longer_rising(mixed, 2) is None
    # A fall is three standard errors. Eight questions, all right before, three or five wrong after: -3/8 ± 0.18 and
    # -5/8 ± 0.18.
    assert no_longer_rising([verdicts("11111111"), verdicts("00011111")], 1) is None
    assert no_longer_rising([verdicts("11111111"), verdicts("00000111")], 1) is not None


def share_stopped(preset: str, accuracy_at: Callable[[float], float], runs: int = 40) -> float:
    """The share of runs of this preset that patience ends; their true accuracy depends on the share of steps done.
    Equally hard questions and independent verdicts: the most noise there can be."""
    settings, draw, stopped = load_settings({}, preset=preset, environ={}, cwd=Path("/")), random.Random(1), 0
    wanted = settings.evaluation.model_copy(update={"target_accuracy": 2.0})  # out of reach, even by luck
    questions, total = settings.data.eval_dataset_size, settings.training.max_steps
    for _ in range(runs):
        state = RunState()
        for state.step in range(0, total, wanted.eval_steps):
            shares = {str(n): float(draw.random() < accuracy_at(state.step / total)) for n in range(questions)}
            accuracy = sum(shares.values()) / questions
            measured: Any = SimpleNamespace(shares=shares, accuracy=accuracy, interval=(0.0, 1.0), metrics=dict)
            state.note_evaluation(measured, wanted.patience)
            if state.stop_reason(wanted, total) is not None:
                stopped += 1
                break
    return stopped / runs


@pytest.mark.parametrize("preset", PRESETS)
def test_a_fall_ends_a_run_of_every_preset_and_a_rise_does_not(preset: str) -> None:
    fall = share_stopped(preset, lambda done: 0.8 if done < 0.3 else 0.5)
    assert 0.25 < fall < 0.75 if preset == "quick" else fall >= 0.95  # five questions show no more
    assert share_stopped(preset, lambda done: 0.8) <= 0.125
    assert share_stopped(preset, lambda done: 0.4 + 0.5 * done) <= 0.05
