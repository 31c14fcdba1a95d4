"""Detect when a run stops improving: evaluations are compared per question, so that noise does not end a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emailrl.evaluation.statistics import Z_95

Shares = Mapping[str, float]
"""Share of correct answers per question of an evaluation, by id."""


@dataclass(frozen=True, slots=True)
class Change:
    """How an accuracy changed, with its 95% interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:+.1f} points, 95% interval {100 * self.low:+.1f} to {100 * self.high:+.1f}"


def change(before: Sequence[Shares], after: Sequence[Shares]) -> Change | None:
    """Compare two series of evaluations on their common questions, each averaged within its series.

    The interval is mean ± 1.96 · s / √n over the n differences, s with n - 1: evaluations of one question are not
    independent, so n counts questions. None for fewer than two questions.
    """
    first, second = _means(before), _means(after)
    differences = [second[name] - first[name] for name in sorted(first.keys() & second.keys())]
    if len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    half = Z_95 * statistics.stdev(differences) / math.sqrt(len(differences))
    return Change(mean, mean - half, mean + half)


def no_longer_rising(shares: Sequence[Shares], patience: int) -> Change | None:
    """The change from the previous ``patience`` evaluations to the last ``patience``, if its interval excludes a rise.

    None while there are fewer evaluations, or the interval reaches above 0.
    """
    if len(shares) < 2 * patience:
        return None
    found = change(shares[-2 * patience : -patience], shares[-patience:])
    return found if found is not None and found.high <= 0 else None


def _means(evaluations: Sequence[Shares]) -> dict[str, float]:
    """The mean share of each question over the evaluations that judged it."""
    seen: dict[str, list[float]] = {}
    for shares in evaluations:
        for name, share in shares.items():
            seen.setdefault(name, []).append(share)
    return {name: sum(shares) / len(shares) for name, shares in seen.items()}
