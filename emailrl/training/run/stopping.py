"""Detect when a run stops improving: evaluations are compared per question, so that noise does not end a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emailrl.evaluation.statistics import Z_95

CERTAIN = 3.0
"""Standard errors by which accuracy must have fallen. A run asks after each evaluation: at 1.96, two thirds of level
runs are stopped within 68 evaluations (docs/decisions/0017-stopping-by-evidence.md)."""

Shares = Mapping[str, float]
"""Share of correct answers per question of an evaluation, by id."""


@dataclass(frozen=True, slots=True)
class Change:
    """How an accuracy changed, with the standard error of that."""

    mean: float
    error: float

    def __str__(self) -> str:
        low, high = (100 * (self.mean + sign * Z_95 * self.error) for sign in (-1, 1))
        return f"{100 * self.mean:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}"


def change(before: Sequence[Shares], after: Sequence[Shares]) -> Change | None:
    """Compare two series of evaluations on their common questions, each averaged within its series.

    The error is s / √n over the n differences, s with n - 1: evaluations of one question are not independent, so n
    counts questions. None for fewer than two questions.
    """
    first, second = _means(before), _means(after)
    differences = [second[name] - first[name] for name in sorted(first.keys() & second.keys())]
    if len(differences) < 2:
        return None
    return Change(statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences)))


def no_longer_rising(shares: Sequence[Shares], patience: int) -> Change | None:
    """The change from the previous ``patience`` evaluations to the last ``patience``, if it is a fall.

    That is a fall by ``CERTAIN`` standard errors, or no change of any question. None while there are fewer evaluations.
    """
    if len(shares) < 2 * patience:
        return None
    found = change(shares[-2 * patience : -patience], shares[-patience:])
    return found if found is not None and found.mean + CERTAIN * found.error <= 0 else None


def _means(evaluations: Sequence[Shares]) -> dict[str, float]:
    """The mean share of each question over the evaluations that judged it."""
    seen: dict[str, list[float]] = {}
    for shares in evaluations:
        for name, share in shares.items():
            seen.setdefault(name, []).append(share)
    return {name: sum(shares) / len(shares) for name, shares in seen.items()}
