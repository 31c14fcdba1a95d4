"""The audit passes what was sampled and catches every way in which it can drift."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from emailrl.agent.play import TokenDriftError, audit
from emailrl.records.trajectory import Scenario, TokenSample, Trajectory, Turn


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


def test_an_empty_completion_has_nothing_to_prove(trajectory: Trajectory) -> None:
    trajectory.turns.append(Turn([], [], "length"))
    assert audit(trajectory) == 5


def swap_ids(t: Trajectory) -> None:
    t.samples[0].token_ids[2:4] = [6, 5]


def change_id(t: Trajectory) -> None:
    t.samples[1].token_ids[3] = 10


def change_logprob(t: Trajectory) -> None:
    t.samples[0].sampler_logprobs[3] = -0.26


def train_a_tool_token(t: Trajectory) -> None:
    t.samples[0].loss_mask[4] = 1


def train_a_tool_token_with_a_logprob(t: Trajectory) -> None:
    t.samples[0].loss_mask[4] = 1
    t.samples[0].sampler_logprobs[4] = -0.125


def forget_a_sampled_token(t: Trajectory) -> None:
    t.samples[0].loss_mask[2] = 0
    t.samples[0].sampler_logprobs[2] = None


def lose_the_last_token(t: Trajectory) -> None:
    for row in (t.samples[1].token_ids, t.samples[1].loss_mask, t.samples[1].sampler_logprobs):
        row.pop()


def shift_the_mask(t: Trajectory) -> None:
    t.samples[0].loss_mask = [0, 0, 0, 1, 1, 1]


def shift_mask_and_logprobs(t: Trajectory) -> None:
    t.samples[0].loss_mask = [0, 1, 1, 0, 0, 1]
    t.samples[0].sampler_logprobs = [None, -0.5, -0.25, None, None, -0.125]


def train_a_turn_twice(t: Trajectory) -> None:
    t.samples.append(copy.deepcopy(t.samples[1]))


def lose_a_turn(t: Trajectory) -> None:
    t.turns.pop()


def lose_the_tool_result(t: Trajectory) -> None:
    del t.samples[0].token_ids[4], t.samples[0].loss_mask[4], t.samples[0].sampler_logprobs[4]


def cut_a_row(t: Trajectory) -> None:
    t.samples[0].loss_mask.pop()


def cut_a_turn(t: Trajectory) -> None:
    t.turns[0].logprobs.pop()


def claim_a_probability_above_one(t: Trajectory) -> None:
    t.samples[1].sampler_logprobs[2] = t.turns[2].logprobs[0] = 1.0


def record_nan(t: Trajectory) -> None:
    t.samples[1].sampler_logprobs[2] = t.turns[2].logprobs[0] = float("nan")


@pytest.mark.parametrize(
    ("drift", "where"),
    [
        (swap_ids, "turn 0, token 0: sampled (5, -0.5), but (6, -0.5) in the training sample"),
        (change_id, "turn 2, token 1"),
        (change_logprob, "turn 0, token 1"),
        (train_a_tool_token, "sample 0, position 4: mask 1 with log-probability None"),
        (train_a_tool_token_with_a_logprob, "turn 1"),
        (forget_a_sampled_token, "turn 0, token 0"),
        (lose_the_last_token, "turn 2, token 1: sampled but not in the sample"),
        (shift_the_mask, "sample 0, position 2: mask 0 with log-probability -0.5"),
        (shift_mask_and_logprobs, "turn 0, token 0"),
        (train_a_turn_twice, "2 ids in the training sample were never sampled"),
        (lose_a_turn, "2 ids in the training sample were never sampled"),
        (lose_the_tool_result, "turn 1: no prompt precedes"),
        (cut_a_row, "sample 0: ids, mask and log-probabilities differ in length"),
        (cut_a_turn, "turn 0: ids and log-probabilities differ in number"),
        (claim_a_probability_above_one, "sample 1, position 2: log-probability 1.0"),
        (record_nan, "sample 1, position 2: log-probability nan"),
    ],
)
def test_every_drift_is_caught(trajectory: Trajectory, drift: Callable[[Trajectory], None], where: str) -> None:
    drift(trajectory)
    with pytest.raises(TokenDriftError) as caught:
        audit(trajectory)
    assert where in str(caught.value)
    assert "t1" in str(caught.value)
