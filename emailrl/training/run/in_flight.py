"""What a resumed run takes over: finished rollouts of steps not yet trained."""

from __future__ import annotations

import re
from pathlib import Path

from emailrl.checkpoints import Checkpoint
from emailrl.errors import EmailRLError
from emailrl.plain import counted
from emailrl.recording import read_trajectories
from emailrl.rollout.audit import audit
from emailrl.trajectory import Trajectory

IN_FLIGHT = "in_flight.jsonl"
"""In a checkpoint: finished rollouts of steps not yet trained, without rewards."""


def rollouts_in_flight(checkpoint: Path) -> dict[str, Trajectory]:
    """A checkpoint's rollouts of steps not yet trained, by id; those that raised are played again."""
    path = checkpoint / IN_FLIGHT
    if not path.is_file():
        return {}
    return {each.id: each for each in read_trajectories(path) if each.exception is None}


def reusable(checkpoint: Checkpoint, staleness: int, vocabulary: int) -> tuple[dict[str, Trajectory], list[str]]:
    """The rollouts in flight that are at most ``staleness`` steps old, by id, and a note if there are older ones.

    Raises EmailRLError for one that the policy, with token ids below ``vocabulary``, cannot have sampled.
    """
    if IN_FLIGHT not in checkpoint.metadata.files:  # only files listed there have been verified
        return {}, []
    found = rollouts_in_flight(checkpoint.path)
    young = {name: each for name, each in found.items() if _age(each, checkpoint) <= staleness}
    for each in young.values():
        audit(each)
        if any(token >= vocabulary for sample in each.samples for token in sample.token_ids):
            raise _unusable(each, checkpoint, "has token ids outside the model's vocabulary")
    if len(young) == len(found):
        return young, []
    old = counted(len(found) - len(young), "rollout")
    return young, [f"{old} in {checkpoint.path / IN_FLIGHT} exceed MAX_STALENESS={staleness} and are sampled again"]


def _age(trajectory: Trajectory, checkpoint: Checkpoint) -> int:
    """How many steps its policy is older than the one that its step will train."""
    if not trajectory.turns:
        return 0
    version = re.fullmatch(r"v-(\d+)", trajectory.policy_version)
    if version is None:
        raise _unusable(trajectory, checkpoint, "does not name the policy that sampled it")
    return trajectory.step - 1 - int(version[1])


def _unusable(trajectory: Trajectory, checkpoint: Checkpoint, why: str) -> EmailRLError:
    return EmailRLError(
        f"{checkpoint.path / IN_FLIGHT}: trajectory {trajectory.id} {why}.",
        "Use another checkpoint: emailrl checkpoints list.",
    )
