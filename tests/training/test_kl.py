"""KL estimators and the adaptive weight against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from emailrl.training.kl import AdaptiveKL, estimate

LN2 = 0.6931472


@pytest.mark.parametrize(
    ("estimator", "expected", "gradient"),
    [
        # d = ln 2, -ln 2, 0, 30, -30; k3 there is 1/2 - 1 + ln 2 and 2 - 1 - ln 2. Past the clamp the gradient is that
        # at it: d²/2 is 10 at ±√20; e^-d - 1 + d is 10 at -2.6108686, where 1 - e^-d = -12.6108686, and at 10.9999833.
        ("k1", [LN2, -LN2, 0, 10, -10], [1, 1, 1, 1, 1]),
        ("k2", [0.2402265, 0.2402265, 0, 10, 10], [LN2, -LN2, 0, 4.4721360, -4.4721360]),
        ("k3", [0.1931472, 0.3068528, 0, 10, 10], [0.5, -1, 0, 0.9999833, -12.6108686]),
    ],
)
def test_estimators(estimator: str, expected: list[float], gradient: list[float]) -> None:
    ref = tensor([-2.0, -2.0, -2.0, -40.0, -1.0], requires_grad=True)
    logprobs = (ref + tensor([LN2, -LN2, 0.0, 30.0, -30.0])).detach().requires_grad_()
    kl = estimate(logprobs, ref, estimator)
    torch.testing.assert_close(kl, tensor(expected), atol=1e-5, rtol=0)
    kl.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor(gradient, dtype=torch.float32), atol=1e-5, rtol=0)
    assert ref.grad is None


def test_overflow_reaches_neither_value_nor_gradient() -> None:
    logprobs = tensor([-1e4, -math.inf], requires_grad=True)
    for estimator, value, slope in (("k1", -10.0, 1.0), ("k2", 10.0, -4.4721360), ("k3", 10.0, -12.6108686)):
        kl = estimate(logprobs, tensor([-1.0, -1.0]), estimator)
        torch.testing.assert_close(kl, tensor([value, value]), atol=1e-5, rtol=0)
        (grad,) = torch.autograd.grad(kl.sum(), logprobs)
        torch.testing.assert_close(grad, tensor([slope, 0.0]), atol=1e-5, rtol=0)


def test_small_differences_are_not_rounded_away() -> None:
    # k3 near 0 is d²/2: in float32, e^-d - 1 alone would be off by 1e-8.
    kl = estimate(tensor([-1.0 + 1e-3]), tensor([-1.0]), "k3")
    assert abs(kl.item() - 5e-7) < 5e-9
    assert estimate(tensor([0.0], dtype=torch.float64), tensor([0.0]), "k3").dtype == torch.float64


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4': k1, k2 or k3"):
        estimate(tensor([0.0]), tensor([0.0]), "k4")


def test_adaptive_weight() -> None:
    assert AdaptiveKL(0.1, 0.02).update(0.03, 100) == pytest.approx(0.1 * (1 + 0.2 * 0.01), rel=1e-12)
    kl = AdaptiveKL(0.1, 0.02, 1000)
    assert kl.update(0.03, 100) == pytest.approx(0.102)  # error 0.5, cut to 0.2: 0.1 * (1 + 0.2 * 0.1)
    assert kl.update(0.022, 100) == pytest.approx(0.10302)  # error 0.1: 0.102 * (1 + 0.1 * 0.1)
    assert kl.update(0.0, 100) == pytest.approx(0.1009596)  # error -1, cut to -0.2: 0.10302 * (1 - 0.2 * 0.1)
    assert kl.coef == pytest.approx(0.1009596)


@pytest.mark.parametrize(
    ("target", "horizon", "complaint"),
    [
        *((bad, 10000, f"target must be above 0, got {bad}") for bad in (0.0, -0.1, math.inf)),
        (0.1, 0, "horizon must be above 0, got 0"),
    ],
)
def test_a_weight_that_could_not_move_is_refused(target: float, horizon: float, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        AdaptiveKL(0.1, target, horizon)


def test_without_target_the_weight_is_fixed_and_a_broken_kl_is_refused() -> None:
    kl = AdaptiveKL(0.1)
    assert kl.update(5.0, 100) == 0.1
    with pytest.raises(ValueError, match="measured KL is nan"):
        kl.update(math.nan, 1)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_what_the_reference_holds_impossible_has_a_bounded_kl_and_no_gradient(estimator: str) -> None:
    logprobs = tensor([0.0], requires_grad=True)
    kl = estimate(logprobs, tensor([-math.inf]), estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.item() == pytest.approx(10.0) and gradient.tolist() == [0.0]
