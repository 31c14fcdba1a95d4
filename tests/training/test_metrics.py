"""What a step's metrics and records hold."""

from __future__ import annotations

import math
from typing import Any

import pytest

from emailrl.records.trajectory import Scenario, StopReason, Trajectory, TrajectoryGroup
from emailrl.training.batch import TrainingSample
from emailrl.training.report import rollout_metrics, training_records
from emailrl.training.state import Collected
from emailrl.training.update import TokenNumbers

MASK = [0, 1, 0, 1]
SCENARIO = Scenario("q", "When?", "Monday", ["m"], "a@example.com", "2001-01-01")


def sample(trajectory: str) -> TrainingSample:
    return TrainingSample(trajectory, "g", [7] * 4, MASK, [-1.0] * 4)


def numbers(*advantages: float) -> TokenNumbers:
    return TokenNumbers([0.0] * 4, [0.0] * 4, list(advantages))


def test_lists_are_as_long_as_the_tokens_and_null_where_nothing_is_trained() -> None:
    given = TokenNumbers([0.0, -1.0, 0.0, -2.0], [0.0, -1.5, 0.0, 998.0], [0.0, 0.3, 0.0, 0.1])
    assert records([sample("t")], [given])["t"]["samples"] == [
        {
            "loss_mask": MASK,
            "old_logprobs": [None, -1.0, None, -2.0],
            "ratio": [None, pytest.approx(math.exp(-0.5)), None, pytest.approx(math.exp(20))],  # bounded as in the loss
            "advantages": [None, 0.3, None, 0.1],
        }
    ]


def records(samples: list[TrainingSample], tokens: list[TokenNumbers], **fields: Any) -> dict[str, dict[str, Any]]:
    members = [Trajectory(name, "g", SCENARIO, **fields) for name in ("s", "t")]
    collected = Collected(groups=[TrajectoryGroup("g", SCENARIO, members)])
    return {record["id"]: record for record in training_records(collected, samples, tokens, mask_truncated=True)}


def test_every_way_to_end_without_an_answer_counts() -> None:
    ends = [*StopReason, StopReason.ANSWERED]  # the last says "I don't know"; one raised, and is in no mean
    members = [Trajectory(f"t{number}", "g", SCENARIO, stop_reason=reason) for number, reason in enumerate(ends)]
    members[-1].rubric = {"returned_i_dont_know": True}
    members[ends.index(StopReason.EXCEPTION)].exception = "OSError: gone"
    collected = Collected(groups=[TrajectoryGroup("g", SCENARIO, members)])
    assert rollout_metrics(collected, 0)["unanswered"] == pytest.approx(6 / 8)


def test_an_advantage_is_the_trajectorys_where_all_its_tokens_share_it_and_else_the_tokens() -> None:
    samples = [sample("s"), sample("t"), sample("s"), sample("t")]
    given = [numbers(0, 1.5, 0, 1.5), numbers(0, -1, 0, -1), numbers(0, 1.5, 0, 1.5), numbers(0, -1, 0, 2)]
    found = records(samples, given)
    assert (found["s"]["advantage"], found["t"]["advantage"]) == (1.5, None)
    assert not any("advantages" in one for one in found["s"]["samples"]) and len(found["s"]["samples"]) == 2
    assert [one["advantages"] for one in found["t"]["samples"]] == [[None, -1, None, -1], [None, -1, None, 2]]


def test_a_trajectory_that_was_not_trained_has_no_advantage_and_says_why() -> None:
    found = records([sample("s")], [numbers(0, 1, 0, 1)], stop_reason=StopReason.TRUNCATED)
    assert found["t"] == {"id": "t", "group_id": "g", "advantage": None, "dropped": "truncated", "samples": []}
    assert records([], [], exception="OSError: gone")["s"]["dropped"] == "exception"
