"""Accuracy, its interval and the means, on numbers worked out by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest

from emailrl.base.errors import UsageError
from emailrl.measure.evaluation import (
    Evaluation,
    check_samples,
    clustered_interval,
    paired_test,
    sign_flip_p_value,
    verdict,
    wilson_interval,
)
from emailrl.records.trajectory import Scenario, StopReason, TokenSample, Trajectory


def scenario(name: str) -> Scenario:
    return Scenario(name, "?", "!", [], "a@x", "2001-01-01")


def trajectory(name: str, correct: bool | None, reward: float, **fields: Any) -> Trajectory:
    rubric = {"answer_correct": correct, "num_turns": 2 if correct else 4, "note": "text"} | fields.pop("rubric", {})
    return Trajectory(name, name, scenario(name), reward=reward, rubric=rubric, **fields)


def test_an_answer_without_a_verdict_is_told_from_a_rollout_that_raised() -> None:
    result = Evaluation(
        [
            trajectory("a", True, 1.2, stop_reason=StopReason.ANSWERED),
            trajectory("b", None, 0.0, stop_reason=StopReason.ANSWERED, exception="JudgeError: no judge"),
            trajectory("c", False, 0.0, stop_reason=StopReason.EXCEPTION, exception="OSError: gone"),
            trajectory("d", True, 0.0, stop_reason=StopReason.ANSWERED, exception="EmailRLError: no reward"),
        ]
    )
    assert (result.num_questions, result.num_judged, result.unjudged, result.exceptions) == (4, 3, 1, 3)
    assert result.num_correct == 2 and result.accuracy == 2 / 3 and result.reward == 1.2
    assert result.interval == wilson_interval(2, 3)
    assert list(map(verdict, result.trajectories)) == ["correct", "not judged", "crashed", "correct"]


@pytest.mark.parametrize(("unjudged", "is_void"), [(0, False), (1, False), (2, True)])
def test_one_verdict_in_twenty_may_be_missing(unjudged: int, is_void: bool) -> None:
    missing = [trajectory("x", None, 0.0, exception="JudgeError: gone")] * unjudged
    result = Evaluation([trajectory("a", True, 1.0)] * (20 - unjudged) + missing)
    assert result.accuracy == 1.0 and result.is_void is is_void


def test_an_exception_counts_as_wrong_and_enters_no_mean() -> None:
    result = Evaluation(
        [
            trajectory("a", True, 1.2, seconds=1.0, samples=[TokenSample([1] * 10, [0] * 10, [None] * 10)]),
            trajectory("b", False, -0.8, seconds=3.0, samples=[TokenSample([1] * 4, [0] * 4, [None] * 4)] * 2),
            trajectory("c", True, 9.0, seconds=90.0, exception="OSError: gone", stop_reason=StopReason.EXCEPTION),
            trajectory("d", False, 0.2, seconds=2.0, rubric={"prompt_tokens": 20, "completion_tokens": 4}),
        ],
        step=30,
    )
    assert result.metrics() == pytest.approx(
        {
            "accuracy": 0.25,
            "accuracy_low": 0.0455872,
            "accuracy_high": 0.6993582,
            "latency_seconds": 2.0,
            "tokens": 14.0,  # (10 + 8 + 24) / 3
            "reward": 0.2,
            "num_questions": 4,
            "unjudged": 0,
            "exceptions": 1,
            "judge_compared": 0,
            "only_judge_right": 0,
            "only_offline_right": 0,
            "answer_correct": 1 / 3,
            "num_turns": 10 / 3,
            "prompt_tokens": 20.0,
            "completion_tokens": 4.0,
        },
        abs=1e-6,
    )
    assert result.step == 30 and result.interval == wilson_interval(1, 4)


def test_when_every_question_raised_there_is_an_accuracy_but_no_mean() -> None:
    result = Evaluation([trajectory("a", True, 1.0, exception="OSError: gone", stop_reason=StopReason.EXCEPTION)])
    assert result.accuracy == 0.0 and result.reward is None and result.tokens is None


def sample(name: str, correct: bool | None, answer: str | None) -> Trajectory:
    return trajectory(name, correct, 1.0 if correct else 0.0, final_answer=answer)


def test_several_samples_of_a_question() -> None:
    result = Evaluation(
        [
            *(sample("a", right, text) for right, text in ((True, "June 3"), (False, "May"), (True, "june 3."))),
            *(sample("b", right, text) for right, text in ((True, "12"), (False, "13"), (False, "13"))),
            *(sample("c", right, text) for right, text in ((False, None), (False, None), (True, "Ada"))),
            *(sample("d", right, text) for right, text in ((False, "x"), (None, "y"), (False, "x"))),
        ]
    )
    assert dict(result.shares) == {"a": Fraction(2, 3), "b": Fraction(1, 3), "c": Fraction(1, 3), "d": 0}
    metrics = result.metrics()
    assert metrics["accuracy"] == pytest.approx(1 / 3) and metrics["num_questions"] == 4 and metrics["unjudged"] == 1
    assert metrics["num_samples"] == 3
    # d has no verdict on one sample; of the others all have a right one, and the majorities are right, wrong, right.
    assert (metrics["pass_at_k"], metrics["majority"]) == (1.0, pytest.approx(2 / 3))
    assert (metrics["pass_at_k_low"], metrics["pass_at_k_high"]) == wilson_interval(3, 3)
    assert (metrics["majority_low"], metrics["majority_high"]) == wilson_interval(2, 3)
    # p = 1/3 and the shares' variance (1/9 + 0 + 0 + 1/9) / 4 = 1/18: (2/9) / (1/18 / 4) = 16, more than the 11 judged.
    assert result.interval == pytest.approx(wilson_interval(11 / 3, 11), abs=1e-12)


def test_greedy_samples_are_refused() -> None:
    check_samples(1, 0.0)
    check_samples(4, 0.7)
    with pytest.raises(UsageError, match="4 greedy samples"):
        check_samples(4, 0.0)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [  # Wilson's own formula, z = 1.959964
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (5, 10, 0.236593, 0.763407),
        (96, 100, 0.901628, 0.984337),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(successes: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("right", range(11))
def test_one_sample_a_question_gives_wilsons_own_interval(right: int) -> None:
    shares = [Fraction(1)] * right + [Fraction(0)] * (10 - right)
    assert clustered_interval(shares, 10) == pytest.approx(wilson_interval(right, 10), abs=1e-12)


@pytest.mark.parametrize(
    ("shares", "num_samples", "successes", "total"),
    [
        # Alike within questions: 4 samples tell no more than 1, s² = 1/4, so (1/4) / (1/4 / 10) = 10.
        ([1] * 5 + [0] * 5, 40, 5, 10),
        # Shares 1/4 and 3/4: s² = 1/16, so (1/4) / (1/16 / 10) = 40, as if all samples were independent.
        ([Fraction(1, 4)] * 5 + [Fraction(3, 4)] * 5, 40, 20, 40),
        # Shares nearer to each other than chance puts them count no more than the samples drawn.
        ([Fraction(1, 2)] * 8 + [Fraction(1, 4), Fraction(3, 4)], 40, 20, 40),
        # Without any spread, as many as there are questions.
        ([Fraction(1)] * 10, 40, 10, 10),
        ([Fraction(1, 2)] * 10, 40, 5, 10),
        ([], 0, 0, 0),
    ],
)
def test_an_interval_of_several_samples_counts_the_questions(
    shares: list[Fraction], num_samples: int, successes: float, total: float
) -> None:
    found = clustered_interval([Fraction(share) for share in shares], num_samples)
    assert found == pytest.approx(wilson_interval(successes, total), abs=1e-12)


def test_of_equally_frequent_answers_the_earliest_counts() -> None:
    first = [sample("a", True, "12"), sample("a", False, "13")]
    assert [Evaluation(samples).metrics()["majority"] for samples in (first, first[::-1])] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("better_first", "better_second", "p_value"),
    [  # one sample a question: the exact McNemar test
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 · 1/2
        (0, 6, 0.03125),  # 2 · 1/64
        (6, 0, 0.03125),
        (1, 5, 0.21875),  # 2 · (1 + 6)/64
        (3, 3, 1.0),
        (2, 10, 0.03857421875),  # 2 · (1 + 12 + 66)/4096
    ],
)
def test_mcnemar_by_hand(better_first: int, better_second: int, p_value: float) -> None:
    assert sign_flip_p_value([1] * better_first + [-1] * better_second + [0] * 3) == pytest.approx(p_value, abs=1e-12)


def test_thousands_of_questions_stay_finite() -> None:
    assert 0 < sign_flip_p_value([1] * 4000 + [-1] * 4400) < 1e-4


@pytest.mark.parametrize("differences", [[3, -1, 2], [4, 4, -1, -2, 3, 0], [1, 1, 1, 2, -2, 5, -3]])
def test_several_samples_are_compared_by_flipping_every_sign(differences: list[int]) -> None:
    sums = [
        sum(sign * difference for sign, difference in zip(signs, differences, strict=True))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    extreme = sum(abs(total) >= abs(sum(differences)) for total in sums)
    assert sign_flip_p_value(differences) == pytest.approx(extreme / len(sums), abs=1e-12)


@pytest.mark.parametrize(
    ("by_inbox", "p_value", "unit"),
    [
        ([[1, 1]] * 6, 2 / 2**6, "inbox"),  # by question 2/2¹²
        ([[1, 1]] * 5 + [[-1, -1]], 2 * (1 + 6) / 2**6, "inbox"),
        # Sums 3, 1, 1, 1, 1, -1: 6 or more with at most one of the ones negative.
        ([[1, 1, 1, 0], [1], [1, 1, -1], [1], [0, 1], [-1]], 2 * (1 + 5) / 2**6, "inbox"),
        ([[1, -1]] * 6, 1.0, "inbox"),
        ([[1, 1]] * 5, 2 / 2**10, "question"),  # five inboxes cannot show anything
        ([[1]] * 7, 2 / 2**7, "question"),  # McNemar's
        ([], 1.0, "question"),
    ],
)
def test_questions_about_one_inbox_count_together(by_inbox: list[list[int]], p_value: float, unit: str) -> None:
    differences = [(str(inbox), each) for inbox, differences in enumerate(by_inbox) for each in differences]
    found = paired_test(differences, len(differences))
    assert (found["p_value"], found["unit"]) == (pytest.approx(p_value, abs=1e-12), unit)
    assert found["num_units"] == (len(by_inbox) if unit == "inbox" else len(differences))


@pytest.mark.parametrize(
    ("by_inbox", "samples", "low", "high"),
    [
        # Sums 2, 2, 1, 1, 0, 0 about their mean 1: s² = 4/5, so 6 ± 2.5706 √(6 · 4/5) of 12.
        ([[1, 1]] * 2 + [[1, 0]] * 2 + [[0, 0]] * 2, 1, 0.0307, 0.9693),
        ([[2, 2]] * 2 + [[2, 0]] * 2 + [[0, 0]] * 2, 2, 0.0307, 0.9693),
        # Questions: 7 and 5 of 12, s² = 12 · 7/12 · 5/12 / 11; 7 ± 2.2010 √(12 · s²) of 12.
        ([[1]] * 7 + [[0]] * 5, 1, 0.2562, 0.9105),
        ([[1, 1]] * 6, 1, None, None),  # all alike: nothing to estimate a spread from
        ([[1, 0]] * 2, 1, None, None),
    ],
)
def test_the_interval_of_a_difference_by_hand(
    by_inbox: list[list[int]], samples: int, low: float | None, high: float | None
) -> None:
    differences = [(str(inbox), each) for inbox, found in enumerate(by_inbox) for each in found]
    found = paired_test(differences, samples * len(differences))
    assert found["difference"] == sum(each for _, each in differences) / samples / len(differences)
    ends = [found["difference_low"], found["difference_high"]]
    assert ends == [None, None] if low is None else ends == pytest.approx([low, high], abs=1e-3)
