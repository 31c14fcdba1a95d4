"""Fixtures of trajectories and runs to look inside, and the pages of them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiny import make_metadata
from two_turns import UNSEEN, tokenizer_folder, trajectory

from emailrl.checkpoints import WEIGHTS, write_checkpoint
from emailrl.page.build import gather, page
from emailrl.page.place import place_of
from emailrl.records import write_records, write_trajectories
from emailrl.records.trajectory import Trajectory

__all__ = ["WRONG", "make_run", "tokenizer_folder", "trajectory", "write_weights", "written"]

WRONG = {"answer_correct": False, "attempted_answer": True} | UNSEEN


def written(subject: Path) -> Path:
    """The page of a run or file, as a file beside it."""
    target = subject.with_suffix(".html")
    target.write_text(page(gather(place_of(subject), model_name="nano")), encoding="utf-8")
    return target


def make_run(folder: Path, trajectory: Trajectory, *, groups: int) -> Path:
    """Two steps of groups of three, of which the third rollout is right; evaluations before and after."""
    scenarios = [replace(trajectory.scenario, id=f"q{n}", question=f"Who paid bill {n}?") for n in range(groups)]
    for step in (1, 2):
        made = [
            replace(
                trajectory, id=f"s{step}-{group}-{n}", group_id=f"g{step}-{group}", step=step, reward=float(n),
                rubric=trajectory.rubric if n == 2 else WRONG, scenario=scenarios[group],
            )
            for group in range(groups) for n in range(3)
        ]  # fmt: skip
        write_trajectories(folder / "trajectories" / f"step-{step:06}.jsonl", made)
        numbers = [None, None, -0.3, -0.02, None, None, -3.0, -0.4]
        sample = {"loss_mask": [0, 0, 1, 1, 0, 0, 1, 1], "old_logprobs": numbers, "ratio": numbers}
        notes = [{"id": each.id, "advantage": each.reward - 1, "dropped": None, "samples": [sample]} for each in made]
        write_records(folder / "training" / f"step-{step:06}.jsonl", notes)
    for step, how in ((0, {"rubric": WRONG, "final_answer": "Bob"}), (2, {})):
        made = [replace(trajectory, id=f"e{step}-{s.id}", step=step, scenario=s, **how) for s in scenarios]
        write_trajectories(folder / "trajectories" / f"eval-{step:06}.jsonl", made)
    steps = [
        {"step": step, "reward_mean": 1.0, "accuracy": 1 / 3, "entropy": 0.5 / step, "loss": -0.01 * step, "kl": 0.001,
         "dropped": {"zero_spread": step}, "seconds": {"rollout": 2.0, "update": 1.5, "total": 3.5}}
        for step in (1, 2)
    ]  # fmt: skip
    write_records(folder / "metrics.jsonl", steps)
    held = {"accuracy_low": 0.0, "accuracy_high": 1.0, "reward": 0.5, "num_questions": groups, "num_turns": 2.0}
    write_records(folder / "evaluations.jsonl", [{"step": step, "accuracy": step / 2, **held} for step in (0, 2)])
    return folder


def write_weights(folder: Path, content: bytes, **metadata: Any) -> str:
    """A checkpoint with these bytes as its weights; their hash."""
    made = make_metadata(**{"kind": "best", "step": 2, **metadata})
    write_checkpoint(folder, made, lambda at: (at / WEIGHTS).write_bytes(content))
    return hashlib.sha256(content).hexdigest()
