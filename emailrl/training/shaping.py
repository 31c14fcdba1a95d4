"""From a trajectory's reward to per-token advantages: group, KL, discount, critic, whitening; on the CPU, as GAE loops.

A trajectory that its chat template split into several samples is one row here, its trained tokens in sampling order, so
that reward and value flow back from the last sample to the first (docs/decisions/0003).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from emailrl.base.errors import EmailRLError
from emailrl.records.trajectory import TrajectoryGroup
from emailrl.settings import AlgorithmSettings
from emailrl.training.across import Across
from emailrl.training.advantages import ESTIMATORS, gae, rewards_to_go, whiten
from emailrl.training.algorithms import Algorithm
from emailrl.training.batch import MicroBatch
from emailrl.training.kl import estimate


def terminal_rewards(groups: Sequence[TrajectoryGroup], algorithm: Algorithm) -> dict[str, float]:
    """The reward of each trajectory at its last trainable token, by id; groups may differ in size.

    This is the output of the algorithm's group estimator: relative to the group, or unchanged. Raises EmailRLError if
    a reward is not finite, ValueError for a group too small to compare.
    """
    estimator = ESTIMATORS["reinforce" if algorithm.has_critic else algorithm.advantage]
    paid: dict[str, float] = {}
    for group in groups:
        rewards = {trajectory.id: trajectory.reward for trajectory in group.trajectories}
        for name, reward in rewards.items():
            if not math.isfinite(reward):
                raise EmailRLError(f"Trajectory {name} has reward {reward}.", "Check the reward.")
        shaped = estimator(torch.tensor([list(rewards.values())], dtype=torch.float64))
        paid.update(zip(rewards, shaped.flatten().tolist(), strict=True))
    return paid


def shape_advantages(
    batches: Sequence[MicroBatch],
    paid: Mapping[str, float],
    algorithm: Algorithm,
    wanted: AlgorithmSettings,
    *,
    kl_coef: float,
    across: Across,
) -> tuple[list[MicroBatch], dict[str, float]]:
    """A step's micro-batches with ``advantages``, and with a critic ``returns``; and the critic's metrics.

    ``batches`` hold each of the rank's samples once; whitening and metrics are over all ranks. ``paid``, the reward of
    each trajectory by id, is clipped to [REWARD_CLIP_LOW, REWARD_CLIP_HIGH].
    """
    rows = _Trajectories(batches)
    low = -math.inf if wanted.reward_clip_low is None else wanted.reward_clip_low
    high = math.inf if wanted.reward_clip_high is None else wanted.reward_clip_high
    # The reward is paid at a trajectory's last token.
    rewards, last = torch.zeros(rows.mask.shape), rows.mask.sum(dim=1) - 1
    rewards[torch.arange(len(rewards)), last] = torch.tensor([max(min(paid[name], high), low) for name in rows.ids])
    known = [batch.tensors() for batch in batches]
    if algorithm.kl_in == "reward" and kl_coef:
        kls = [estimate(each["old_logprobs"], each["ref_logprobs"], algorithm.kl_estimator) for each in known]
        rewards = rewards - kl_coef * rows.gather(kls)
    values = returns = rewards
    if algorithm.has_critic:
        values = rows.gather([each["old_values"] for each in known])
        advantages, returns = gae(rewards, values, rows.mask, gamma=wanted.gamma, lam=wanted.gae_lambda)
    else:
        advantages = rewards_to_go(rewards, rows.mask, gamma=wanted.gamma)
    if algorithm.whiten:
        over = None if across.world == 1 else torch.cat(across.gather(advantages[rows.mask]))
        advantages = whiten(advantages, rows.mask, over=over)
    parts = rows.scatter(advantages)
    if not algorithm.has_critic:
        return [replace(batch, advantages=part) for batch, part in zip(batches, parts, strict=True)], {}
    targets = zip(batches, parts, rows.scatter(returns), strict=True)
    shaped = [replace(batch, advantages=part, returns=target) for batch, part, target in targets]
    values, returns = (torch.cat(across.gather(each[rows.mask])) for each in (values, returns))
    # How well the critic predicted the returns: 1 is perfect, 0 no better than a constant.
    variance = float(returns.var(correction=0))
    explained = 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0
    means = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    return shaped, means | {"explained_variance": explained}


class _Trajectories:
    """A step's trained tokens, one row per trajectory ``(N, L)``, and the mapping back to its micro-batches."""

    def __init__(self, batches: Sequence[MicroBatch]) -> None:
        self._device = batches[0].loss_mask.device if batches else torch.device("cpu")
        self._masks = [batch.loss_mask.cpu() for batch in batches]
        self._pieces: dict[str, list[tuple[int, int]]] = {}
        places = {i: (n, row) for n, batch in enumerate(batches) for row, i in enumerate(batch.indices)}
        for _, (n, row) in sorted(places.items()):
            self._pieces.setdefault(batches[n].trajectory_ids[row], []).append((n, row))
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
        return [part.to(self._device) for part in parts]
