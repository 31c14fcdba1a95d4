"""Losses and importance weights against numbers worked out by hand; the properties of a mask, a clip and a bound."""

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
    log_weights,
    policy_loss,
    value_loss,
)

NAN, INF = math.nan, math.inf


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
        # -w A (ln r - 1), with the slope -w A: ln 1.5 = 0.405465, ln 0.5 = -0.693147, ln 8 = 2.079442
        (1.5, 1.0, {"surrogate": "cispo"}, 0.713442, -1.2),
        (0.5, 1.0, {"surrogate": "cispo"}, 1.354518, -0.8),
        (1.1, -2.0, {"surrogate": "cispo"}, -1.990318, 2.2),
        (0.5, -1.0, {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}, -0.846574, 0.5),
        (8.0, -1.0, {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}, 5.397208, 5.0),
        (1.5, 1.0, {"surrogate": "cispo", "weights": tensor([[0.5]])}, 0.356721, -0.6),
    ],
)
def test_one_token(ratio: float, advantage: float, options: dict[str, Any], loss: float, gradient: float) -> None:
    logprobs = tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    found, _ = policy_loss(logprobs, tensor([[-1.0]]), tensor([[advantage]]), torch.ones(1, 1), **options)
    (slope,) = torch.autograd.grad(found, logprobs)
    assert (found.item(), slope.item()) == pytest.approx((loss, gradient), abs=1e-5)


def test_cispo_over_tokens() -> None:
    # Ratios 2, 1/4 and 1 with weights 2, 0.5 (bounded below) and 1: (2 · 1 · 1 + 0.5 · -3 · 2 + 1 · 1 · 3) / 3.
    logprobs = tensor([[-1.0, NAN, -2.0], [-3.0, INF, 7.0]], requires_grad=True)
    old = tensor([[-1.0 - math.log(2), 0.0, -2.0 + math.log(4)], [-3.0, NAN, 0.0]])
    loss, metrics = policy_loss(
        logprobs, old, tensor([[1.0, NAN, -3.0], [1.0, 5.0, 5.0]]), tensor([[1, 0, 1], [1, 0, 0]]),
        surrogate="cispo", clip_low=0.5, clip_high=4.0,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(2 / 3, abs=1e-6) and metrics["clip_fraction"] == pytest.approx(1 / 3)
    expected = tensor([[-2 / 3, 0.0, 0.5], [-1 / 3, 0.0, 0.0]])
    torch.testing.assert_close(logprobs.grad, expected, atol=1e-6, rtol=0)


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
    below = tensor([[-1.0]]), tensor([[0.0]]), tensor([[-2.0]]), torch.ones(1, 1)
    assert value_loss(*below, clip=0.5)[0].item() == 1.125  # from -0.5, half of 2.25
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
        ("needs a constant_length above 0", lambda: aggregate(X, ONES, "constant")),
        ("needs a constant_length above 0", lambda: count_for(ONES, "constant")),
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


def test_importance_weights() -> None:
    # Ratios 2, 1/4, 8: the first row's geometric mean is 4^(1/3) = 1.59, the second's (8 * 8)^(1/2) = 8.
    old = torch.log(tensor([[2.0, 0.25, 8.0], [8.0, 1.0, 8.0]])).requires_grad_()
    sampler, mask = tensor([[0.0, 0.0, 0.0], [0.0, NAN, 0.0]]), tensor([[1, 1, 1], [1, 0, 1]])
    expected = {
        "tis": [[2, 0.25, 5], [5, 0, 5]],
        "icepop": [[2, 0, 0], [0, 0, 0]],
        "sequence_mask": [[2, 0.25, 8], [0, 0, 0]],
    }
    for kind, weights in expected.items():
        actual = importance_weights(old, sampler, mask, kind=kind)  # type: ignore[arg-type]
        torch.testing.assert_close(actual, tensor(weights, dtype=torch.float32), atol=1e-5, rtol=0)
        assert not actual.requires_grad
    assert not importance_weights(old, sampler, mask, kind="sequence_mask", low=1.6).any()
    raised = importance_weights(old, sampler, mask, low=0.5)
    torch.testing.assert_close(raised, tensor([[2.0, 0.5, 5.0], [5.0, 0.0, 5.0]]), atol=1e-5, rtol=0)
    narrow = importance_weights(old, sampler, mask, low=1.0, high=3.0)
    torch.testing.assert_close(narrow, tensor([[2.0, 1.0, 3.0], [3.0, 0.0, 3.0]]), atol=1e-5, rtol=0)


def test_tokens_that_no_sampler_drew_weigh_one_and_count_in_no_mean() -> None:
    # Weights 2, none, 8 and 8, none, none: geometric means 4 and 8; with the unsampled ones counted 2.52 and 2.
    old = torch.log(tensor([[2.0, 3.0, 8.0], [8.0, 0.1, 0.1]]))
    sampler, mask = tensor([[0.0, NAN, 0.0], [0.0, NAN, NAN]]), tensor([[1, 1, 1], [1, 1, 0]])
    expected = {
        "tis": [[3, 1, 5], [5, 1, 0]],  # low 3: the bounds are not for what was not drawn
        "icepop": [[0, 1, 0], [0, 1, 0]],
        "sequence_mask": [[2, 1, 8], [0, 0, 0]],
    }
    for kind, weights in expected.items():
        actual = importance_weights(old, sampler, mask, kind=kind, low=3.0)  # type: ignore[arg-type]
        torch.testing.assert_close(actual, tensor(weights, dtype=torch.float32), atol=1e-5, rtol=0)
    unsampled = importance_weights(old, torch.full((2, 3), NAN), mask, kind="sequence_mask", high=1.0)
    assert unsampled.tolist() == [[1, 1, 1], [1, 1, 0]]


def test_log_weights() -> None:
    old = tensor([[-1.0, -50.0, -1.0, -3.0, -2.0]], requires_grad=True)
    sampler, mask = tensor([[-3.0, -1.0, -90.0, NAN, -1.0]]), tensor([[1, 1, 1, 1, 0]])
    gap = log_weights(old, sampler, mask)
    assert gap.tolist() == [[2.0, -20.0, 20.0, 0.0, 0.0]] and not gap.requires_grad
    assert importance_weights(old, sampler, mask, high=math.inf, low=0).isfinite().all()


def test_correction_by_token_says_what_the_bounds_did() -> None:
    old = torch.log(tensor([[2.0, 0.25, 8.0, 1.0]]))
    sampler, mask = tensor([[0.0, 0.0, 0.0, NAN]]), torch.ones(1, 4)
    weights, said = correction_weights(old, sampler, mask, kind="tis", low=0.5, high=5.0)
    torch.testing.assert_close(weights, tensor([[2.0, 0.5, 5.0, 1.0]]), atol=1e-5, rtol=0)
    assert said == pytest.approx(
        {"correction_mean": 2.5, "correction_min": 0.25, "correction_max": 8, "correction_cut_fraction": 2 / 3},
        abs=1e-5,
    )
    weights, _ = correction_weights(old, sampler, mask, kind="tis", high=5.0)  # bounded below by 0
    torch.testing.assert_close(weights, tensor([[2.0, 0.25, 5.0, 1.0]]), atol=1e-5, rtol=0)
    _, said = correction_weights(old, sampler, mask, kind="icepop", low=0.5, high=5.0)
    assert said["correction_mean"] == pytest.approx(2 / 3, abs=1e-5)
    # The geometric mean 1.587 is inside: all are kept as they are.
    weights, said = correction_weights(old, sampler, mask, kind="sequence_mask", low=0.5, high=5.0)
    torch.testing.assert_close(weights, tensor([[2.0, 0.25, 8.0, 1.0]]), atol=1e-5, rtol=0)
    assert said["correction_cut_fraction"] == 0 and said["correction_mean"] == pytest.approx(3.416667, abs=1e-5)


@pytest.mark.parametrize(("kind", "second"), [("tis", 5.0), ("icepop", 0.0), ("sequence_mask", 0.0)])
def test_correction_by_sequence_gives_a_row_its_geometric_mean(kind: Any, second: float) -> None:
    # Rows 8 and 0.5, with a token between that no sampler drew: sqrt(4) = 2, for all three. Then 8, and nothing at all.
    old = torch.log(tensor([[8.0, 3.0, 0.5], [8.0, 1.0, 1.0], [7.0, 1.0, 1.0]]))
    sampler = tensor([[0.0, NAN, 0.0], [0.0, 0.0, 0.0], [NAN, NAN, NAN]])
    mask = tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]])
    weights, said = correction_weights(
        old, sampler, mask, kind=kind, low=0.5, high=5.0, ratio_level="sequence"
    )  # fmt: skip
    torch.testing.assert_close(weights, tensor([[2.0, 2, 2], [second, 0, 0], [1, 0, 0]]), atol=1e-5, rtol=0)
    assert said == pytest.approx(
        {
            "correction_mean": (6 + second + 1) / 5,
            "correction_min": 1.0,
            "correction_max": 8.0,
            "correction_cut_fraction": 0.2,
        },
        abs=1e-5,
    )


def test_correction_of_nothing_sampled() -> None:
    nothing = torch.full((1, 2), NAN)
    weights, said = correction_weights(torch.zeros(1, 2), nothing, torch.ones(1, 2), kind="tis", low=0.5, high=5.0)
    assert weights.tolist() == [[1.0, 1.0]] and said == {}


def test_only_the_lower_bound_zero_leaves_the_gradient_of_stale_samples_unbiased() -> None:
    """Four actions whose probabilities have moved far: most samples are of those that the policy now avoids."""
    generator = torch.Generator().manual_seed(1)
    stale, now = tensor([0.3, 0.4, 0.2, 0.1]), tensor([0.02, 0.04, 0.5, 0.44])  # w = 1/15, 1/10, 2.5, 4.4
    worth = tensor([-1.0, -1.0, 0.5, 1.0])
    score = torch.eye(4) - now  # the gradient of log now[a] with respect to the logits, by row a
    exact = (now * worth) @ score
    drawn = torch.multinomial(stale, 200_000, replacement=True, generator=generator)[None]

    def bias(**bounds: float) -> float:
        weights = importance_weights(now.log()[drawn], stale.log()[drawn], torch.ones_like(drawn), **bounds)  # type: ignore[arg-type]
        estimate = (weights[0] * worth[drawn[0]]) @ score[drawn[0]] / drawn.numel()
        return float((estimate - exact).norm() / exact.norm())

    assert bias() < 0.03 and bias(low=0.5) > 0.5


def test_a_correction_under_top_p_moves_samples_to_the_trainers_policy_on_the_kept_set() -> None:
    # The sampler keeps two of three tokens and draws them from mu = q / 0.9; w is of the unfiltered probabilities.
    q, pi, worth = tensor([0.6, 0.3, 0.1]), tensor([0.5, 0.3, 0.2]), tensor([1.0, -2.0])
    mu = q[:2] / 0.9
    w = importance_weights(pi[None, :2].log(), q[None, :2].log(), torch.ones(1, 2), low=0, high=9)[0]
    mean = float((mu * w * worth).sum() / (mu * w).sum())
    assert mean == pytest.approx((0.5 * 1 - 0.3 * 2) / 0.8, abs=1e-6)  # pi's mean over the same two
    assert float((mu * w).sum()) == pytest.approx(0.8 / 0.9, abs=1e-6)  # what is left: pi's mass there over q's
    same = importance_weights(q[None, :2].log(), q[None, :2].log(), torch.ones(1, 2), kind="icepop")
    assert same.tolist() == [[1.0, 1.0]]  # filtered log-probabilities would make this 0.9


def test_weights_on_a_bound_are_inside() -> None:
    ones = torch.zeros(1, 2)
    for kind in ("icepop", "sequence_mask"):
        for low, high in ((1.0, 2.0), (0.5, 1.0)):
            weights = importance_weights(ones, ones, torch.ones(1, 2), kind=kind, low=low, high=high)  # type: ignore[arg-type]
            assert weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence_mask"])
def test_tokens_that_are_not_trained_count_in_no_correction(kind: Any) -> None:
    # Beside a trained token of weight 1, one that is not trained stands at weight e^9.
    old, mask = tensor([[0.0, 0.0, 9.0]]), tensor([[1, 1, 0]])
    weights, said = correction_weights(old, torch.zeros(1, 3), mask, kind=kind, low=0.9, high=1.1)
    assert weights.tolist() == [[1.0, 1.0, 0.0]]
    assert list(said.values()) == [1.0, 1.0, 1.0, 0.0] and list(said)[3] == "correction_cut_fraction"
