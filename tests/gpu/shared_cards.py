"""In-process vLLM on several ranks: checks that ranks sample what one process samples, then measures the rollouts.

    python tests/gpu/shared_cards.py OUT [--nproc 2] [--model nano] [--questions 8] [--steps 3]

Every case trains the same questions on demo mail: one rank, N ranks with an engine each, and N ranks whose engines are
of two (tensor parallelism). Needs N GPUs; without any it runs on the CPU. Writes ``OUT/shared_cards.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

LARGEST_GAP = 0.6
"""Nats between a sampled token's log-probability and the trainer's, as in ``test_vllm_real``."""


def emailrl(folder: Path, *words: object, **environment: object) -> Any:
    """Run a command; its JSON."""
    command = [sys.executable, "-m", "emailrl", *map(str, words), "--json"]
    given = os.environ | {name: str(value) for name, value in environment.items()}
    done = subprocess.run(command, cwd=folder, env=given, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, f"{words} ended with {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1])


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder: Path, given: argparse.Namespace, ranks: int, per_engine: int) -> dict[str, Any]:
    """Train one case; what it measured, and the first step's trajectories."""
    result = emailrl(
        folder, "train", "--trust", "--engine", "vllm", "--model", given.model, "--nproc", ranks,
        "--output-dir", f"ranks-{ranks}-{per_engine}", "--max-steps", given.steps,
        PER_DEVICE_TRAIN_BATCH_SIZE=given.questions // ranks, VLLM_TENSOR_PARALLEL_SIZE=per_engine,
    )  # fmt: skip
    directory = Path(result["run_dir"])
    steps = lines(directory / "metrics.jsonl")
    assert len(steps) == given.steps and all(step["num_trajectories"] == given.questions * 6 for step in steps)
    assert all(step.get("sampler_gap_max", 0.0) < LARGEST_GAP for step in steps), "the sampler is not the policy"
    if ranks > 1:
        said = f"rollouts run on {ranks // per_engine} engines, each on {per_engine} of {ranks} ranks"
        assert said in (directory / "training.log").read_text(), said
    later = steps[1:]  # the first one warms up
    return {
        "ranks": ranks,
        "per_engine": per_engine,
        "rollout_seconds": sum(step["seconds"]["rollout"] for step in later) / len(later),
        "update_seconds": sum(step["seconds"]["update"] for step in later) / len(later),
        "first": lines(directory / "trajectories" / "step-000001.jsonl"),
    }


def compare(case: dict[str, Any], one: dict[str, Any]) -> None:
    """The same trajectories in the same order; how many have the same tokens (bf16 rounds by the batch)."""
    assert [each["id"] for each in case["first"]] == [each["id"] for each in one["first"]], "other trajectories"
    pairs = zip(case.pop("first"), one["first"], strict=True)
    case["same_tokens"] = sum(mine.get("token_ids") == other.get("token_ids") for mine, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    assert given.questions % given.nproc == 0 and given.nproc % 2 == 0 and given.steps > 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        emailrl(folder, "gen-db", "--source", "demo", "--db", "mail.db")
        emailrl(folder, "gen-questions", "--db", "mail.db", "--out", "questions.jsonl", "--limit", 200)
        (folder / "emailrl.toml").write_text(
            'emailrl_db = "mail.db"\nemailrl_questions = "questions.jsonl"\nmax_turns = 6\nmax_tokens = 256\n'
            "eval_dataset_size = 4\nnum_generations = 6\ntemperature = 0.9\n"
            'wandb_mode = "disabled"\njudge = "offline"\n'
        )
        one = run(folder, given, 1, 1)
        cases = [one, *(run(folder, given, given.nproc, each) for each in (1, 2))]
    for case in cases[1:]:
        compare(case, one)
    one["same_tokens"] = len(one.pop("first"))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "shared_cards.json").write_text(json.dumps(cases, indent=2) + "\n")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{given.model}, {given.questions} questions x 6, {where}")
    print("ranks  per engine  rollout s  update s  trajectories with the tokens of one rank")
    for case in cases:
        print(
            f"{case['ranks']:5}  {case['per_engine']:10}  {case['rollout_seconds']:9.2f}  {case['update_seconds']:8.2f}"
            f"  {case['same_tokens']}/{given.questions * 6}"
        )


if __name__ == "__main__":
    main()
