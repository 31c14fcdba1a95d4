"""Advantage estimators: pure functions on tensors.

Group estimators compare the rewards ``(num_groups, group_size)`` of rollouts of one question with each other and
return that shape; ``gae`` and ``whiten`` work on tokens ``(B, T)``. Masks may be bool, int or float; arithmetic is in
float32, or float64 when given float64; whatever stands outside the mask is never read, and is 0 in every result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def group_norm(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """Center each group and divide by its sample standard deviation (n - 1) plus ``eps``.

    GRPO, arXiv 2402.03300 section 4.1. The paper does not say which standard deviation; verl and OpenRLHF take this.
    """
    centred = _centred(rewards)
    return centred / (centred.square().sum(1, keepdim=True) / (rewards.shape[1] - 1)).sqrt().add(eps)


def dr_grpo(rewards: Tensor) -> Tensor:
    """Center each group and leave its spread alone: hard and easy questions weigh alike (Dr. GRPO, 2503.20783)."""
    return _centred(rewards)


def rloo(rewards: Tensor) -> Tensor:
    """Subtract from each reward the mean of the group's *others* (leave-one-out, arXiv 2402.14740)."""
    centred = _centred(rewards)
    size = rewards.shape[1]
    return centred * (size / (size - 1))


def reinforce_baseline(rewards: Tensor) -> Tensor:
    """Subtract the group's mean; whitened over the batch afterwards (REINFORCE++-baseline, arXiv 2501.03262)."""
    return _centred(rewards)


def reinforce(rewards: Tensor) -> Tensor:
    """Return the rewards unchanged, groups of one included; whitened over the batch afterwards (REINFORCE++)."""
    return _groups(rewards, smallest=1)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "group_norm": group_norm,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "reinforce": reinforce,
}
"""The group estimators by name; ``gae`` needs a critic's values and stands apart."""


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) from trainable token to next trainable token.

    ``rewards``, ``values``, ``mask`` are ``(B, T)``; returns ``(advantages, returns)`` of that shape. The value after a
    row's last trainable token is 0. Observation tokens take no step in time, so neither their values nor their
    rewards matter and gamma does not shrink across a tool result (verl does the same; OpenRLHF runs through them).
    """
    trainable = mask.bool()
    rewards, values = _masked(rewards, trainable), _masked(values, trainable)
    next_value = next_advantage = values.new_zeros(len(values))
    columns = [values[:, :0]]
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(trainable[:, t], values[:, t], next_value)
        next_advantage = torch.where(trainable[:, t], advantage, next_advantage)
        columns.append(advantage[:, None])
    advantages = _masked(torch.cat(columns[::-1], dim=1), trainable)
    return advantages, advantages + values


def whiten(advantages: Tensor, mask: Tensor, *, over: Tensor | None = None) -> Tensor:
    """Shift and scale ``(B, T)`` to mean 0 and variance 1 over the mask: (A - mean) * rsqrt(max(biased var, 1e-8)).

    ``over`` ``(P,)`` are the advantages that mean and variance are of, where these are part of them; None: the mask's.
    """
    trainable = mask.bool()
    advantages = _masked(advantages, trainable)
    whole = advantages if over is None else over
    count = trainable.sum().clamp(min=1) if over is None else over.numel()
    mean = whole.sum() / count
    centred = _masked(advantages - mean, trainable)
    variance = (centred if over is None else over - mean).square().sum() / count
    return centred * variance.clamp(min=1e-8).rsqrt()


def rewards_to_go(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Sum at each trainable token what comes from it on: G_t = r_t + gamma * G_t', t' the next trainable token.

    ``rewards`` and ``mask`` are ``(B, T)``, as is the result. REINFORCE++ (arXiv 2501.03262): r_t is -coef * kl_t, plus
    what the trajectory is worth at its last trainable token.
    """
    trainable = mask.bool()
    rewards = _masked(rewards, trainable)
    if gamma == 1:
        return _masked(rewards.flip(1).cumsum(1).flip(1), trainable)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), trainable, gamma=gamma, lam=1.0)
    return advantages


def _groups(rewards: Tensor, smallest: int = 2) -> Tensor:
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be (num_groups, group_size), got shape {tuple(rewards.shape)}")
    if rewards.shape[1] < smallest:
        raise ValueError(f"group_size must be at least {smallest} to compare rollouts, got {rewards.shape[1]}")
    return rewards if rewards.dtype == torch.float64 else rewards.float()


def _centred(rewards: Tensor) -> Tensor:
    rewards = _groups(rewards)
    shifted = rewards - rewards[:, :1]  # equal rewards center to exactly 0, whatever their mean rounds to
    return shifted - shifted.mean(1, keepdim=True)


def _masked(tensor: Tensor, trainable: Tensor) -> Tensor:
    tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
    return torch.where(trainable, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
