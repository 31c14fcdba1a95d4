"""From rewards to the advantages of tokens, against arithmetic done by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from emailrl.base.errors import EmailRLError
from emailrl.records.trajectory import Scenario, Trajectory, TrajectoryGroup
from emailrl.settings import AlgorithmSettings
from emailrl.training.algorithms import ALGORITHMS, Algorithm
from emailrl.training.batch import Layout, TrainingSample, micro_batches, shape_advantages, terminal_rewards

NAN = math.nan
Gather = Callable[[Tensor], list[Tensor]]
GAE = Algorithm("mine", advantage="gae", kl_in="reward", kl_estimator="k1")


def sample(name: str, mask: list[int]) -> TrainingSample:
    return TrainingSample(name, "g", [7] * len(mask), mask, [-1.0] * len(mask))


# Trajectory a is broken in two; b is one sample. Between a's second token and its third stands an observation.
SAMPLES = [sample("a", [0, 1, 0, 1]), sample("b", [0, 1]), sample("a", [0, 0, 0, 0, 1])]
PAID = {"b": -4.0, "a": 2.0}
VALUES = {0: [NAN, 1.0, NAN, 0.5], 1: [NAN, 3.0], 2: [NAN, NAN, NAN, NAN, -1.0]}
GAPS = {0: [NAN, 0.1, NAN, 0.2], 1: [NAN, 0.3], 2: [NAN, NAN, NAN, NAN, 0.4]}
"""Log-probability less the reference's."""


def shape(
    algorithm: Algorithm,
    *,
    cap: int = 5,
    kl_coef: float = 0.0,
    order: int = 1,
    gather: Gather = lambda own: [own],
    **wanted: Any,
) -> tuple[list[list[float]], list[list[float]] | None, dict[str, float]]:
    """Advantages, and returns, of each sample's trained tokens, and the metrics."""

    def rows(table: dict[int, list[float]], indices: tuple[int, ...], width: int) -> Tensor:
        return tensor([table[i] + [NAN] * (width - len(table[i])) for i in indices])

    batches = [
        replace(
            batch,
            old_logprobs=rows(GAPS, batch.indices, batch.token_ids.shape[1]),
            ref_logprobs=torch.zeros(batch.token_ids.shape) if kl_coef else None,
            old_values=rows(VALUES, batch.indices, batch.token_ids.shape[1]),
        )
        for batch in micro_batches(SAMPLES, Layout(cap))[::order]
    ]
    shaped, metrics = shape_advantages(
        batches, PAID, algorithm, AlgorithmSettings(**wanted), kl_coef=kl_coef, gather=gather
    )
    found: dict[int, list[float]] = {}
    returns: dict[int, list[float]] = {}
    for batch in shaped:
        assert batch.advantages is not None
        assert (batch.advantages[~batch.loss_mask] == 0).all()
        for row, i in enumerate(batch.indices):
            trained = batch.loss_mask[row]
            found[i] = batch.advantages[row, trained].tolist()
            if batch.returns is not None:
                returns[i] = batch.returns[row, trained].tolist()
    return [found[i] for i in range(3)], [returns[i] for i in range(3)] if returns else None, metrics


def close(actual: list[list[float]] | None, expected: list[list[float]]) -> None:
    assert actual is not None and [len(row) for row in actual] == [len(row) for row in expected]
    for row, wanted in zip(actual, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)


def group(name: str, *rewards: float) -> TrajectoryGroup:
    scenario = Scenario("q", "When?", "Monday", ["m"], "a@example.com", "2001-01-01")
    members = [Trajectory(f"{name}{i}", name, scenario, reward=reward) for i, reward in enumerate(rewards)]
    return TrajectoryGroup(name, scenario, members)


def test_what_trajectories_are_paid_over_groups_of_different_sizes() -> None:
    groups = [group("a", 0.0, 1.0, 5.0), group("b", 1.0, 0.0)]
    # Against the others' mean: 0 - 3, 1 - 2.5, 5 - 0.5; 1 - 0, 0 - 1.
    assert terminal_rewards(groups, ALGORITHMS["rloo"]) == pytest.approx(
        {"a0": -3.0, "a1": -1.5, "a2": 4.5, "b0": 1.0, "b1": -1.0}
    )
    assert terminal_rewards(groups, ALGORITHMS["ppo"]) == {"a0": 0.0, "a1": 1.0, "a2": 5.0, "b0": 1.0, "b1": 0.0}
    with pytest.raises(EmailRLError, match="Trajectory c1 has reward nan"):
        terminal_rewards([group("c", 0.0, math.nan)], ALGORITHMS["grpo"])


@pytest.mark.parametrize(("cap", "order"), [(1, 1), (1, -1), (5, 1), (100, 1)])
def test_gae_flows_through_a_broken_trajectory(cap: int, order: int) -> None:
    # a: last token 2 - (-1) = 3; second 0.5·(-1) - 0.5 = -1, and 0.25·3 makes -0.25; first 0.5·0.5 - 1 = -0.75, and
    # 0.25·(-0.25) makes -0.8125. b: -4 - 3.
    advantages, returns, metrics = shape(GAE, cap=cap, order=order, gamma=0.5, gae_lambda=0.5)
    close(advantages, [[-0.8125, -0.25], [-7.0], [3.0]])
    close(returns, [[0.1875, 0.25], [-4.0], [2.0]])
    # Returns have mean -1.5625 / 4 and variance 20.09765625 / 4 - 0.15258789 = 4.87182617; the errors left, -0.8125,
    # -0.25, 3 and -7, have 58.72265625 / 4 - 1.60180664 = 13.07885742: 1 - 13.07885742 / 4.87182617.
    expected = {"value_mean": 0.875, "return_mean": -0.390625, "explained_variance": -1.6845903}
    assert metrics == pytest.approx(expected, abs=1e-6)


def two(own: Tensor) -> list[Tensor]:
    """Of this rank and another, whose trained tokens are one -2 and one 6."""
    return [own, tensor([-2.0, 6.0])]


@pytest.mark.parametrize("cap", [1, 5, 100])
def test_whitening_is_over_the_tokens_of_the_whole_step_and_all_ranks(cap: int) -> None:
    whitened = Algorithm("mine", advantage="reinforce", whiten=True)
    # Here 2, 2, -4, 2: mean 0.5, biased variance 28/4 - 0.25 = 6.75; with the other's: mean 1, 68/6 - 1 = 31/3.
    close(shape(whitened, cap=cap)[0], [[1.5 / 6.75**0.5] * 2, [-4.5 / 6.75**0.5], [1.5 / 6.75**0.5]])
    scale = (31 / 3) ** 0.5
    close(shape(whitened, cap=cap, gather=two)[0], [[1 / scale] * 2, [-5 / scale], [1 / scale]])


def test_a_rank_without_a_sample_takes_part() -> None:
    for algorithm in (GAE, ALGORITHMS["grpo"]):
        _, metrics = shape_advantages([], {}, algorithm, AlgorithmSettings(), kl_coef=0.0, gather=two)
        assert metrics.get("value_mean", 2.0) == 2.0  # the other's -2 and 6


def test_kl_is_charged_at_each_token_and_the_reward_paid_once_at_the_end() -> None:
    # gamma = lambda = 1: the advantage is what is still to come, less the value. b: -4 - 0.03 - 3.
    advantages, returns, _ = shape(GAE, kl_coef=0.1)
    close(returns, [[1.93, 1.94], [-4.03], [1.96]])
    close(advantages, [[0.93, 1.44], [-7.03], [2.96]])


@pytest.mark.parametrize(
    ("wanted", "kl_coef", "expected"),
    [
        ({}, 0.0, [[2, 2], [-4], [2]]),
        ({"reward_clip_high": 1.5}, 0.0, [[1.5, 1.5], [-4], [1.5]]),
        ({"reward_clip_low": -1.0}, 0.0, [[2, 2], [-1], [2]]),
        # The range is the reward's: what the KL takes comes on top.
        ({"reward_clip_low": -1.0, "reward_clip_high": 1.0}, 0.1, [[0.93, 0.94], [-1.03], [0.96]]),
        ({}, 0.1, [[1.93, 1.94], [-4.03], [1.96]]),
        ({"gamma": 0.5}, 0.0, [[0.5, 1.0], [-4], [2]]),
        ({"gamma": 0.5}, 0.1, [[-0.01 - 0.01 + 0.49, -0.02 + 0.98], [-4.03], [1.96]]),
    ],
)
def test_without_a_critic(wanted: dict[str, Any], kl_coef: float, expected: list[list[float]]) -> None:
    algorithm = Algorithm("mine", advantage="reinforce", kl_in="reward", kl_estimator="k1")
    advantages, returns, metrics = shape(algorithm, kl_coef=kl_coef, **wanted)
    close(advantages, expected)
    assert returns is None and metrics == {}


def test_kl_in_the_loss_leaves_advantages_alone_and_returns_are_not_whitened() -> None:
    assert shape(Algorithm("mine", advantage="group_norm", kl_in="loss"), kl_coef=0.1)[0] == [[2.0, 2.0], [-4.0], [2.0]]
    close(shape(Algorithm("mine", advantage="gae", whiten=True))[1], [[2.0, 2.0], [-4.0], [2.0]])


def test_the_variance_to_explain() -> None:
    # Returns 0.1, 0.1, 0.1 and -0.1: deviations 0.05 (3 times) and -0.15, variance 0.03 / 4. The errors left, -0.9,
    # -0.4, 1.1 and -3.1, have mean -0.825 and variance (0.005625 + 0.180625 + 3.705625 + 5.175625) / 4.
    _, _, metrics = shape(GAE, reward_clip_low=-0.1, reward_clip_high=0.1)
    assert metrics["explained_variance"] == pytest.approx(1 - 9.0675 / 0.03, rel=1e-5)
    _, _, metrics = shape(GAE, reward_clip_low=5.0)  # equal returns leave nothing
    assert metrics["return_mean"] == 5.0 and metrics["explained_variance"] == 0.0
