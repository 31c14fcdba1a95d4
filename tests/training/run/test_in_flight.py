"""Rollouts in a checkpoint that a resumed run may train on, and those that it samples again or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training.run_files import write

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from emailrl.records import write_trajectories
from emailrl.records.trajectory import Scenario, TokenSample, Trajectory, Turn
from emailrl.training.run.ahead import IN_FLIGHT, reusable


def rollout(step: int, version: str, token: int = 7) -> Trajectory:
    sample = TokenSample(token_ids=[1, token], loss_mask=[0, 1], sampler_logprobs=[None, -0.5])
    turn = Turn(completion_ids=[token], logprobs=[-0.5], finish_reason="stop", policy_version=version)
    question = Scenario("q", "?", "!", [], "a@x", "2001-01-01")
    return Trajectory(
        f"{step}-{version}", str(step), question, step=step, policy_version=version, samples=[sample], turns=[turn]
    )


def checkpoint_with(folder: Path, *rollouts: Trajectory) -> Checkpoint:
    """Of step 2."""
    write(folder / "template", step=2)

    def fill(directory: Path) -> None:
        write_trajectories(directory / IN_FLIGHT, rollouts)

    return write_checkpoint(folder / "checkpoint-2", read_checkpoint(folder / "template").metadata, fill)


def test_rollouts_older_than_the_bound_are_sampled_again_and_a_note_says_so(tmp_path: Path) -> None:
    """Step 4 follows the policy of step 3, so v-1 is two steps old there, and one step old in step 3."""
    checkpoint = checkpoint_with(tmp_path, rollout(3, "v-000001"), rollout(4, "v-000001"), rollout(5, "v-000002"))
    assert reusable(checkpoint, 2, 8)[1] == [] and len(reusable(checkpoint, 2, 8)[0]) == 3
    kept, [note] = reusable(checkpoint, 1, 8)
    assert list(kept) == ["3-v-000001"]
    assert note == f"2 rollouts in {checkpoint.path / IN_FLIGHT} exceed MAX_STALENESS=1 and are sampled again"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"token": 8}, "checkpoint-2/in_flight.jsonl: trajectory .* has token ids outside the model's vocabulary"),
        ({"version": "newest"}, "does not name the policy that sampled it"),
    ],
)
def test_rollouts_that_the_policy_cannot_have_sampled_are_refused(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    checkpoint = checkpoint_with(tmp_path, rollout(3, **{"version": "v-000001"} | change))
    with pytest.raises(EmailRLError, match=expected):
        reusable(checkpoint, 1, 8)


def test_reused_rollouts_are_audited_like_new_ones(tmp_path: Path) -> None:
    changed = rollout(3, "v-000001")
    changed.samples[0].token_ids[1] = 6
    with pytest.raises(EmailRLError, match="nothing was trained"):
        reusable(checkpoint_with(tmp_path, changed), 1, 8)


def test_a_file_that_the_metadata_does_not_list_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-2", step=2)
    (tmp_path / "checkpoint-2" / IN_FLIGHT).write_text("[")
    assert reusable(read_checkpoint(tmp_path / "checkpoint-2"), 1, 8) == ({}, [])
