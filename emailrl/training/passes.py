"""Which passes without gradients a step makes before its first update: for the updater and for ``emailrl plan``."""

from __future__ import annotations

from emailrl.training.algorithms import Algorithm


def needs_reference(kl_coef: float) -> bool:
    """Whether the reference policy scores the samples."""
    return kl_coef > 0


def needs_old_logprobs(algorithm: Algorithm, *, kl_coef: float, updates: int) -> bool:
    """Whether the policy scores the samples beforehand; else the first pass of the only update says as much.

    ``updates`` are those of the step. A critic's values and a KL in the reward are needed for the advantages.
    """
    return algorithm.has_critic or (algorithm.kl_in == "reward" and kl_coef > 0) or updates > 1
