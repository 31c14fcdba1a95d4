"""The token audit: verifies, turn by turn, that the trained ids are the sampled ids.

Turns keep the engine's output; samples keep what training will read. The audit compares both: every masked run of ids
must be the completions of successive turns, with equal ids and log-probabilities, and no sampled id may be missing.
Each turn records the weights that sampled it; turns whose weights differ from the first turn's must have been counted.
"""

from __future__ import annotations

import math

from emailrl.base.errors import EmailRLError
from emailrl.records.trajectory import TokenSample, Trajectory


class TokenDriftError(EmailRLError):
    """An id or log-probability to train differs from what the policy sampled."""


def audit(trajectory: Trajectory) -> int:
    """Check every trained token of a trajectory; returns their number.

    Raises TokenDriftError naming turn and position. Returns 0 for a trajectory without samples (from a chat engine).
    """
    if not trajectory.samples:
        return 0
    trained: list[tuple[int, float | None]] = []
    starts: set[int] = set()
    for number, sample in enumerate(trajectory.samples):
        trained += _trained(trajectory, number, sample, starts, len(trained))
    if (stale := stale_turns(trajectory)) != trajectory.rubric.get("stale_turns", 0):
        raise _drift(trajectory, f"{stale} turns were sampled by different weights than the first")
    position = 0
    for number, turn in enumerate(trajectory.turns):
        if len(turn.completion_ids) != len(turn.logprobs):
            raise _drift(trajectory, f"turn {number}: ids and log-probabilities differ in number")
        if turn.completion_ids and position not in starts:
            raise _drift(trajectory, f"turn {number}: no prompt precedes its first id")
        for offset, sampled in enumerate(zip(turn.completion_ids, turn.logprobs, strict=True)):
            if position >= len(trained):
                raise _drift(trajectory, f"turn {number}, token {offset}: sampled but not in the sample")
            if trained[position] != sampled:
                raise _drift(
                    trajectory,
                    f"turn {number}, token {offset}: sampled {sampled}, but {trained[position]} in the training sample",
                )
            position += 1
    if position != len(trained):
        raise _drift(trajectory, f"{len(trained) - position} ids in the training sample were never sampled")
    return position


def stale_turns(trajectory: Trajectory) -> int:
    """How many turns were sampled by weights other than those recorded on the trajectory."""
    stamp = trajectory.policy_version, trajectory.adapter_sha256
    return sum((turn.policy_version, turn.adapter_sha256) != stamp for turn in trajectory.turns)


def _trained(
    trajectory: Trajectory, number: int, sample: TokenSample, starts: set[int], before: int
) -> list[tuple[int, float | None]]:
    """The masked (id, log-probability) pairs of a sample; adds the start of each run to ``starts``."""
    if not len(sample.token_ids) == len(sample.loss_mask) == len(sample.sampler_logprobs):
        raise _drift(trajectory, f"sample {number}: ids, mask and log-probabilities differ in length")
    trained: list[tuple[int, float | None]] = []
    previous = 0
    for index, (token, mask, logprob) in enumerate(
        zip(sample.token_ids, sample.loss_mask, sample.sampler_logprobs, strict=True)
    ):
        if mask not in (0, 1) or (mask == 1) != (logprob is not None):
            raise _drift(trajectory, f"sample {number}, position {index}: mask {mask} with log-probability {logprob}")
        if logprob is not None:
            if not math.isfinite(logprob) or logprob > 1e-4:
                raise _drift(trajectory, f"sample {number}, position {index}: log-probability {logprob}")
            if not previous:
                starts.add(before + len(trained))
            trained.append((token, logprob))
        previous = mask
    return trained


def _drift(trajectory: Trajectory, what: str) -> TokenDriftError:
    return TokenDriftError(
        f"Trajectory {trajectory.id}: {what}.", "The tokens to train differ from those sampled; nothing was trained."
    )
