"""Losses against numbers worked out by hand, and the properties a mask and a clip must have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor

from emailrl.training.kl import estimate
from emailrl.training.losses import (
    aggregate,
    correction_weights,
    count_for,
    importance_weights,
    policy_loss,
    value_loss,
)

NAN, INF = math.nan, math.inf


def from_ratio(ratio: float, advantage: float, **options: Any) -> tuple[float, float]:
    """Loss and its gradient to the log-probability, for one token."""
    logprobs = tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    loss, _ = policy_loss(logprobs, tensor([[-1.0]]), tensor([[advantage]]), torch.ones(1, 1), **options)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "gradient"),
    [
        (1.0, 2.0, {}, -2.0, -2.0),
        (1.5, 1.0, {}, -1.2, 0.0),
        (1.5, -1.0, {}, 1.5, 1.5),
        (0.5, 1.0, {}, -0.5, -0.5),
        (0.5, -1.0, {}, 0.8, 0.0),
        (1.5, 1.0, {"clip_high": 0.28}, -1.28, 0.0),
        (1.3, 1.0, {"clip_high": 0.4}, -1.3, -1.3),
        (0.7, -1.0, {"clip_low": 0.4}, 0.7, 0.7),
        (0.5, -1.0, {"clip_low": 0.1}, 0.9, 0.0),
        (5.0, -1.0, {"dual_clip": 3.0}, 3.0, 0.0),
        (2.0, -1.0, {"dual_clip": 3.0}, 2.0, 2.0),
        (5.0, 1.0, {"dual_clip": 3.0}, -1.2, 0.0),
        (1.5, 1.0, {"weights": tensor([[0.5]])}, -0.6, 0.0),
        (0.5, 1.0, {"weights": tensor([[0.5]])}, -0.25, -0.25),
    ],
)
def test_one_token(ratio: float, advantage: float, options: dict[str, Any], loss: float, gradient: float) -> None:
    assert from_ratio(ratio, advantage, **options) == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize(
    ("aggregation", "length", "loss", "gradient"),
    [
        # Token losses [1] and [3, 3, 3].
        ("token_mean", None, 2.5, [[0.25, 0, 0], [0.75, 0.75, 0.75]]),
        ("sequence_mean", None, 2.0, [[0.5, 0, 0], [0.5, 0.5, 0.5]]),
        ("constant", 5, 1.0, [[0.1, 0, 0], [0.3, 0.3, 0.3]]),
    ],
)
def test_aggregation(aggregation: Any, length: int | None, loss: float, gradient: list[list[float]]) -> None:
    logprobs = tensor([[-1.0, NAN, -1.0], [-1.0, -1.0, -1.0], [INF, 0.0, 0.0]], requires_grad=True)
    mask = tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0]])  # the last row is padding: no sequence at all
    result, metrics = policy_loss(
        logprobs, torch.full((3, 3), -1.0), tensor([-1.0, -3.0, NAN]), mask,
        aggregation=aggregation, constant_length=length,
    )  # fmt: skip
    result.backward()
    assert result.item() == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(logprobs.grad, tensor([*gradient, [0.0, 0.0, 0.0]]), atol=1e-6, rtol=0)
    assert metrics["ratio_mean"] == 1.0


def test_sequence_ratio() -> None:
    # Log-ratios ln 4 and 0, mean ln 2: both tokens get ratio 2, and half of its gradient.
    logprobs = tensor([[math.log(4.0) - 3.0, NAN, -3.0]], requires_grad=True)
    old, mask = tensor([[-3.0, 0.0, -3.0]]), tensor([[True, False, True]])
    loss, metrics = policy_loss(logprobs, old, tensor([[-1.0, 9.0, -1.0]]), mask, ratio_level="sequence")
    loss.backward()
    assert loss.item() == pytest.approx(2.0, abs=1e-5)
    torch.testing.assert_close(logprobs.grad, tensor([[1.0, 0.0, 1.0]]), atol=1e-5, rtol=0)
    assert metrics["ratio_max"] == pytest.approx(2.0, abs=1e-5)
    clipped, _ = policy_loss(logprobs, old, tensor([[1.0, 9.0, 1.0]]), mask, ratio_level="sequence")
    assert clipped.item() == pytest.approx(-1.2, abs=1e-5)


def test_metrics() -> None:
    logprobs = torch.log(tensor([[1.5, 0.5, 1.5, 1.0, 9.0]]))
    _, metrics = policy_loss(
        logprobs, torch.zeros(1, 5), tensor([[1.0, -1.0, -1.0, 1.0, 1.0]]), tensor([[1, 1, 1, 1, 0]])
    )
    assert metrics == pytest.approx(
        # k3 of old against new: (r - 1 - ln r), mean of 0.0945349 twice, 0.1931472 and 0
        {"clip_fraction": 0.5, "ratio_mean": 1.125, "ratio_min": 0.5, "ratio_max": 1.5, "approx_kl": 0.0955542},
        abs=1e-6,
    )


@pytest.mark.parametrize("denominator", [None, 0, 7])
def test_a_batch_without_trainable_tokens_is_worth_nothing(denominator: float | None) -> None:
    x = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3)
    for loss, metrics in (
        policy_loss(x, x, x, mask, denominator=denominator),
        policy_loss(x, x, x, mask, aggregation="sequence_mean", ratio_level="sequence", denominator=denominator),
        value_loss(x, x, x, mask, clip=0.2, denominator=denominator),
    ):
        idle = {"clip_fraction": 0, "ratio_mean": 1, "ratio_min": 1, "ratio_max": 1, "approx_kl": 0}
        assert metrics in (idle, {"value_clip_fraction": 0.0})
        assert loss.item() == 0
        (gradient,) = torch.autograd.grad(loss, x)
        assert gradient.tolist() == [[0.0] * 3] * 2
    for kind in ("tis", "icepop", "sequence_mask"):
        assert importance_weights(x, x, mask, kind=kind).tolist() == [[0.0] * 3] * 2


def test_extreme_ratios_stay_finite() -> None:
    logprobs = tensor([[-1.0, -500.0]], requires_grad=True)
    loss, _ = policy_loss(logprobs, tensor([[-500.0, -1.0]]), tensor([[1.0, 1.0]]), torch.ones(1, 2))
    loss.backward()
    assert loss.item() == pytest.approx(-0.6, abs=1e-5)  # -(1.2 + e^-20) / 2
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[0.0, 0.0]]


def test_value_loss() -> None:
    values = tensor([[1.0, NAN, 3.0]], requires_grad=True)
    old, returns, mask = tensor([[0.0, NAN, 3.0]]), tensor([[2.0, NAN, 2.0]]), tensor([[1, 0, 1]])
    loss, metrics = value_loss(values, old, returns, mask)
    assert metrics == {"value_clip_fraction": 0.0}
    assert loss.item() == pytest.approx(0.5)  # half of (1 + 1), over 2 tokens
    # Clipped to 0.5 the first is off by 1.5: half of (2.25 + 1), over 2 tokens; it has no gradient then.
    loss, metrics = value_loss(values, old, returns, mask, clip=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(0.8125)
    assert metrics == {"value_clip_fraction": 0.5}
    torch.testing.assert_close(values.grad, tensor([[0.0, 0.0, 0.5]]))
    assert value_loss(values, old, returns, mask, clip=0.5, denominator=4)[0].item() == pytest.approx(0.40625)
    far = tensor([[5.0]]), tensor([[0.0]]), tensor([[6.0]]), torch.ones(1, 1)  # without a clip a value may move so
    for clip, expected, share in ((None, 0.5, 0.0), (1.0, 12.5, 1.0)):
        loss, metrics = value_loss(*far, clip=clip)
        assert loss.item() == expected and metrics == {"value_clip_fraction": share}
    assert value_loss(*far)[0].item() == 0.5


def test_targets_get_no_gradient() -> None:
    rows = [torch.randn(2, 3, dtype=torch.float64).requires_grad_() for _ in range(4)]
    now, old, advantages, weights = rows
    loss, _ = policy_loss(now, old, advantages, torch.ones(2, 3), weights=weights)
    value, _ = value_loss(now, old, advantages, torch.ones(2, 3), clip=0.5)
    for total in (loss, value, estimate(now, old, "k3").sum()):
        wanted = torch.autograd.grad(total, rows, allow_unused=True)
        assert wanted[0] is not None and wanted[1:] == (None, None, None)
    x = torch.zeros(1, 1, requires_grad=True)
    loss, _ = policy_loss(x, x, tensor([[2.0]]), torch.ones(1, 1))
    loss.backward()
    assert x.grad is not None and x.grad.item() == -2.0  # not 0: old log-probs given undetached are detached here


def test_float64_is_kept() -> None:
    logprobs = tensor([[-1.0 + 1e-12]], dtype=torch.float64)
    old = tensor([[-1.0]], dtype=torch.float64)
    loss, _ = policy_loss(logprobs, old, torch.ones(1, 1), torch.ones(1, 1))
    assert loss.dtype == torch.float64 and loss.item() == pytest.approx(-1 - 1e-12, abs=1e-15)
    half, _ = policy_loss(logprobs.half(), old.half(), torch.ones(1, 1), torch.ones(1, 1))
    assert half.dtype == torch.float32


@pytest.mark.parametrize("denominator", [0, -1.0, math.nan, torch.tensor(0)])
def test_trainable_tokens_are_not_divided_by_nothing(denominator: Any) -> None:
    x = torch.ones(1, 2)
    for loss in (policy_loss(x, x, x, x, denominator=2), value_loss(x, x, x, x, denominator=2)):
        assert loss[0].isfinite()
    for work in (
        lambda: policy_loss(x, x, x, x, denominator=denominator),
        lambda: value_loss(x, x, x, x, denominator=denominator),
        lambda: aggregate(torch.ones(2, 2), tensor([[1, 0], [0, 0]]), "token_mean", denominator=denominator),
    ):
        with pytest.raises(ValueError, match="denominator must be above 0 where tokens are trainable"):
            work()
    assert aggregate(torch.ones(1, 1), torch.ones(1, 1), "token_mean", denominator=0.5).item() == 2.0


X, ONES = torch.zeros(1, 2), torch.ones(1, 2)


@pytest.mark.parametrize(
    ("said", "work"),
    [
        ("does not match the loss_mask's", lambda: policy_loss(X, X, X, torch.ones(1, 3))),
        ("unknown ratio_level 'row'", lambda: correction_weights(X, X, ONES, kind="tis", high=5.0, ratio_level="row")),
        ("unknown ratio_level", lambda: policy_loss(X, X, X, ONES, ratio_level="word")),
        ("dual_clip must be above 1", lambda: policy_loss(X, X, X, ONES, dual_clip=1.0)),
        ("unknown aggregation 'mean'", lambda: aggregate(X, ONES, "mean")),
        ("unknown importance correction", lambda: importance_weights(X, X, ONES, kind="none")),
        ("needs a constant_length above 0", lambda: policy_loss(X, X, X, ONES, aggregation="constant")),
        ("needs a constant_length above 0", lambda: aggregate(X, ONES, "constant", constant_length=0)),
        ("needs a constant_length above 0", lambda: count_for(ONES, "constant", -1.0)),
    ],
)  # fmt: skip
def test_bad_arguments(said: str, work: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=said):
        work()
    assert count_for(torch.ones(2, 2), "constant", 0.5).item() == 1.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_flat"),
    [(math.exp(20.5), -1.0, True), (math.exp(19.5), -1.0, False), (math.exp(-20.5), 1.0, True),
     (math.exp(-19.5), 1.0, False), (1.1, 0.0, True)],
)  # fmt: skip
def test_past_the_limit_of_log_ratios_nothing_moves(ratio: float, advantage: float, is_flat: bool) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(logprobs, torch.zeros(1, 1, dtype=torch.float64), tensor([[advantage]]), torch.ones(1, 1))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient.item() == pytest.approx(0.0 if is_flat else -advantage * ratio, rel=1e-9)
