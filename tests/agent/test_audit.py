"""The audit passes what was sampled and catches every way in which it can drift."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from emailrl.agent.play import TokenDriftError, audit
from emailrl.records.trajectory import Scenario, TokenSample, Trajectory, Turn

NONE = [None, None]


@pytest.fixture
def trajectory() -> Trajectory:
    """Two turns in one sample, and a third in a sample of its own."""
    return Trajectory(
        "t1",
        "g1",
        Scenario("7", "When?", "May 20", [], "ida@corvane.test", "2002-05-10"),
        turns=[Turn([5, 6], [-0.5, -0.25], "stop"), Turn([7], [-0.125], "stop"), Turn([8, 9], [-1.0, -2.0], "length")],
        samples=[
            TokenSample([1, 2, 5, 6, 3, 7], [0, 0, 1, 1, 0, 1], [None, None, -0.5, -0.25, None, -0.125]),
            TokenSample([1, 4, 8, 9], [0, 0, 1, 1], [None, None, -1.0, -2.0]),
        ],
    )


def test_sampled_tokens_pass(trajectory: Trajectory) -> None:
    assert audit(trajectory) == 5
    trajectory.turns.append(Turn([], [], "length"))  # which has nothing to prove
    assert audit(trajectory) == 5


@pytest.mark.parametrize(
    ("part", "number", "changes", "where"),
    [
        ("samples", 0, {"token_ids": [1, 2, 6, 5, 3, 7]}, "turn 0, token 0: sampled (5, -0.5), but (6, -0.5) in the"),
        ("samples", 0, {"sampler_logprobs": [None, None, -0.5, -0.26, None, -0.125]}, "turn 0, token 1"),
        ("samples", 0, {"loss_mask": [0, 0, 1, 1, 1, 1]}, "sample 0, position 4: mask 1 with log-probability None"),
        # A token of the tool is trained; one that was sampled is not; the last one is lost; the mask is shifted.
        ("samples", 0, {"loss_mask": [0, 0, 1, 1, 1, 1], "sampler_logprobs": [*NONE, -0.5, -0.25, -1, -0.125]},
         "turn 1"),
        ("samples", 0, {"loss_mask": [0, 0, 0, 1, 0, 1], "sampler_logprobs": [*NONE, None, -0.25, None, -0.125]},
         "turn 0"),
        ("samples", 1, {"token_ids": [1, 4, 8], "loss_mask": [0, 0, 1], "sampler_logprobs": [*NONE, -1.0]},
         "turn 2, token 1: sampled but not in the sample"),
        ("samples", 0, {"loss_mask": [0, 0, 0, 1, 1, 1]}, "sample 0, position 2: mask 0 with log-probability -0.5"),
        ("samples", 0, {"loss_mask": [0, 1, 1, 0, 0, 1], "sampler_logprobs": [None, -0.5, -0.25, *NONE, -0.125]},
         "turn 0"),
        # The tool's result is lost.
        ("samples", 0, {"token_ids": [1, 2, 5, 6, 7], "loss_mask": [0, 0, 1, 1, 1],
                        "sampler_logprobs": [*NONE, -0.5, -0.25, -0.125]}, "turn 1: no prompt precedes"),
        ("samples", 0, {"loss_mask": [0, 0, 1, 1, 0]}, "sample 0: ids, mask and log-probabilities differ in length"),
        ("turns", 0, {"logprobs": [-0.5]}, "turn 0: ids and log-probabilities differ in number"),
        ("samples", 1, {"sampler_logprobs": [*NONE, 1.0, -2.0]}, "sample 1, position 2: log-probability 1.0"),
        ("samples", 1, {"sampler_logprobs": [*NONE, math.nan, -2.0]}, "sample 1, position 2: log-probability nan"),
    ],
)  # fmt: skip
def test_every_drift_is_caught(
    trajectory: Trajectory, part: str, number: int, changes: dict[str, Any], where: str
) -> None:
    for name, value in changes.items():
        setattr(getattr(trajectory, part)[number], name, value)
    with pytest.raises(TokenDriftError, match="Trajectory t1: ") as caught:
        audit(trajectory)
    assert where in str(caught.value)


@pytest.mark.parametrize("change", [lambda t: t.samples.append(t.samples[1]), lambda t: t.turns.pop()])
def test_a_turn_trained_twice_or_lost_is_caught(trajectory: Trajectory, change: Callable[[Trajectory], None]) -> None:
    change(trajectory)
    with pytest.raises(TokenDriftError, match="2 ids in the training sample were never sampled"):
        audit(trajectory)
