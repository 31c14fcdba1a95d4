"""Gradients: ``torch.autograd.gradcheck`` in float64 where a function is smooth, exact zeros on its flat branches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from emailrl.training import advantages as adv
from emailrl.training.kl import estimate
from emailrl.training.losses import aggregate, importance_weights, policy_loss, value_loss

MASK = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Seeded float64 numbers that ask for a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def old_logprobs() -> Tensor:
    return (-1 - normal(3, 6, seed=1).abs()).detach()


@pytest.mark.parametrize("name", list(adv.ESTIMATORS))
def test_group_estimators(name: str) -> None:
    assert gradcheck(adv.ESTIMATORS[name], normal(3, 5))


@pytest.mark.parametrize("function", [
    lambda a: adv.whiten(a, MASK),
    lambda a: adv.rewards_to_go(a, MASK),
    lambda a: adv.rewards_to_go(a, MASK, gamma=0.9),
])  # fmt: skip
def test_token_functions(function: Callable[[Tensor], Tensor]) -> None:
    assert gradcheck(function, normal(3, 6))


def test_gae() -> None:
    assert gradcheck(lambda r, v: adv.gae(r, v, MASK, gamma=0.9, lam=0.8), (normal(3, 6), normal(3, 6, seed=1)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(estimator: str) -> None:
    ref = old_logprobs()
    near = (ref + normal(3, 6, seed=2).clamp(-2.5, 2.5)).detach().requires_grad_()  # within every estimator's clamp
    assert gradcheck(lambda now: estimate(now, ref, estimator), near)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("denominator", [None, 11.0])
def test_aggregate(aggregation: Any, denominator: float | None) -> None:
    options: dict[str, Any] = {"constant_length": 4.5, "denominator": denominator}
    assert gradcheck(lambda numbers: aggregate(numbers, MASK, aggregation, **options), normal(3, 6))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
@pytest.mark.parametrize("options", [{}, {"dual_clip": 1.3}, {"weights": True}, {"denominator": 9.0}])
def test_policy_loss(aggregation: Any, ratio_level: Any, options: dict[str, Any]) -> None:
    """Ratios on both sides of both clips, none within 1e-3 of one: between its kinks the loss is smooth."""
    old, advantages = old_logprobs(), normal(3, 6, seed=2).detach()
    if "weights" in options:
        options = {"weights": normal(3, 6, seed=3).detach().abs()}
    logprobs = old + 0.5 * normal(3, 6, seed=4).detach()
    logs = (logprobs - old).where(MASK, 0)
    logs = logs if ratio_level == "token" else logs.sum(-1) / MASK.sum(-1).clamp(min=1)
    kinks = torch.tensor([0.8, 1.2, options.get("dual_clip", 9.0)])
    assert (logs.exp()[..., None] - kinks).abs().min() > 1e-3

    def loss(at: Tensor) -> Tensor:
        return policy_loss(
            at, old, advantages, MASK,
            aggregation=aggregation, ratio_level=ratio_level, constant_length=4.5, **options,
        )[0]  # fmt: skip

    assert gradcheck(loss, logprobs.requires_grad_())


@pytest.mark.parametrize("clip", [None, 0.4])
def test_value_loss(clip: float | None) -> None:
    old, returns = normal(3, 6, seed=1).detach(), normal(3, 6, seed=2).detach()
    assert gradcheck(lambda values: value_loss(values, old, returns, MASK, clip=clip)[0], normal(3, 6))


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "is_flat"),
    [
        (1.3, 1.0, {}, True),
        (1.3, -1.0, {}, False),
        (0.7, -1.0, {}, True),
        (0.7, 1.0, {}, False),
        (1.3, 1.0, {"clip_high": 0.4}, False),
        (0.7, -1.0, {"clip_low": 0.4}, False),
        (2.1, -1.0, {"dual_clip": 2.0}, True),
        (1.9, -1.0, {"dual_clip": 2.0}, False),
        (2.1, 1.0, {"dual_clip": 2.0, "clip_high": 9.0}, False),
        (math.exp(20.5), -1.0, {}, True),  # past the limit of log-ratios
        (math.exp(19.5), -1.0, {}, False),
        (math.exp(-20.5), 1.0, {}, True),
        (math.exp(-19.5), 1.0, {}, False),
        (1.1, 0.0, {}, True),
    ],
)
def test_flat_branches_of_the_policy_loss(
    ratio: float, advantage: float, options: dict[str, Any], is_flat: bool
) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1)
    loss, _ = policy_loss(logprobs, old, torch.tensor([[advantage]]), mask, **options)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.item() == pytest.approx(0.0 if is_flat else -advantage * ratio, rel=1e-9)


def test_first_update_has_the_gradient_of_reinforce() -> None:
    """With ratio 1, no clip binds: the gradient is -A at each trained token over their number."""
    old, advantages = old_logprobs(), normal(3, 6, seed=2).detach()
    at = old.clone().requires_grad_()
    loss, _ = policy_loss(at, old, advantages, MASK)
    (gradient,) = torch.autograd.grad(loss, at)
    torch.testing.assert_close(gradient, -(advantages * MASK) / 5, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("value", "is_flat"), [(0.0, False), (1.3, True), (-0.7, False)])
def test_flat_branch_of_the_value_loss(value: float, is_flat: bool) -> None:
    # Old value 0.5, return 2, clip 0.4: above 0.9 the clipped error 1.1² is the larger, and no longer moves.
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([[0.5]]), torch.tensor([[2.0]])
    loss, _ = value_loss(values, old, returns, torch.ones(1, 1), clip=0.4)
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.item() == pytest.approx(0.0 if is_flat else value - 2, rel=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_beyond_its_clamp_the_kl_pulls_as_at_it(estimator: str) -> None:
    # Where each reaches 10: d, d²/2, and e^-d - 1 + d just below 11 and at -2.6108686.
    high = {"k1": 10.0, "k2": math.sqrt(20), "k3": 10.999983298}[estimator]
    low = {"k1": -10.0, "k2": -math.sqrt(20), "k3": -2.610868638}[estimator]
    logprobs = torch.tensor([high + 0.5, low - 0.5, low + 0.1], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(estimate(logprobs, torch.zeros(3), estimator).sum(), logprobs)

    def slope(d: float) -> float:
        return {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d)}[estimator]

    assert gradient.tolist() == pytest.approx([slope(high), slope(low), slope(low + 0.1)], rel=1e-8)


def test_no_gradient_reaches_a_target() -> None:
    now, old, advantages, weights = (normal(3, 6, seed=seed) for seed in range(4))
    loss, _ = policy_loss(now, old, advantages, MASK, weights=weights)
    value, _ = value_loss(now, old, advantages, MASK, clip=0.5)
    kl = estimate(now, old, "k3").sum()
    for total in (loss, value, kl):
        wanted = torch.autograd.grad(total, (now, old, advantages, weights), allow_unused=True)
        assert wanted[0] is not None and wanted[1:] == (None, None, None)
    assert not importance_weights(now, old, MASK).requires_grad
