"""Patience by evidence: paired changes worked out by hand, and how often simulated runs are stopped."""

from __future__ import annotations

import math
import random

import pytest

from emailrl.training.run.stopping import change, no_longer_rising

PATIENCE = 5


def verdicts(text: str) -> dict[str, bool]:
    """``"110"``: the questions a and b right, c wrong; a dot is a question that was not judged."""
    return {name: mark == "1" for name, mark in zip("abcdefgh", text, strict=False) if mark != "."}


def test_a_change_is_paired_by_question() -> None:
    # Shares before: 1, 1/2, 0, 1; after: 1, 1, 1/2, 1. Differences 0, 1/2, 1/2, 0: mean 1/4, s = √(4 · 1/16 / 3).
    found = change([verdicts("1101"), verdicts("1001")], [verdicts("1101"), verdicts("1111")])
    half = 1.959963984540054 * math.sqrt(1 / 12) / 2
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25 - half, 0.25 + half))
    assert str(found) == "+25.0 points, 95% interval -3.3 to +53.3"


def test_questions_that_stand_on_one_side_only_count_on_none() -> None:
    found = change([verdicts("11.0")], [verdicts("1.10")])  # a and d are judged in both, and did not change
    assert found is not None and (found.mean, found.low, found.high) == (0.0, 0.0, 0.0)
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


def stops(accuracies: list[float], questions: int, runs: int) -> float:
    """The share of runs that are stopped whose true accuracies these are; questions differ in how hard they are."""
    draw = random.Random(1)
    stopped = 0
    for _ in range(runs):
        hardness = [draw.gauss(0, 1.5) for _ in range(questions)]
        seen: list[dict[str, bool]] = []
        best, waited = -1.0, 0
        for accuracy in accuracies:
            skill = 1.4 * math.log(accuracy / (1 - accuracy))
            seen.append({str(n): draw.random() < 1 / (1 + math.exp(-skill - h)) for n, h in enumerate(hardness)})
            measured = sum(seen[-1].values()) / questions
            waited = 0 if measured > best else waited + 1
            best = max(best, measured)
            if waited >= PATIENCE and no_longer_rising(seen, PATIENCE):
                stopped += 1
                break
    return stopped / runs


def test_a_rising_run_of_the_preset_small_is_seldom_stopped_and_a_collapse_is() -> None:
    """20 questions, every 5 of 200 steps: without evidence nearly every rising run was stopped."""
    rising = [0.4 + 0.5 * n / 40 for n in range(41)]
    assert stops(rising, 20, 400) <= 0.07
    assert stops(rising, 100, 100) == 0
    collapse = [0.7] * 12 + [0.2] * 29
    assert stops(collapse, 20, 100) >= 0.95
