"""Trajectories per second of a model on a CPU in fp32 and in bf16, the same conversations in one run.

    python tests/benchmarks/bench_cpu_dtypes.py --model smol-base --db mail.db --questions questions.jsonl

Every trajectory makes the same real calls (search, read, answer) on its question's inbox, each after a greedy
completion of 40 to 80 tokens (by its seed, the same for both); prompts grow by the tools' real results. Rounds
alternate, and a ratio is that of one round. ``cpu`` are processor seconds of all threads, which say more than the clock
on a busy machine. The last lines say how far bf16's tokens are fp32's, and the gap of the log-probabilities until then.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from emailrl.agent import MailEnvironment, tool_schemas
from emailrl.agent.runner import run
from emailrl.engines import SamplingParams, build_engine
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail import open_mailbox
from emailrl.model.load import load_policy
from emailrl.model.policy import Policy
from emailrl.questions import load_scenario_set
from emailrl.records.trajectory import Scenario, Trajectory
from emailrl.settings import DataSettings, Settings, load_settings

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from bench_sampling import Scripted, Timed, numbered_run

DTYPES = ("fp32", "bf16")


def main() -> None:
    """Measure, and print a line a round and what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol-base")
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6, help="questions, all at once")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    data = DataSettings()
    scenarios = load_scenario_set(
        given.questions, "test", limit=given.count, seed=3, data=data, check_inboxes=False
    ).scenarios
    settings = {dtype: load_settings({"model_name": given.model, "dtype": dtype}, environ={}) for dtype in DTYPES}
    policies = {dtype: load_policy(settings[dtype]) for dtype in DTYPES}
    ended: dict[str, list[Trajectory]] = {}
    for number in range(given.rounds):
        taken = {}
        for dtype in DTYPES:
            ended[dtype], cpu, wall = play(settings[dtype], policies[dtype], given.db, scenarios)
            taken[dtype] = cpu, wall
            print(f"{dtype}: {cpu:.1f} s cpu, {wall:.1f} s, {len(scenarios) / wall:.3f} trajectories/s", flush=True)
        ratios = [before / after for before, after in zip(*taken.values(), strict=True)]
        print(f"round {number + 1}: bf16 is {ratios[0]:.2f} x as fast by cpu seconds, {ratios[1]:.2f} x by the clock")
    print(difference(*ended.values()))


def play(
    settings: Settings, policy: Policy, db: Path, scenarios: list[Scenario]
) -> tuple[list[Trajectory], float, float]:
    """All trajectories at once, and the processor and wall seconds they took."""
    engine: Any = build_engine(settings, policy)
    engine.stop_ids = frozenset()
    timed, renderer = Timed(engine, shortest=40, longest=80), ChatRenderer(policy.tokenizer, tool_schemas())
    with ExitStack() as opened:
        boxes = [
            opened.enter_context(closing(open_mailbox(db, one.inbox_address, until=one.query_date)))
            for one in scenarios
        ]
        environments = [
            Scripted(MailEnvironment(one, box, max_turns=10), rounds=1)
            for one, box in zip(scenarios, boxes, strict=True)
        ]
        cpu, wall = time.process_time(), time.perf_counter()
        sampling = SamplingParams(80, temperature=0.0)
        ended = numbered_run(run, environments, timed, renderer, sampling, range(len(scenarios)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    engine.close()
    return ended, cpu, wall


def difference(some: list[Trajectory], others: list[Trajectory]) -> str:
    """How many turns have the same tokens, of those that follow the same tokens, and the gap of log-probabilities."""
    same, compared, gaps = 0, 0, []
    for one, other in zip(some, others, strict=True):
        for first, second in zip(one.turns, other.turns, strict=True):
            pairs = list(zip(first.completion_ids, second.completion_ids, strict=True))
            until = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
            gaps += [abs(a - b) for a, b in zip(first.logprobs[:until], second.logprobs[:until], strict=True)]
            compared += 1
            same += until == len(pairs)
            if until < len(pairs):
                break
    gap = sum(gaps) / max(len(gaps), 1)
    return f"{same} of {compared} turns have fp32's tokens; mean gap {gap:.4f} nats over {len(gaps)} tokens"


if __name__ == "__main__":
    main()
