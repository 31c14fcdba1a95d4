"""Gradient-free passes of a step before its first update, shared by the updater and ``emailrl plan``."""

from __future__ import annotations

from emailrl.settings import Settings
from emailrl.training.algorithms import Algorithm


def updates_per_step(settings: Settings) -> int:
    """Optimizer updates per step; fewer if a step has fewer trajectories than mini-batches."""
    return settings.training.num_mini_batches * settings.training.update_epochs


def needs_reference(kl_coef: float) -> bool:
    """Whether the reference policy scores the samples."""
    return kl_coef > 0


def needs_old_logprobs(algorithm: Algorithm, *, kl_coef: float, updates: int) -> bool:
    """Whether the policy scores the samples beforehand; otherwise the only update's own pass gives the same numbers.

    ``updates`` is the number per step. Advantages need a critic's values and a KL in the reward beforehand.
    """
    return algorithm.has_critic or (algorithm.kl_in == "reward" and kl_coef > 0) or updates > 1
