"""Advantage estimators: pure functions on tensors. Group estimators compare the rewards ``(num_groups, group_size)`` of
the rollouts of each question and return the same shape; ``gae`` and ``whiten`` work on tokens ``(B, T)``. Masks may be
bool, int or float; arithmetic is in float32, or float64 when given float64; values outside the mask are never read, and
are 0 in every result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from emailrl.training.kl import estimate
from emailrl.training.losses import masked


def group_norm(rewards: Tensor, eps: float = 1e-4) -> Tensor:
    """Center each group and divide by its sample standard deviation (n - 1) plus ``eps``. GRPO, arXiv 2402.03300
    section 4.1. The paper does not specify which; verl and OpenRLHF use this one."""
    centred = _centred(rewards)
    return centred / (centred.square().sum(1, keepdim=True) / (rewards.shape[1] - 1)).sqrt().add(eps)


def dr_grpo(rewards: Tensor) -> Tensor:
    """Center each group without scaling: hard and easy questions weigh the same (Dr. GRPO, 2503.20783)."""
    return _centred(rewards)


def rloo(rewards: Tensor) -> Tensor:
    """Subtract from each reward the mean of the group's *others* (leave-one-out, arXiv 2402.14740)."""
    centred = _centred(rewards)
    size = rewards.shape[1]
    return centred * (size / (size - 1))


def reinforce_baseline(rewards: Tensor) -> Tensor:
    """Subtract the group's mean, before whitening over the batch (REINFORCE++-baseline, arXiv 2501.03262)."""
    return _centred(rewards)


def reinforce(rewards: Tensor) -> Tensor:
    """Return the rewards unchanged, for any group size, before whitening over the batch (REINFORCE++)."""
    return _groups(rewards, smallest=1)


_BY_GROUP: tuple[Callable[[Tensor], Tensor], ...] = (group_norm, dr_grpo, rloo, reinforce_baseline, reinforce)
ESTIMATORS = {estimator.__name__: estimator for estimator in _BY_GROUP}
"""The group estimators by name; ``gae`` is separate because it needs a critic's values."""


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438) from each trainable token to the next. ``rewards``,
    ``values``, ``mask`` are ``(B, T)``; returns ``(advantages, returns)`` of that shape. The value after a row's last
    trainable token is 0. Observation tokens are not time steps: their values and rewards are ignored, and a tool result
    adds no discount (as in verl; OpenRLHF counts them as steps)."""
    trainable = mask.bool()
    rewards, values = masked(rewards, trainable), masked(values, trainable)
    next_value = next_advantage = values.new_zeros(len(values))
    columns = [values[:, :0]]
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(trainable[:, t], values[:, t], next_value)
        next_advantage = torch.where(trainable[:, t], advantage, next_advantage)
        columns.append(advantage[:, None])
    advantages = masked(torch.cat(columns[::-1], dim=1), trainable)
    return advantages, advantages + values


def teacher_gap(logprobs: Tensor, teacher_logprobs: Tensor, sampled: Tensor) -> Tensor:
    """On-policy distillation: log p_teacher - log p_policy of each ``sampled`` token, the negative of a sample of
    KL(policy || teacher), clamped to ±10 as in ``kl.estimate``. All ``(B, T)``. Each token counts alone: discount 0
    (Thinking Machines, https://thinkingmachines.ai/blog/on-policy-distillation)."""
    return masked(-estimate(logprobs, teacher_logprobs, "k1"), sampled.bool())


def whiten(advantages: Tensor, mask: Tensor, *, over: Tensor | None = None) -> Tensor:
    """Shift and scale ``(B, T)`` to mean 0 and variance 1 over the mask: (A - mean) * rsqrt(max(biased var, 1e-8)).
    ``over`` ``(P,)`` are the advantages to take mean and variance from (a superset of these); None: those in the
    mask."""
    trainable = mask.bool()
    advantages = masked(advantages, trainable)
    whole = advantages if over is None else over
    count = trainable.sum().clamp(min=1) if over is None else over.numel()
    mean = whole.sum() / count
    centred = masked(advantages - mean, trainable)
    variance = (centred if over is None else over - mean).square().sum() / count
    return centred * variance.clamp(min=1e-8).rsqrt()


def rewards_to_go(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return at each trainable token: G_t = r_t + gamma * G_t', where t' is the next trainable token. ``rewards`` and
    ``mask`` are ``(B, T)``, as is the result. REINFORCE++ (arXiv 2501.03262): r_t is -coef * kl_t, plus the
    trajectory's reward at its last trainable token."""
    trainable = mask.bool()
    rewards = masked(rewards, trainable)
    if gamma == 1:
        return masked(rewards.flip(1).cumsum(1).flip(1), trainable)
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
