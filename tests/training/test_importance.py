"""Importance weights between sampler and trainer, and what a step is told of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import tensor

from emailrl.training.losses import correction_weights, importance_weights, log_weights

NAN = math.nan


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
