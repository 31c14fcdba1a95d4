"""From a trajectory's reward to per-token advantages: group, KL, discount, critic, whitening.

A trajectory that its chat template split into several samples is one row here: its trained tokens are in sampling
order, so that reward and value flow back from the last sample to the first (docs/decisions/0003). Arithmetic is on the
CPU: GAE is a loop over tokens, which would be slow on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from emailrl.errors import EmailRLError
from emailrl.ranks import ALONE, Ranks
from emailrl.settings import AlgorithmSettings
from emailrl.training.advantages import ESTIMATORS, gae, rewards_to_go, whiten
from emailrl.training.algorithms import Algorithm
from emailrl.training.kl import estimate
from emailrl.training.step.prepared import Prepared
from emailrl.trajectory import TrajectoryGroup


def terminal_rewards(groups: Sequence[TrajectoryGroup], algorithm: Algorithm) -> dict[str, float]:
    """The reward of each trajectory at its last trainable token, by id; groups may differ in size.

    This is the output of the algorithm's group estimator: relative to the group, or unchanged. Raises EmailRLError if
    a reward is not finite, ValueError for a group too small to compare.
    """
    estimator = ESTIMATORS[algorithm.group_estimator]
    paid: dict[str, float] = {}
    for group in groups:
        for trajectory in group.trajectories:
            if not math.isfinite(trajectory.reward):
                raise EmailRLError(f"Trajectory {trajectory.id} has reward {trajectory.reward}.", "Check the reward.")
        rewards = torch.tensor([[trajectory.reward for trajectory in group.trajectories]], dtype=torch.float64)
        ids = [trajectory.id for trajectory in group.trajectories]
        paid.update(zip(ids, estimator(rewards).flatten().tolist(), strict=True))
    return paid


def shape_advantages(
    items: Sequence[Prepared],
    paid: Mapping[str, float],
    algorithm: Algorithm,
    wanted: AlgorithmSettings,
    *,
    kl_coef: float,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """Set ``advantages``, and with a critic ``returns``, on a step's micro-batches; return the critic's metrics.

    ``items`` hold each of the rank's samples once; whitening and metrics are over all ranks. ``paid``, the reward of
    each trajectory by id, is clipped to [REWARD_CLIP_LOW, REWARD_CLIP_HIGH].
    """
    rows = _Trajectories(items)
    rewards = rows.pay_at_the_end([_clipped(paid[trajectory_id], wanted) for trajectory_id in rows.ids])
    if algorithm.kl_in == "reward" and kl_coef:
        rewards = rewards - kl_coef * rows.gather([_kl(item, algorithm) for item in items])
    metrics: dict[str, float] = {}
    if algorithm.has_critic:
        values = rows.gather([_known(item.old_values) for item in items])
        advantages, returns = gae(rewards, values, rows.mask, gamma=wanted.gamma, lam=wanted.gae_lambda)
        metrics = _critic_metrics(_of_all(ranks, values[rows.mask]), _of_all(ranks, returns[rows.mask]))
        for item, part in zip(items, rows.scatter(returns), strict=True):
            item.returns = part
    else:
        advantages = rewards_to_go(rewards, rows.mask, gamma=wanted.gamma)
    if algorithm.whiten:
        over = None if ranks.is_alone else _of_all(ranks, advantages[rows.mask])
        advantages = whiten(advantages, rows.mask, over=over)
    for item, part in zip(items, rows.scatter(advantages), strict=True):
        item.advantages = part
    return metrics


class _Trajectories:
    """A step's trained tokens, one row per trajectory ``(N, L)``, and the mapping back to its micro-batches."""

    def __init__(self, items: Sequence[Prepared]) -> None:
        self._items = items
        self._masks = [item.batch.loss_mask.cpu() for item in items]
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        places = {i: (n, row) for n, item in enumerate(items) for row, i in enumerate(item.batch.indices)}
        for _, (n, row) in sorted(places.items()):
            self._pieces.setdefault(items[n].samples[row].trajectory_id, []).append((n, row))
        self.ids = list(self._pieces)
        self.mask = self.gather([mask.float() for mask in self._masks]).bool()

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Micro-batches' ``(B, T)`` to ``(N, L)``, 0 after a row's end."""
        host = [tensor.cpu() for tensor in tensors]
        rows = [torch.cat([host[n][row][self._masks[n][row]] for n, row in pieces]) for pieces in self._pieces.values()]
        return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0)

    def scatter(self, trajectories: Tensor) -> list[Tensor]:
        """The inverse of ``gather``, on the micro-batches' device; 0 outside the loss mask."""
        parts = [trajectories.new_zeros(mask.shape) for mask in self._masks]
        for values, pieces in zip(trajectories, self._pieces.values(), strict=True):
            start = 0
            for n, row in pieces:
                mask = self._masks[n][row]
                end = start + int(mask.sum())
                parts[n][row, mask] = values[start:end]
                start = end
        return [part.to(item.batch.loss_mask.device) for part, item in zip(parts, self._items, strict=True)]

    def pay_at_the_end(self, paid: Sequence[float]) -> Tensor:
        """``(N, L)`` with each trajectory's number at its last token, 0 elsewhere."""
        rewards = torch.zeros(self.mask.shape)
        last = self.mask.sum(dim=1) - 1
        rewards[torch.arange(len(rewards)), last] = torch.tensor(paid, dtype=rewards.dtype)
        return rewards


def _of_all(ranks: Ranks, values: Tensor) -> Tensor:
    """The trained tokens of all ranks ``(P,)``."""
    return torch.cat(ranks.gather(values))


def _clipped(reward: float, wanted: AlgorithmSettings) -> float:
    low, high = wanted.reward_clip_low, wanted.reward_clip_high
    reward = reward if high is None else min(reward, high)
    return reward if low is None else max(reward, low)


def _kl(item: Prepared, algorithm: Algorithm) -> Tensor:
    return estimate(_known(item.old_logprobs), _known(item.ref_logprobs), algorithm.kl_estimator)


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _critic_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """How well the critic predicted the returns; explained variance 1 is perfect, 0 no better than a constant."""
    variance = float(returns.var(correction=0))
    explained = 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "explained_variance": explained,
    }
