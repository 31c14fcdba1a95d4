"""Results of a step's updates: metrics over its micro-batches, and numbers per token."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """One sample's token numbers in its last pass; lists as long as its ids, meaningless outside its mask."""

    old_logprobs: list[float]
    logprobs: list[float]
    advantages: list[float]


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Results of a step's updates."""

    metrics: dict[str, float] = field(default_factory=dict)
    tokens: list[TokenNumbers] = field(default_factory=list)
    """Per sample, in order."""


class Meter:
    """Weighted means and extremes: a name that ends in ``_min`` or ``_max`` keeps the extreme."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.weights: defaultdict[str, float] = defaultdict(float)
        self.extremes: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Count ``value`` with ``weight`` into the mean of ``name``, or take it as its extreme."""
        if name.endswith(("_min", "_max")):
            pick = min if name.endswith("_min") else max
            self.extremes[name] = pick(self.extremes.get(name, value), value)
        else:
            self.sums[name] += value * weight
            self.weights[name] += weight

    def merge(self, other: Meter) -> None:
        """Add the means and extremes of ``other``."""
        for name, value in other.sums.items():
            self.sums[name] += value
            self.weights[name] += other.weights[name]
        for name, value in other.extremes.items():
            self.add(name, value)

    def means(self) -> dict[str, float]:
        """Return every metric under its name."""
        return {name: value / self.weights[name] for name, value in self.sums.items()} | self.extremes
