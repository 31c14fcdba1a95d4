"""What a long completion costs: literal numbers along the ramp."""

from __future__ import annotations

from typing import Any

import pytest

from emailrl.base.errors import UsageError
from emailrl.records.trajectory import Scenario, TokenSample, Trajectory, Turn
from emailrl.rewards.scorer import OfflineMatcher, OverlongScorer, Scorer

SCENARIO = Scenario("q", "When?", "Monday", ["m"], "a@example.com", "2001-01-01")


def played(*lengths: int, **fields: Any) -> Trajectory:
    """A trajectory of completions of these lengths, each followed by a tool result of 1000 tokens."""
    tokens = TokenSample([], [], [])
    turns = []
    for length in lengths:
        turns.append(Turn([7] * length, [-0.5] * length, "stop"))
        tokens.append_sampled([7] * length, [-0.5] * length)
        tokens.append_prompt([8] * 1000)
    return Trajectory("t", "g", SCENARIO, turns=turns, samples=[tokens], **fields)


def scorer(penalty: float = 1.0, buffer: int = 20, terms: dict[str, float] | None = None) -> OverlongScorer:
    given = {"outcome": 0.75} if terms is None else terms
    return OverlongScorer(Scorer(OfflineMatcher(), lambda trajectory: given), 100, buffer, penalty)


@pytest.mark.parametrize(
    ("lengths", "penalty", "charge"),
    [
        ([80], 1.0, 0.0),  # the ramp begins behind max_tokens - buffer
        ([81], 1.0, 0.05),
        ([90], 1.0, 0.5),
        ([90], 0.4, 0.2),
        ([100], 1.0, 1.0),
        ([79, 60, 70], 1.0, 0.0),  # 209 tokens in all, and 3000 of tool results: no completion comes near the limit
        ([30, 95, 85], 1.0, 0.75),  # the longest alone
        ([], 1.0, 0.0),
    ],
)
def test_the_longest_completion_is_charged_along_the_buffer(lengths: list[int], penalty: float, charge: float) -> None:
    assert scorer(penalty).charge(played(*lengths)) == pytest.approx(charge, abs=1e-12)


def test_the_charge_is_a_term_and_the_terms_add_up() -> None:
    trajectory = played(95)
    scorer().score([trajectory])
    assert trajectory.reward_terms == {"outcome": 0.75, "overlong": -0.75}
    assert trajectory.reward == 0.0 == sum(trajectory.reward_terms.values())


def test_a_reward_that_has_such_a_term_keeps_it() -> None:
    trajectory = played(95)
    scorer(terms={"overlong": 0.5}).score([trajectory])
    assert trajectory.reward_terms == {"overlong": -0.25} and trajectory.reward == -0.25


def test_what_raised_is_not_charged() -> None:
    trajectory = played(100, exception="OSError: gone")
    scorer().score([trajectory])
    assert (trajectory.reward, trajectory.reward_terms) == (0.0, {})


@pytest.mark.parametrize("buffer", [101, 0, -1])
def test_a_buffer_that_does_not_fit_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(UsageError, match=f"OVERLONG_BUFFER={buffer} does not fit into MAX_TOKENS=100"):
        scorer(buffer=buffer)


def test_the_narrowest_and_the_widest_buffer() -> None:
    assert [scorer(buffer=1).charge(played(length)) for length in (99, 100)] == [0.0, 1.0]
    assert scorer(buffer=100).charge(played(1)) == 0.01
    assert scorer(buffer=100).charge(played()) == 0.0


def test_a_scorer_stays_as_it_was_made() -> None:
    with pytest.raises(AttributeError):
        scorer().penalty = 2.0  # type: ignore[misc]
