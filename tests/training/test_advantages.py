"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, tensor

from emailrl.training import advantages as adv

NAN, INF = math.nan, math.inf


def close(actual: Tensor, expected: list[object]) -> None:
    torch.testing.assert_close(actual, tensor(expected, dtype=actual.dtype), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("estimate", "expected"),
    [
        # [1, 0, 0, 1]: mean 1/2, squared deviations 1 in all, sample std sqrt(1/3); [0, 1, 5, 6]: 3, 26, sqrt(26/3).
        (lambda r: adv.group_norm(r, eps=0), [[0.8660254, -0.8660254, -0.8660254, 0.8660254],
                                              [-1.0190493, -0.6793662, 0.6793662, 1.0190493]]),
        (adv.group_norm, [[0.8658754, -0.8658754, -0.8658754, 0.8658754],
                          [-1.0190147, -0.6793431, 0.6793431, 1.0190147]]),
        (adv.dr_grpo, [[0.5, -0.5, -0.5, 0.5], [-3, -2, 2, 3]]),
        (adv.reinforce_baseline, [[0.5, -0.5, -0.5, 0.5], [-3, -2, 2, 3]]),
        # Each less the mean of the other three: 1 - 1/3, 0 - 2/3; 0 - 4, 1 - 11/3, 5 - 7/3, 6 - 2.
        (adv.rloo, [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [-4, -8 / 3, 8 / 3, 4]]),
        (adv.reinforce, [[1, 0, 0, 1], [0, 1, 5, 6]]),
    ],
)  # fmt: skip
def test_group_estimators(estimate: Callable[[Tensor], Tensor], expected: list[object]) -> None:
    close(estimate(tensor([[1, 0, 0, 1], [0, 1, 5, 6]])), expected)


@pytest.mark.parametrize("name", ["group_norm", "dr_grpo", "rloo", "reinforce_baseline"])
def test_equal_rewards_give_exactly_zero_and_one_member_raises(name: str) -> None:
    estimator = adv.ESTIMATORS[name]
    assert estimator(torch.full((3, 7), 0.1)).tolist() == [[0.0] * 7] * 3
    with pytest.raises(ValueError, match="at least 2 to compare rollouts, got 1"):
        estimator(tensor([[1.0], [0.0]]))


def test_reinforce_takes_groups_of_one_and_none_of_nothing() -> None:
    close(adv.reinforce(tensor([[2.0], [-1.0]])), [[2.0], [-1.0]])
    with pytest.raises(ValueError, match="at least 1 to compare rollouts, got 0"):
        adv.reinforce(torch.zeros(2, 0))
    assert adv.rloo(tensor([[1.0, 0.0]])).tolist() == [[1.0, -1.0]]


def test_rewards_must_be_groups() -> None:
    with pytest.raises(ValueError, match=r"\(num_groups, group_size\), got shape \(3,\)"):
        adv.rloo(tensor([1.0, 2.0, 3.0]))


def test_float64_stays_float64_and_everything_else_becomes_float32() -> None:
    # 1e-9 is lost beside 1 in float32 but not in float64.
    close(adv.dr_grpo(tensor([[1.0, 1.0 + 2e-9]], dtype=torch.float64)) * 1e9, [[-1.0, 1.0]])
    assert adv.group_norm(tensor([[1, 0]])).dtype == torch.float32
    assert adv.group_norm(tensor([[1.0, 0.0]], dtype=torch.bfloat16)).dtype == torch.float32


def test_gae_without_observations() -> None:
    # gamma * lam = 0.855. From the right: 1 - 1 = 0; 0.9 * 1 - 0 = 0.9; 0.855 * 0.9; 0.855 * 0.7695.
    values = tensor([[0.0, 0.0, 0.0, 1.0]])
    advantages, returns = adv.gae(values, values, torch.ones(1, 4), gamma=0.9, lam=0.95)
    close(advantages, [[0.6579225, 0.7695, 0.9, 0.0]])
    close(returns, [[0.6579225, 0.7695, 0.9, 1.0]])


@pytest.mark.parametrize("garbage", [5.0, NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_gae_steps_over_observations_whose_values_never_matter(garbage: float, dtype: torch.dtype) -> None:
    mask = tensor([[0, 1, 0, 0, 1, 1, 0, 1, 0], [0] * 9], dtype=dtype)
    row = [garbage, 0.0, garbage, garbage, 0.0, 0.0, garbage, 1.0, garbage]
    values = tensor([row, [garbage] * 9], requires_grad=True)
    advantages, returns = adv.gae(values.detach(), values, mask, gamma=0.9, lam=0.95)
    close(advantages, [[0, 0.6579225, 0, 0, 0.7695, 0.9, 0, 0, 0], [0.0] * 9])
    close(returns, [[0, 0.6579225, 0, 0, 0.7695, 0.9, 0, 1.0, 0], [0.0] * 9])
    advantages.sum().backward()
    assert values.grad is not None and values.grad.isfinite().all()
    assert not values.grad[mask == 0].any()


def test_gae_of_nothing() -> None:
    advantages, returns = adv.gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0), gamma=1, lam=1)
    assert advantages.shape == returns.shape == (2, 0)


@pytest.mark.parametrize("garbage", [7.0, NAN, INF])
def test_whiten(garbage: float) -> None:
    # [0, 0, 3]: mean 1, biased variance (1 + 1 + 4) / 3 = 2.
    mask = tensor([[1, 0], [1, 1]])
    close(adv.whiten(tensor([[0.0, garbage], [0.0, 3.0]]), mask), [[-0.7071068, 0], [-0.7071068, 1.4142136]])
    close(adv.whiten(tensor([[4.0, garbage], [4.0, 4.0]]), mask), [[0.0, 0.0], [0.0, 0.0]])
    close(adv.whiten(tensor([[garbage, garbage]]), torch.zeros(1, 2)), [[0.0, 0.0]])
    # By the mean 2 and the biased variance 4 of four advantages, of which two are in the mask.
    close(adv.whiten(tensor([[0.0, garbage], [0.0, 4.0]]), mask, over=tensor([0.0, 0.0, 4.0, 4.0])), [[-1, 0], [-1, 1]])
    close(adv.whiten(tensor([[5.0]]), torch.ones(1, 1)), [[0.0]])
    # Tiny variances are floored: 1e-5 over sqrt(1e-8), not over 1e-5.
    close(adv.whiten(tensor([[-1e-5, 1e-5]]), torch.ones(1, 2)), [[-0.1, 0.1]])


@pytest.mark.parametrize(
    ("gamma", "expected"),
    [
        # The last gets 2, the third 0.5 and what follows, the first -1 and what follows; observations take no time.
        (1.0, [[1.5, 0, 2.5, 2.0], [0, 0, 0, 0]]),
        (0.5, [[-0.25, 0, 1.5, 2.0], [0, 0, 0, 0]]),
    ],
)
def test_rewards_to_go(gamma: float, expected: list[list[float]]) -> None:
    rewards = tensor([[-1.0, NAN, 0.5, 2.0], [NAN, NAN, NAN, NAN]])
    mask = tensor([[1, 0, 1, 1], [0, 0, 0, 0]])
    close(adv.rewards_to_go(rewards, mask, gamma=gamma), expected)


def test_an_undiscounted_reward_at_the_end_is_every_tokens_to_the_bit() -> None:
    rewards = torch.zeros(1, 500)
    rewards[0, -1] = 0.1
    assert (adv.rewards_to_go(rewards, torch.ones(1, 500)) == rewards[0, -1]).all()
