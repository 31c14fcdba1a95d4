"""In-process vLLM on several ranks: checks that ranks sample what one process samples, then measures the rollouts.

    python tests/gpu/shared_cards.py OUT [--nproc 2] [--model nano] [--questions 8] [--steps 3] [--seconds 390]

Every case trains the same questions on demo mail: one rank, N ranks with an engine each, and N ranks whose engines are
of two (tensor parallelism). Needs N GPUs; without any it runs on the CPU. First all cases train one step, at once on
the same GPUs: the check, and vLLM's compilation cache is filled. Then each trains ``--steps`` on its own, the first of
which does not count. ``OUT/shared_cards.json`` is written after every case; nothing goes on after ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from processes import in_time

from emailrl.records import read_records

LARGEST_GAP = 0.6
"""Nats between a sampled token's log-probability and the trainer's, as in ``test_vllm_real``."""
SETTINGS = """\
emailrl_db = "mail.db"
emailrl_questions = "questions.jsonl"
max_turns = 6
max_tokens = 256
eval_dataset_size = 4
num_generations = 6
temperature = 0.9
wandb_mode = "disabled"
judge = "offline"
vllm_gpu_memory_utilization = 0.2
kv_cache_gib = 4  # given, as free memory changes while others start
"""
Case = dict[str, Any]


def emailrl(folder: Path, deadline: float, log: Path, *words: object, **environment: object) -> int:
    """Run a command; its exit code. Raises RuntimeError if it is not done by the deadline."""
    command = [sys.executable, "-m", "emailrl", *map(str, words)]
    given = {"NCCL_NVLS_ENABLE": "0"} | os.environ | {name: str(value) for name, value in environment.items()}
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=given, stdout=file, stderr=subprocess.STDOUT)
        if not in_time(process, max(1.0, deadline - time.monotonic())):
            raise RuntimeError("no time left")
        return process.returncode


def train(folder: Path, given: argparse.Namespace, case: Case, steps: int) -> Path:
    """Train a case for so many steps; the run's folder, once its records are as they must be."""
    ranks, per_engine, name = case["ranks"], case["per_engine"], f"ranks-{case['ranks']}-{case['per_engine']}-{steps}"
    log, directory = given.out / f"{name}.log", folder / f"{name}_masked"
    case["exit"] = emailrl(
        folder, given.deadline, log,
        "train", "--trust", "--engine", "vllm", "--model", given.model, "--nproc", ranks, "--out", name,
        "--max-steps", steps,
        PER_DEVICE_TRAIN_BATCH_SIZE=given.questions // ranks, VLLM_TENSOR_PARALLEL_SIZE=per_engine,
    )  # fmt: skip
    if not (directory / "final").exists():  # a slow end shows in the exit code alone
        raise RuntimeError(f"ended with {case['exit']}: {' | '.join(log.read_text().splitlines()[-4:])[-600:]}")
    records = [*read_records(directory / "metrics.jsonl")]
    assert len(records) == steps and all(step["num_trajectories"] == given.questions * 6 for step in records)
    assert all(step.get("sampler_gap_max", 0.0) < LARGEST_GAP for step in records), "the sampler is not the policy"
    if ranks > 1:
        said = f"rollouts run on {ranks // per_engine} engines, each on {per_engine} of {ranks} ranks"
        assert said in (directory / "training.log").read_text(), said
    return directory


def check(folder: Path, given: argparse.Namespace, case: Case) -> None:
    """Train one step; keep its trajectories."""
    begun = time.monotonic()
    try:
        case["first"] = [*read_records(train(folder, given, case, 1) / "trajectories" / "step-000001.jsonl")]
    except (RuntimeError, AssertionError) as error:
        case["error"] = str(error)
    case["check_seconds"] = time.monotonic() - begun


def compare(cases: list[Case]) -> None:
    """The same trajectories in the same order; how many have the same tokens (bf16 rounds by the batch)."""
    kept = [case.pop("first", None) for case in cases]
    for case, first in zip(cases, kept, strict=True):
        if first is None or kept[0] is None:
            continue
        if [one["id"] for one in first] != [one["id"] for one in kept[0]]:
            case["error"] = "other trajectories than one rank"
        pairs = zip(first, kept[0], strict=False)
        case["same_tokens"] = sum(mine.get("token_ids") == other.get("token_ids") for mine, other in pairs)


def measure(folder: Path, given: argparse.Namespace, case: Case) -> None:
    """Train alone; mean seconds of the steps after the first."""
    begun = time.monotonic()
    try:
        directory = train(folder, given, case, given.steps)
    except (RuntimeError, AssertionError) as error:
        case["error"] = str(error)
        return
    later = [*read_records(directory / "metrics.jsonl")][1:]
    for phase in ("rollout", "update"):
        case[f"{phase}_seconds"] = sum(step["seconds"][phase] for step in later) / len(later)
    case["run_seconds"] = time.monotonic() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=390)
    given = parser.parse_args()
    assert given.questions % given.nproc == 0 and given.nproc % 2 == 0 and given.steps > 1
    given.deadline, given.out = time.monotonic() + given.seconds, given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = [
        {"ranks": ranks, "per_engine": each} for ranks, each in ((1, 1), *((given.nproc, n) for n in (1, 2)))
    ]

    def write() -> None:
        (given.out / "shared_cards.json").write_text(json.dumps(cases, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as temporary:
        folder, log = Path(temporary), given.out / "data.log"
        for command in (
            ["gen-db", "--source", "demo", "--db", "mail.db"],
            ["gen-questions", "--db", "mail.db", "--out", "questions.jsonl", "--limit", 200],
        ):
            assert emailrl(folder, given.deadline, log, *command) == 0, log.read_text()
        (folder / "emailrl.toml").write_text(SETTINGS)
        checks = [threading.Thread(target=check, args=(folder, given, case)) for case in cases]
        for one in checks:
            one.start()
        for one in checks:
            one.join()
        compare(cases)
        write()
        for case in cases:
            if "error" not in case:
                measure(folder, given, case)
            write()
            print(row(given, case), flush=True)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{given.model}, {given.questions} questions x 6, {where}")
    print("ranks  per engine  rollout s  update s  same tokens as one rank, exit code")
    print("\n".join(row(given, case) for case in cases))
    sys.exit(any("error" in case for case in cases))


def row(given: argparse.Namespace, case: Case) -> str:
    """A line of the table."""
    seconds = [f"{case[name]:9.2f}" if name in case else f"{'-':>9}" for name in ("rollout_seconds", "update_seconds")]
    same = f"{case['same_tokens']}/{given.questions * 6}" if "same_tokens" in case else "-"
    last = f"{same:>5}  {case.get('exit', '-'):>4}  {case.get('error', '')}"
    return f"{case['ranks']:5}  {case['per_engine']:10}  {'  '.join(seconds)}  {last}"


if __name__ == "__main__":
    main()
