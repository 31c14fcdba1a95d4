"""What is trained, what is dropped, and what is refused: literal lists for small cases."""

from __future__ import annotations

import math
from typing import Any

import pytest

from emailrl.base.errors import EmailRLError
from emailrl.records.trajectory import Scenario, StopReason, TokenSample, Trajectory, TrajectoryGroup, Turn
from emailrl.training.batch import make_samples

SCENARIO = Scenario("q", "When?", "Monday", ["m"], "a@example.com", "2001-01-01")


def two_turns() -> TokenSample:
    """Prompt 1 2, sampled 3 4, tool result 5 6 7, sampled 8 9, and a last tool result 10."""
    tokens = TokenSample()
    tokens.append_prompt([1, 2])
    tokens.append_sampled([3, 4], [-0.3, -0.4])
    tokens.append_prompt([5, 6, 7])
    tokens.append_sampled([8, 9], [-0.8, -0.9])
    tokens.append_prompt([10])
    return tokens


def group(*rewards: float, name: str = "g", exceptions: tuple[int, ...] = (), **fields: Any) -> TrajectoryGroup:
    trajectories = [
        Trajectory(
            id=f"{name}{i}", group_id=name, scenario=SCENARIO, reward=reward,
            turns=[Turn([3, 4], [-0.3, -0.4], "stop")],
            exception="Oops: broken" if i in exceptions else None, **({"samples": [two_turns()]} | fields),
        )
        for i, reward in enumerate(rewards)
    ]  # fmt: skip
    return TrajectoryGroup(name, SCENARIO, trajectories)


@pytest.mark.parametrize(
    ("loss_mask", "trained"),
    [
        ("sampled", [0, 0, 1, 1, 0, 0, 0, 1, 1]),  # it ends with the last trained token
        ("completion", [0, 0, 1, 1, 0, 0, 0, 1, 1]),
        ("after_prompt", [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_loss_masks(loss_mask: Any, trained: list[int]) -> None:
    played = group(1.0)
    (sample,), counts = make_samples([played], loss_mask)
    assert played.trajectories[0].samples == [two_turns()]  # recorded the same in all modes
    assert (sample.token_ids, sample.loss_mask) == (list(range(1, len(trained) + 1)), trained)
    drawn = [None, None, -0.3, -0.4, None, None, None, -0.8, -0.9, None]
    assert sample.sampler_logprobs == drawn[: len(trained)]
    assert (sample.trajectory_id, sample.group_id) == ("g0", "g")
    assert sample.num_trainable == sum(trained)
    assert counts == {"trajectories_truncated": 0, "samples_nothing_trainable": 0}


def test_a_broken_trajectory_gives_several_samples() -> None:
    prompt_only = TokenSample()
    prompt_only.append_prompt([1, 2, 3])
    samples, counts = make_samples([group(1.0, samples=[two_turns(), prompt_only, two_turns()])], "sampled")
    assert [sample.trajectory_id for sample in samples] == ["g0", "g0"]
    assert counts == {"trajectories_truncated": 0, "samples_nothing_trainable": 1}


def test_trajectories_cut_off_at_the_token_limit_are_masked_where_asked_and_counted() -> None:
    groups = [group(0.0, 1.0, 2.0, 3.0)]
    ends = (StopReason.TRUNCATED, StopReason.ANSWERED, StopReason.RAN_OUT_OF_TURNS, StopReason.TRUNCATED)
    for one, end in zip(groups[0].trajectories, ends, strict=True):
        one.stop_reason = end
    samples, counts = make_samples(groups, "sampled")
    assert [sample.trajectory_id for sample in samples] == ["g0", "g1", "g2", "g3"]
    assert counts == {"trajectories_truncated": 0, "samples_nothing_trainable": 0}
    samples, counts = make_samples(groups, "sampled", mask_truncated=True)
    assert [sample.trajectory_id for sample in samples] == ["g1", "g2"]
    assert counts == {"trajectories_truncated": 2, "samples_nothing_trainable": 0}


def damaged(**changes: Any) -> TokenSample:
    tokens = two_turns()
    for name, value in changes.items():
        setattr(tokens, name, value)
    return tokens


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        ([], "it has no sampled token ids"),
        ([damaged(loss_mask=[0] * 10)], "it has no sampled token ids"),
        ([damaged(token_ids=[1])], "differ in length"),
        ([damaged(loss_mask=[1] * 10)], "its first token is marked as sampled"),
        ([damaged(sampler_logprobs=[None] * 10)], "a sampled token has log-probability None"),
        ([damaged(sampler_logprobs=[math.nan] * 10)], "a sampled token has log-probability nan"),
    ],
)
def test_what_cannot_be_trained_is_refused(samples: list[TokenSample], problem: str) -> None:
    with pytest.raises(EmailRLError, match=f"Trajectory g0 cannot be trained: .*{problem}"):
        make_samples([group(1.0, samples=samples)], "sampled")
