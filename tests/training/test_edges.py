"""Borders, defaults, empty places: what only a number moved by one shows (see ``python -m tests.mutation``)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import tensor

from emailrl.base.errors import EmailRLError
from emailrl.records.trajectory import Scenario, StopReason, TokenSample, Trajectory, TrajectoryGroup, Turn
from emailrl.training import advantages as adv
from emailrl.training.batch import Layout, MicroBatch, TrainingSample, make_samples, micro_batches
from emailrl.training.kl import AdaptiveKL, estimate
from emailrl.training.losses import (
    aggregate,
    correction_weights,
    count_for,
    importance_weights,
    policy_loss,
    value_loss,
)
from emailrl.training.rollouts import Filter

NAN, INF = math.nan, math.inf
SAID = {"mean": 1.0, "min": 1.0, "max": 1.0, "cut_fraction": 0.0}
SCENARIO = Scenario("q", "When?", "Monday", ["m"], "a@example.com", "2001-01-01")


def trajectory(name: str, tokens: TokenSample, **fields: Any) -> Trajectory:
    turns = [Turn([1], [-1.0], "stop")]
    return Trajectory(id=name, group_id="g", scenario=SCENARIO, turns=turns, samples=[tokens], **fields)


def tokens(*parts: int) -> TokenSample:
    """So many tokens of a prompt, then sampled, then shown, then sampled, and so on."""
    made = TokenSample()
    for i, count in enumerate(parts):
        made.append_sampled([8] * count, [-0.5] * count) if i % 2 else made.append_prompt([7] * count)
    return made


def group(*rewards: float) -> TrajectoryGroup:
    members = [trajectory(f"t{i}", tokens(1, 1), reward=reward) for i, reward in enumerate(rewards)]
    return TrajectoryGroup("g", SCENARIO, members)


# -- advantages


def test_a_group_of_none_is_refused_and_one_of_two_is_not() -> None:
    with pytest.raises(ValueError, match="at least 1 to compare rollouts, got 0"):
        adv.reinforce(torch.zeros(2, 0))
    assert adv.rloo(tensor([[1.0, 0.0]])).tolist() == [[1.0, -1.0]]


# -- KL


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_the_reference_holds_impossible_has_a_bounded_kl_and_no_gradient(estimator: str) -> None:
    logprobs = tensor([0.0], requires_grad=True)
    kl = estimate(logprobs, tensor([-INF]), estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.item() == pytest.approx(10.0) and gradient.tolist() == [0.0]


def test_default_horizon() -> None:
    assert AdaptiveKL(0.1, 0.02).update(0.03, 100) == pytest.approx(0.1 * (1 + 0.2 * 0.01), rel=1e-12)


# -- losses


def test_weights_on_a_bound_are_inside() -> None:
    ones = torch.zeros(1, 2)
    for kind in ("icepop", "sequence_mask"):
        for low, high in ((1.0, 2.0), (0.5, 1.0)):
            weights = importance_weights(ones, ones, torch.ones(1, 2), kind=kind, low=low, high=high)  # type: ignore[arg-type]
            assert weights.tolist() == [[1.0, 1.0]]


def test_without_a_clip_a_value_may_move_as_far_as_it_likes() -> None:
    loss, metrics = value_loss(tensor([[5.0]]), tensor([[0.0]]), tensor([[6.0]]), torch.ones(1, 1))
    assert loss.item() == 0.5 and metrics == {"value_clip_fraction": 0.0}
    loss, metrics = value_loss(tensor([[5.0]]), tensor([[0.0]]), tensor([[6.0]]), torch.ones(1, 1), clip=1.0)
    assert loss.item() == 12.5 and metrics == {"value_clip_fraction": 1.0}


@pytest.mark.parametrize("broken", range(3))
def test_one_broken_tensor_outside_the_mask_breaks_no_gradient_of_the_critic(broken: int) -> None:
    rows = [tensor([[1.0, 1.0]]), tensor([[0.0, 0.0]]), tensor([[2.0, 2.0]])]
    rows[broken][0, 1] = NAN
    values = rows[0].requires_grad_()
    loss, metrics = value_loss(values, rows[1], rows[2], tensor([[1, 0]]), clip=9.0)
    loss.backward()
    assert values.grad is not None and values.grad.tolist() == [[-1.0, 0.0]]
    assert metrics == {"value_clip_fraction": 0.0}


def test_metrics_of_nothing() -> None:
    nothing = torch.zeros(1, 2)
    _, metrics = policy_loss(nothing, nothing, nothing, nothing)
    assert metrics == {"clip_fraction": 0, "ratio_mean": 1, "ratio_min": 1, "ratio_max": 1, "approx_kl": 0}
    assert value_loss(nothing, nothing, nothing, nothing, clip=0.2)[1] == {"value_clip_fraction": 0.0}


def test_clip_fraction_counts_trained_tokens_alone() -> None:
    ratios = tensor([[1.5, 1.0, 1.5]]).log()
    _, metrics = policy_loss(ratios, torch.zeros(1, 3), tensor([[1.0, 1.0, 1.0]]), tensor([[1, 1, 0]]))
    assert metrics["clip_fraction"] == 0.5


def test_a_denominator_is_asked_for_where_a_single_token_is_trained() -> None:
    with pytest.raises(ValueError, match="denominator must be above 0"):
        aggregate(torch.ones(2, 2), tensor([[1, 0], [0, 0]]), "token_mean", denominator=0)
    assert aggregate(torch.ones(1, 1), torch.ones(1, 1), "token_mean", denominator=0.5).item() == 2.0


@pytest.mark.parametrize("length", [None, 0, -1.0])
def test_a_constant_length_must_be_given_above_nothing(length: float | None) -> None:
    with pytest.raises(ValueError, match="needs a constant_length above 0"):
        aggregate(torch.ones(1, 2), torch.ones(1, 2), "constant", constant_length=length)
    with pytest.raises(ValueError, match="needs a constant_length above 0"):
        count_for(torch.ones(1, 2), "constant")
    with pytest.raises(ValueError, match="needs a constant_length above 0"):
        aggregate(torch.ones(1, 2), torch.ones(1, 2), "constant")
    assert count_for(torch.ones(2, 2), "constant", 0.5).item() == 1.0


def test_tokens_that_are_not_trained_count_in_no_correction() -> None:
    zeros, mask = torch.zeros(1, 3), tensor([[1, 1, 0]])
    for kind in ("tis", "icepop", "sequence_mask"):
        # Beside a trained token of weight 1, one that is not trained stands at weight e^9.
        old = tensor([[0.0, 0.0, 9.0]])
        weights, said = correction_weights(old, zeros, mask, kind=kind, low=0.9, high=1.1)  # type: ignore[arg-type]
        assert weights.tolist() == [[1.0, 1.0, 0.0]]
        assert said == {f"correction_{name}": value for name, value in SAID.items()}


# -- samples


def test_truncated_trajectories_are_left_out_where_that_is_asked() -> None:
    members = [trajectory(f"t{i}", tokens(1, 1), stop_reason=StopReason.TRUNCATED) for i in range(2)]
    members.append(trajectory("whole", tokens(1, 1), stop_reason=StopReason.ANSWERED))
    groups = [TrajectoryGroup("g", SCENARIO, members)]
    samples, counts = make_samples(groups, "sampled", mask_truncated=True)
    assert [sample.trajectory_id for sample in samples] == ["whole"]
    assert counts == {"trajectories_truncated": 2, "samples_nothing_trainable": 0}
    samples, counts = make_samples(groups, "sampled")
    assert [sample.trajectory_id for sample in samples] == ["t0", "t1", "whole"]
    assert counts == {"trajectories_truncated": 0, "samples_nothing_trainable": 0}


def test_a_prompt_of_one_token_is_a_prompt_and_one_of_none_is_refused() -> None:
    groups = [TrajectoryGroup("g", SCENARIO, [trajectory("t", tokens(1, 1, 3))])]
    (sample,), _ = make_samples(groups, "sampled")
    assert (sample.token_ids, sample.loss_mask) == ([7, 8], [0, 1])  # cut behind the last trained token
    groups = [TrajectoryGroup("g", SCENARIO, [trajectory("t", tokens(0, 1, 1))])]
    with pytest.raises(EmailRLError, match="its first token is marked as sampled"):
        make_samples(groups, "sampled")


# -- batches


def sample(length: int) -> TrainingSample:
    return TrainingSample("t", "g", [7] * length, [0] + [1] * (length - 1), [-0.5] * length)


def batched(lengths: list[int], cap: int, **options: Any) -> list[list[int]]:
    return [
        [lengths[i] for i in batch.indices]
        for batch in micro_batches(list(map(sample, lengths)), Layout(cap, **options))
    ]


def test_a_cap_on_rows() -> None:
    assert batched([2, 2, 2, 2, 2], 99, max_rows=2) == [[2, 2], [2, 2], [2]]
    assert batched([3, 3, 3, 3, 3], 99, max_rows=2, packing=True) == [[3, 3], [3, 3], [3]]
    # Dealt to the emptier batch alone, the three twos would stand together.
    assert batched([9, 2, 2, 2], 99, max_rows=2, packing=True) == [[9, 2], [2, 2]]


def test_a_dealt_batch_may_be_full_to_the_last_token() -> None:
    # First-fit makes 8 + 6 and 7 + 3 + 3.
    assert batched([8, 7, 6, 3, 3], 14, packing=True) == [[8, 3, 3], [7, 6]]
    assert batched([9, 8], 5, packing=True) == [[9], [8]]


def test_padding_is_token_0_unless_it_is_named() -> None:
    (batch,) = micro_batches([sample(3), sample(2)], Layout(6))
    assert batch.token_ids.tolist() == [[7, 7, 7], [7, 7, 0]]


@pytest.mark.parametrize("kind", [TrainingSample, MicroBatch])
def test_nobody_changes_what_was_made(kind: type) -> None:
    (batch,) = micro_batches([sample(3)], Layout(6))
    made = {TrainingSample: sample(3), MicroBatch: batch}[kind]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, None)
    assert not hasattr(made, "__dict__")


# -- filtering


def test_a_spread_on_the_border_is_kept_and_counts_the_members_less_one() -> None:
    # 0 and 2: deviations 1 and 1 over 2 - 1, so the square root of 2.
    assert isinstance(Filter(2, min_group_std=math.sqrt(2)).sift(group(0.0, 2.0)), TrajectoryGroup)
    # 0, 0, 1: 2/3 over 3 - 1, so the square root of 1/3.
    assert Filter(2, min_group_std=0.58).sift(group(0.0, 0.0, 1.0)) == "group_low_std"
    assert isinstance(Filter(2, min_group_std=0.57).sift(group(0.0, 0.0, 1.0)), TrajectoryGroup)
