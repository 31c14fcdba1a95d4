"""Patience by evidence: paired changes worked out by hand, and how often simulated runs are stopped."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from emailrl.settings import load_settings
from emailrl.settings.presets import PRESETS
from emailrl.training.state import RunState, change, no_longer_rising


def verdicts(text: str) -> dict[str, bool]:
    """``"110"``: the questions a and b right, c wrong; a dot is a question that was not judged."""
    return {name: mark == "1" for name, mark in zip("abcdefgh", text, strict=False) if mark != "."}


def test_a_change_is_paired_by_question() -> None:
    # Shares before: 1, 1/2, 0, 1; after: 1, 1, 1/2, 1. Differences 0, 1/2, 1/2, 0: mean 1/4, s = √(4 · 1/16 / 3).
    found = change([verdicts("1101"), verdicts("1001")], [verdicts("1101"), verdicts("1111")])
    assert found is not None
    assert (found.mean, found.error) == pytest.approx((0.25, math.sqrt(1 / 12) / 2))
    assert str(found) == "+25.0 points, 95% interval -3.3 to +53.3"


def test_questions_that_stand_on_one_side_only_count_on_none() -> None:
    found = change([verdicts("11.0")], [verdicts("1.10")])  # a and d are judged in both, and did not change
    assert found is not None and (found.mean, found.error) == (0.0, 0.0)
    assert change([verdicts("1.")], [verdicts("11")]) is None
    assert change([verdicts("1")], []) is None


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


def test_a_fall_is_three_standard_errors() -> None:
    # Eight questions, all right before, three or five wrong after: -3/8 ± 0.18 and -5/8 ± 0.18.
    assert no_longer_rising([verdicts("11111111"), verdicts("00011111")], 1) is None
    assert no_longer_rising([verdicts("11111111"), verdicts("00000111")], 1) is not None


def is_stopped(preset: str, accuracy_at: Callable[[float], float], draw: random.Random) -> bool:
    """Whether patience ends a run of this preset before its end; its true accuracy depends on the share of it done."""
    settings = load_settings({}, preset=preset, environ={}, cwd=Path("/"))
    evaluation = settings.evaluation.model_copy(update={"target_accuracy": 2.0})  # out of reach, even by luck
    state, total = RunState(), settings.training.max_steps
    for state.step in range(0, total, evaluation.eval_steps):
        accuracy = accuracy_at(state.step / total)
        shares = {str(n): float(draw.random() < accuracy) for n in range(settings.data.eval_dataset_size)}
        measured: Any = SimpleNamespace(
            shares=shares, accuracy=statistics.fmean(shares.values()), interval=(0.0, 1.0), metrics=dict
        )
        state.note_evaluation(measured, evaluation.patience)
        if state.stop_reason(evaluation, total) is not None:
            return True
    return False


@pytest.mark.parametrize("preset", PRESETS)
def test_a_fall_ends_a_run_of_every_preset_and_a_rise_does_not(preset: str) -> None:
    """Equally hard questions and independent verdicts: the most noise there can be."""
    draw, runs = random.Random(1), 40

    def share(accuracy_at: Callable[[float], float]) -> float:
        return sum(is_stopped(preset, accuracy_at, draw) for _ in range(runs)) / runs

    for begins in (0.3, 0.6):
        fall = share(lambda done, begins=begins: 0.8 if done < begins else 0.5)
        assert 0.25 < fall < 0.75 if preset == "quick" else fall >= 0.95  # five questions show no more
    assert share(lambda done: 0.8) <= 0.125
    assert share(lambda done: 0.4 + 0.5 * done) <= 0.05
