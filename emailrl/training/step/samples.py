"""Turn a step's groups into training samples: which tokens are trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from emailrl.errors import EmailRLError
from emailrl.trajectory import StopReason, TokenSample, Trajectory, TrajectoryGroup

LossMask = Literal["sampled", "after_prompt", "completion"]
"""Tokens that a mode trains: the sampled ones (masked), all after the prompt including tool results (rollout), or
those of the completion (simple: the sampled ones of a single-completion trajectory)."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence to train on. The three lists have equal lengths and end at the last trained token."""

    trajectory_id: str
    group_id: str
    token_ids: list[int]
    loss_mask: list[int]
    sampler_logprobs: list[float | None]
    """None for unsampled tokens, such as tool results."""

    @property
    def num_trainable(self) -> int:
        """Tokens in the loss."""
        return sum(self.loss_mask)


def make_samples(
    groups: Sequence[TrajectoryGroup], loss_mask: LossMask, *, mask_truncated: bool = False
) -> tuple[list[TrainingSample], dict[str, int]]:
    """Turn kept groups into samples; a trajectory whose chat template rewrote earlier turns gives several.

    Each sample ends at its last trained token: under causal attention later tokens change nothing. With
    ``mask_truncated``, a trajectory cut off at the token limit gives none (DAPO's overlong filtering): it counts in its
    group's statistics, but in no denominator. Returns the samples and the numbers left out:
    ``trajectories_truncated`` and ``samples_nothing_trainable``.
    Raises EmailRLError for a trajectory without sampled ids or log-probabilities: it cannot be trained.
    """
    samples: list[TrainingSample] = []
    counts = Counter(trajectories_truncated=0, samples_nothing_trainable=0)
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        _check_tokens(trajectory)
        if mask_truncated and is_truncated(trajectory):
            counts["trajectories_truncated"] += 1
            continue
        for tokens in trajectory.samples:
            sample = _training_sample(trajectory, tokens, loss_mask)
            if sample is None:
                counts["samples_nothing_trainable"] += 1
            else:
                samples.append(sample)
    return samples, dict(counts)


def is_truncated(trajectory: Trajectory) -> bool:
    """Whether the token limit, not the policy, ended it; the policy knows its turn limit, so that does not count."""
    return trajectory.stop_reason is StopReason.TRUNCATED


def _training_sample(trajectory: Trajectory, tokens: TokenSample, loss_mask: LossMask) -> TrainingSample | None:
    sampled = tokens.loss_mask
    if not any(sampled):
        return None
    if loss_mask == "after_prompt":
        start = sampled.index(1)
        trained = [0] * start + [1] * (len(sampled) - start)
    else:
        trained = list(sampled)
    end = len(trained) - trained[::-1].index(1)
    return TrainingSample(
        trajectory_id=trajectory.id,
        group_id=trajectory.group_id,
        token_ids=tokens.token_ids[:end],
        loss_mask=trained[:end],
        sampler_logprobs=tokens.sampler_logprobs[:end],
    )


def _check_tokens(trajectory: Trajectory) -> None:
    """Reject trajectories that cannot give a correct gradient."""

    def refuse(problem: str) -> None:
        hint = "Train with an engine that returns sampled ids and log-probabilities (transformers or vllm)."
        raise EmailRLError(f"Trajectory {trajectory.id} cannot be trained: {problem}.", hint)

    if not trajectory.samples or (trajectory.turns and not any(any(tokens.loss_mask) for tokens in trajectory.samples)):
        refuse("it has no sampled token ids")
    for tokens in trajectory.samples:
        if not len(tokens.token_ids) == len(tokens.loss_mask) == len(tokens.sampler_logprobs):
            refuse("its token ids, loss mask and log-probabilities differ in length")
        if tokens.loss_mask and tokens.loss_mask[0]:
            refuse("its first token is marked as sampled, with no prompt before it")
        for is_sampled, logprob in zip(tokens.loss_mask, tokens.sampler_logprobs, strict=True):
            if is_sampled and (logprob is None or not math.isfinite(logprob)):
                refuse(f"a sampled token has log-probability {logprob}")
