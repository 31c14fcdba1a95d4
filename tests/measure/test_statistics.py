"""Intervals clustered by question, the majority and the exact paired test, on numbers worked out by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from emailrl.measure.evaluation import (
    clustered_interval,
    majority,
    paired_test,
    sign_flip_p_value,
    wilson_interval,
)


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
    ],
)
def test_an_interval_of_several_samples_counts_the_questions(
    shares: list[Fraction], num_samples: int, successes: float, total: float
) -> None:
    found = clustered_interval([Fraction(share) for share in shares], num_samples)
    assert found == pytest.approx(wilson_interval(successes, total), abs=1e-12)


def test_the_interval_of_nothing_is_everything() -> None:
    assert clustered_interval([], 0) == (0.0, 1.0)


def test_the_majority_is_the_most_frequent_answer_and_of_equals_the_earliest() -> None:
    assert majority(["b", "a", "c", "a"]) == 1
    assert majority(["b", "a", "a", "b"]) == 0
    assert majority(["x"]) == 0


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
    found = paired_test([(str(inbox), each) for inbox, differences in enumerate(by_inbox) for each in differences])
    assert found == (pytest.approx(p_value, abs=1e-12), unit)
