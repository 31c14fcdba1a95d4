"""Estimators of the KL divergence from the reference policy, and its adaptive weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ESTIMATES: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "k1": (lambda d: d, -10.0, 10.0),
    "k2": (lambda d: d.square() / 2, -math.sqrt(20), math.sqrt(20)),
    "k3": (lambda d: torch.expm1(-d) + d, -2.610868638149876, 10.999983298020256),
}  # Each estimator, and the d at which it reaches ±10 on each side


def estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token from d = ``logprobs - ref_logprobs``. k1 = d, k2 = d²/2,
    k3 = e^-d - 1 + d (Schulman, http://joschu.net/blog/kl-approx.html), each clamped to ±10. Beyond the clamp the
    gradient is the one at the clamp, not 0: a token far from the reference is still pulled back, with bounded force.
    Same shape as the inputs, float32 (float64 given float64); no gradient reaches the reference. Raises ValueError for
    an unknown estimator."""
    if estimator not in ESTIMATES:
        raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2 or k3")
    formula, low, high = ESTIMATES[estimator]
    wide = torch.float64 in (logprobs.dtype, ref_logprobs.dtype)
    dtype = torch.float64 if wide else torch.float32
    d = logprobs.to(dtype) - ref_logprobs.detach().to(dtype)
    # The value of the clamped d with the gradient of d itself; an infinite d has no gradient.
    return formula(d.detach().clamp(low, high) + torch.where(d.isfinite(), d - d.detach(), 0))


@dataclass
class AdaptiveKL:
    """The KL weight, adapted to keep the measured KL near ``target`` (Ziegler et al., arXiv 1909.08593). ``target``
    None keeps ``coef`` fixed; ``horizon`` is in trajectories. Raises ValueError unless both are above 0."""

    coef: float
    target: float | None = None
    horizon: float = 10000

    def __post_init__(self) -> None:
        for name, value in (("target", self.target), ("horizon", self.horizon)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"the KL's {name} must be above 0, got {value}")

    def update(self, kl: float, num_trajectories: int) -> float:
        """Set and return coef * (1 + clip(kl / target - 1, ±0.2) * num_trajectories / horizon)."""
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}")
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * num_trajectories / self.horizon
        return self.coef
