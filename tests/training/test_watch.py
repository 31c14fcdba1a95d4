"""Signs of collapse: when each is told, how often, and the way back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from training.scripted import play

from emailrl.training.report import Alarm, watch, way_back
from emailrl.training.state import RunState

Number = Callable[[int], float | None]


def run(steps: int, *, kl_target: float | None = None, **numbers: Number) -> list[tuple[int, Alarm]]:
    """The alarms of a run whose metrics are healthy but for ``numbers``, functions of the step, with their steps."""
    healthy: dict[str, Number] = {
        "accuracy": lambda step: 0.5,
        "unanswered": lambda step: 0.3,
        "entropy": lambda step: 0.05,
        "kl": lambda step: 0.02,
        "answer_words": lambda step: 8.0,
        "answer_candidates": lambda step: 1.2,
    }
    state, alarms = RunState(), []
    for step in range(1, steps + 1):
        state.step = step
        alarms += [
            (step, alarm)
            for alarm in watch(state, {name: of(step) for name, of in (healthy | numbers).items()}, kl_target)
        ]
        state = RunState.from_dict(json.loads(json.dumps(asdict(state))))  # as a resume would take it up
    return alarms


def only(alarms: list[tuple[int, Alarm]]) -> tuple[int, Alarm]:
    (one,) = alarms
    return one


def test_a_healthy_run_is_never_warned_of() -> None:
    assert run(60) == []
    assert run(60, accuracy=lambda step: None, entropy=lambda step: None, kl=lambda step: None) == []


def test_no_answer_is_told_once_nine_rollouts_in_ten_give_none_for_five_steps_on_average() -> None:
    # 0.3 up to step 10, then 1: means of five are 0.58 at step 12, 0.72 at 13, 0.86 at 14 and 1 at 15.
    step, alarm = only(run(40, unanswered=lambda step: 0.3 if step <= 10 else 1.0))
    assert (step, alarm.good_step) == (15, 8)  # 0.58 / 0.9 is below 0.75, so all before its five steps is good
    assert "100% of rollouts" in alarm.warning and "REWARD_NO_ANSWER" in alarm.warning
    assert run(40, unanswered=lambda step: 0.89) == []


def test_a_sign_is_told_again_only_after_it_has_passed() -> None:
    wavering = run(40, unanswered=lambda step: 0.95 if step % 10 < 5 else 0.8)
    assert len(wavering) == 1  # between 0.8 and 0.95: never below 0.75 · 0.9
    twice = run(40, unanswered=lambda step: 0.2 if 10 < step <= 20 else 1.0)
    assert [step for step, _ in twice] == [5, 25]


def test_entropy_near_zero_and_a_runaway_kl_are_told() -> None:
    step, alarm = only(run(30, entropy=lambda step: 0.05 if step <= 10 else 0.001))
    assert step == 15 and "0.0010 nats" in alarm.warning and "ENTROPY_COEF" in alarm.warning
    step, alarm = only(run(30, entropy=lambda step: None if step % 2 else 0.001))  # steps without an update have none
    assert step == 10
    step, alarm = only(run(30, kl=lambda step: 0.1 * step))
    assert step == 12  # the mean of steps 8 to 12 is 1.0
    assert "above 1:" in alarm.warning and "BETA" in alarm.warning
    assert only(run(30, kl=lambda step: 0.1 * step, kl_target=0.1))[0] == 7  # 5 · 0.1, of steps 3 to 7


@pytest.mark.parametrize(
    ("name", "before", "after", "alarms"),
    [
        ("answer_words", 8.0, 13.0, 1),  # + 5, times 1.6
        ("answer_words", 8.0, 12.5, 0),  # + 4.5
        ("answer_words", 20.0, 29.0, 0),  # times 1.45
        ("answer_candidates", 1.0, 1.5, 1),
        ("answer_candidates", 1.0, 1.4, 0),
        ("answer_candidates", 2.0, 2.6, 0),  # times 1.3
    ],
)
def test_answers_that_grow_while_accuracy_does_not_rise(name: str, before: float, after: float, alarms: int) -> None:
    grown: Any = {name: lambda step: before if step <= 10 else after}
    assert [step for step, _ in run(30, **grown)] == [20] * alarms
    assert run(30, **grown, accuracy=lambda step: 0.5 if step <= 10 else 0.6) == []


def test_by_default_a_run_warns_once_and_goes_on(tmp_path: Path) -> None:
    played = play(tmp_path, steps=12, accuracies=(0.5,) * 9, entropy=lambda step: 0.1 if step <= 4 else 0.0, patience=9)
    warnings = [line for line in played.said if line.startswith("Warning")]
    assert len(warnings) == 1 and warnings[0].startswith("Warning at step 9: the policy's entropy is 0.0000 nats")
    assert warnings[0].endswith(f"emailrl train --resume {tmp_path}/checkpoint-4 --overwrite")
    assert len(played.metrics) == 12 and "Done after step 12" in played.said[-2]


def test_with_stop_it_ends_with_its_state_saved_and_names_the_last_checkpoint_from_before(tmp_path: Path) -> None:
    played = play(
        tmp_path, steps=30, accuracies=(0.5,) * 20, entropy=lambda step: 0.1 if step <= 4 else 0.0, patience=20,
        on_collapse="stop",
    )  # fmt: skip
    assert [line["step"] for line in played.metrics] == list(range(1, 10))
    assert played.saved == {"best_model": 0, "checkpoint-4": 4, "checkpoint-6": 6, "checkpoint-8": 8, "final": 9}
    assert played.said[-2] == "Stopped after step 9, which is saved; the same command with --resume latest continues."
    assert played.said[-1].startswith(
        "error: Stopped at step 9 on signs of collapse (ON_COLLAPSE=stop). Make that change and return to step 4"
    )


def test_with_stop_a_run_at_its_end_is_done(tmp_path: Path) -> None:
    played = play(tmp_path, steps=5, accuracies=(0.5,) * 9, entropy=lambda step: 0.0, patience=9, on_collapse="stop")
    assert any(line.startswith("Warning at step 5") for line in played.said)
    assert "Done after step 5" in played.said[-2]


def test_where_no_checkpoint_from_before_is_left_it_names_the_best_or_says_so(tmp_path: Path) -> None:
    assert way_back(tmp_path, 5) == "No earlier checkpoint is left: make that change and start a new run."
    play(tmp_path, steps=2, accuracies=(0.25, 0.5), eval_steps=2)
    assert way_back(tmp_path, 2).startswith(
        "Make that change and return to step 2 (before this): emailrl train --resume "
    )
    for good in (1, None):  # step 1 was never saved, and best_model is that of step 2
        assert way_back(tmp_path, good) == (
            "Make that change and return to step 2 (the best; no earlier one is left):"
            f" emailrl train --resume {tmp_path}/best_model --overwrite"
        )
