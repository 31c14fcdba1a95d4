"""The losses of the training math against ``formulas.py``: values to 1e-10, and gradients by differences there.

Both get the same random numbers in float64; float32 is held to 1e-5 of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from training import formulas
from training.formulas import Mask, Row, Rows, kept, spread_out

from emailrl.training import advantages as adv
from emailrl.training import losses

SEEDS = range(12)


def tensor(numbers: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def equal(actual: Tensor, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual.detach().double(), tensor(expected), atol=tolerance, rtol=tolerance)


class Draw:
    """A random batch: rows of one width, a mask with holes and now and then an empty row."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.height, self.width = self.random.randint(1, 5), self.random.randint(1, 9)
        self.mask: Mask = [[self.random.random() < 0.6 for _ in range(self.width)] for _ in range(self.height)]
        if self.height > 2:
            self.mask[1] = [False] * self.width
        self.mask[0][0] = True

    def rows(self, low: float, high: float) -> Rows:
        """Uniform numbers, and what must never be read outside the mask."""
        fate = [math.nan, math.inf, -math.inf, 1e30, 0.0]
        return [
            [self.random.uniform(low, high) if trained else self.random.choice(fate) for trained in row]
            for row in self.mask
        ]

    def near(self, rows: Rows, width: float) -> Rows:
        """Numbers up to ``width`` from those of ``rows``."""
        return [
            spread_out([number + self.random.uniform(-width, width) for number in row], mask, elsewhere=math.nan)
            for (row,), mask in zip(self.kept(rows), self.mask, strict=True)
        ]

    def kept(self, *of: Rows) -> Iterator[tuple[Row, ...]]:
        """For each row the trained numbers of each of ``of``."""
        for i, mask in enumerate(self.mask):
            yield tuple(kept(rows[i], mask) for rows in of)

    def spread(self, rows: Rows) -> Rows:
        """Rows of trained numbers in their places."""
        return [spread_out(row, mask) for row, mask in zip(rows, self.mask, strict=True)]


def differences(function: Callable[[Rows], float], rows: Rows, mask: Mask) -> Rows:
    """The gradient of a function of the trained numbers, by central differences; 0 elsewhere."""
    step, gradient = 1e-6, [[0.0] * len(row) for row in rows]
    for b, row in enumerate(rows):
        for t, number in enumerate(row):
            if mask[b][t]:
                sides = []
                for moved in (number + step, number - step):
                    row[t] = moved
                    sides.append(function(rows))
                row[t] = number
                gradient[b][t] = (sides[0] - sides[1]) / (2 * step)
    return gradient


ADVANTAGES = {name: lambda x, name=name: adv.ESTIMATORS[name](x) for name in adv.ESTIMATORS} | {
    "gae": lambda x: adv.gae(x, x.flip(1), x > -1, gamma=0.9, lam=0.8),
    "whiten": lambda x: adv.whiten(x, x > -1),
    "rewards_to_go": lambda x: adv.rewards_to_go(x, x > -1, gamma=0.9),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_gradients_of_advantages_are_their_differences(name: str) -> None:
    x = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4 - 2
    assert torch.autograd.gradcheck(ADVANTAGES[name], x.requires_grad_())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_policy_loss(aggregation: Any, level: Any, dual: float | None, weighted: bool, seed: int) -> None:
    draw = Draw(seed)
    low, high, length = draw.random.uniform(0.05, 0.3), draw.random.uniform(0.05, 0.4), draw.random.uniform(1, 20)
    old, advantages, weights = draw.rows(-4, 0), draw.rows(-2, 2), draw.rows(0, 3)
    logprobs = draw.near(old, draw.random.choice([0.1, 1.0]))
    ones = [[1.0] * draw.width] * draw.height

    def expected(of: Rows) -> tuple[float, Row, list[bool]]:
        rows, seen, idle = [], [], []
        for now, before, row, weight in draw.kept(of, old, advantages, weights if weighted else ones):
            ratio = formulas.ratios(now, before, level) if now else []
            rows.append([
                w * formulas.token_loss(r, a, low, high, dual) for r, a, w in zip(ratio, row, weight, strict=True)
            ])  # fmt: skip
            seen += ratio
            idle += [formulas.is_idle(r, a, low, high, dual) for r, a in zip(ratio, row, strict=True)]
        return formulas.combined(rows, aggregation, length), seen, idle

    at = tensor(logprobs).requires_grad_()
    options = {"dual_clip": dual, "weights": tensor(weights) if weighted else None, "ratio_level": level}
    loss, metrics = losses.policy_loss(
        at, tensor(old), tensor(advantages), torch.tensor(draw.mask), clip_low=low, clip_high=high,
        aggregation=aggregation, constant_length=length, **options,
    )  # fmt: skip
    value, ratio, idle = expected(logprobs)
    equal(loss, value)
    (gradient,) = torch.autograd.grad(loss, at)
    equal(gradient, differences(lambda rows: expected(rows)[0], logprobs, draw.mask), 1e-6)
    assert metrics["clip_fraction"] == pytest.approx(sum(idle) / len(idle))
    assert metrics["ratio_mean"] == pytest.approx(sum(ratio) / len(ratio), rel=1e-9)
    assert (metrics["ratio_min"], metrics["ratio_max"]) == pytest.approx((min(ratio), max(ratio)), rel=1e-9)
    k3 = [r - 1 - math.log(r) for r in ratio]
    assert metrics["approx_kl"] == pytest.approx(sum(k3) / len(k3), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_cispo(aggregation: Any, level: Any, seed: int) -> None:
    draw, length, low, high = Draw(seed), 7.5, 0.2, 0.4
    old, advantages = draw.rows(-4, 0), draw.rows(-2, 2)
    logprobs = draw.near(old, 1.0)
    found = [formulas.ratios(now, before, level) if now else [] for now, before in draw.kept(logprobs, old)]
    weights = draw.spread([[formulas.clip(each, 1 - low, 1 + high) for each in row] for row in found])

    def expected(of: Rows) -> float:
        rows = [list(map(formulas.cispo_loss, *each)) for each in draw.kept(weights, advantages, of)]
        return formulas.combined(rows, aggregation, length)

    at = tensor(logprobs).requires_grad_()
    loss, _ = losses.policy_loss(
        at, tensor(old), tensor(advantages), torch.tensor(draw.mask), clip_low=low, clip_high=high,
        surrogate="cispo", ratio_level=level, aggregation=aggregation, constant_length=length,
    )  # fmt: skip
    equal(loss, expected(logprobs))
    (gradient,) = torch.autograd.grad(loss, at)
    equal(gradient, differences(expected, logprobs, draw.mask), 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_rows_apart_with_the_whole_count_add_up_to_the_whole(aggregation: Any, seed: int) -> None:
    draw = Draw(seed)
    numbers, length = draw.rows(-2, 2), 7.5
    whole = formulas.combined([row for (row,) in draw.kept(numbers)], aggregation, length)
    mask = torch.tensor(draw.mask)
    count = losses.count_for(mask, aggregation, length)
    parts = [
        losses.aggregate(tensor([row]), mask[i : i + 1], aggregation, constant_length=length, denominator=count)
        for i, row in enumerate(numbers)
    ]
    equal(torch.stack(parts).sum(), whole)
    equal(losses.aggregate(tensor(numbers), mask, aggregation, constant_length=length), whole)
