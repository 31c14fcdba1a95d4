"""Trajectories a second: the in-process engine against ``model.generate``, the same questions in one run.

    python tests/benchmarks/bench_engine.py --questions 48 --rounds 3 --threads 2

All sides play the same scenarios of a demo mailbox through the same runner, environment, renderer and weights,
greedily, and so say the same things (the last column counts how often, to the token). They differ in how completions
are made:

- engine: ``TransformersEngine``, every trajectory at its own pace, keys and values kept across turns;
- one at a time: ``model.generate`` with its own cache, one trajectory after the other;
- lock-step: ``model.generate`` on the whole batch, padded, prompts read anew each turn, all waiting for the longest.

Rounds alternate between the sides, and a ratio is the median of the rounds' own ratios, so that a busy machine slows
all alike. ``cpu`` are processor seconds of all threads, which say more than the clock where other work runs beside.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from emailrl.agent import MailEnvironment
from emailrl.agent.runner import run
from emailrl.agent.tools import tool_schemas
from emailrl.engines.base import Advance, Completion, Request, SamplingParams
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.demo import ask, make_world
from emailrl.model.load import load_policy
from emailrl.settings import load_settings

Timing = tuple[float, float, list[list[list[int]]]]
"""Seconds, processor seconds, and the ids of every turn of every trajectory."""


@dataclass
class GenerateEngine:
    """``model.generate`` behind the engine's protocol, ``batch`` prompts at a time, without log-probabilities."""

    model: Any
    stop_ids: frozenset[int]
    batch: int

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """With a batch of one, each trajectory to its end before the next; else turn by turn, all together."""
        done, waiting = [], list(requests)
        while waiting:
            now, waiting = waiting[: self.batch], waiting[self.batch :]
            while now:
                completions = self._complete(now)
                done += completions
                follow_ups = [advance(completion) if advance else None for completion in completions]
                now = [request for request in follow_ups if request is not None]
        return done

    @torch.inference_mode()
    def _complete(self, requests: list[Request]) -> list[Completion]:
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.tensor([[0] * (longest - len(r.prompt_ids)) + r.prompt_ids for r in requests])
        mask = torch.tensor([[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests])
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=requests[0].sampling.max_tokens, do_sample=False,
            eos_token_id=sorted(self.stop_ids), pad_token_id=0, use_cache=True,
        )  # fmt: skip
        made = []
        for request, row in zip(requests, out[:, longest:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in self.stop_ids), None)
            why, prompt = "length" if end is None else "stop", len(request.prompt_ids)
            made.append(Completion(request.trajectory_id, row[:end], [0.0] * len(row[:end]), why, prompt_tokens=prompt))
        return made

    def close(self) -> None:
        """Nothing to free."""


def main() -> None:
    """Measure, print, and fail where the engine misses its aims: 3x one at a time, no slower than lock-step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=64, help="most trajectories at once")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = load_settings({"model_name": given.model, "max_tokens": 256, "device": "cpu"})
    policy: Any = load_policy(settings)
    renderer = ChatRenderer(policy.tokenizer, tool_schemas())
    sides: dict[str, Any] = {
        "engine": TransformersEngine(policy.model, renderer.stop_ids, max_rows=given.rows),
        "lock-step": GenerateEngine(policy.model, renderer.stop_ids, batch=given.rows),
        "one at a time": GenerateEngine(policy.model, renderer.stop_ids, batch=1),
    }
    worlds = [make_world(1, "test", number) for number in range(-(-given.questions // 40))]
    rng = random.Random(1)
    questions = [ask(world, fact, rng) for world in worlds for fact in world.facts]
    scenarios = rng.sample(questions, min(given.questions, len(questions)))

    def play(engine: Any, chosen: Sequence[Any], db: Path) -> Timing:
        with ExitStack() as opened:
            environments = [
                MailEnvironment(one, opened.enter_context(closing(box)), max_turns=settings.agent.max_turns)
                for one in chosen
                for box in [open_mailbox(db, one.inbox_address, until=one.query_date)]
            ]
            clock, cpu = time.perf_counter(), time.process_time()
            sampling = SamplingParams(settings.agent.max_tokens, temperature=0)
            ended = run(environments, engine, renderer, sampling, seeds=[0] * len(chosen))
            ids = [[turn.completion_ids for turn in one.turns] for one in ended]
            return time.perf_counter() - clock, time.process_time() - cpu, ids

    rounds: list[dict[str, Timing]] = []
    with tempfile.TemporaryDirectory() as folder, closing(sides["engine"]):
        db = Path(folder) / "mail.db"
        build_database((email for world in worlds for email in world.emails), db)
        for engine in sides.values():
            play(engine, scenarios[:2], db)
        for _ in range(given.rounds):
            rounds.append({name: play(engine, scenarios, db) for name, engine in sides.items()})
    print(f"{given.model}, {len(scenarios)} questions, {given.threads} threads, torch {torch.__version__}")
    print("| side | seconds | cpu | trajectories/s | engine is faster | (cpu) | same |\n|---|---|---|---|---|---|---|")
    ratios = {}
    for name in sides:
        seconds, cpu = (statistics.median(one[name][part] for one in rounds) for part in (0, 1))
        ratios[name] = [
            statistics.median(one[name][part] / one["engine"][part] for one in rounds)  # type: ignore[operator]
            for part in (0, 1)
        ]
        same = sum(a == b for a, b in zip(rounds[0]["engine"][2], rounds[0][name][2], strict=True)) / len(scenarios)
        rate, (slower, busier) = len(scenarios) / seconds, ratios[name]
        print(f"| {name} | {seconds:.2f} | {cpu:.2f} | {rate:.2f} | {slower:.2f}x | {busier:.2f}x | {same:.0%} |")
    if ratios["one at a time"][0] < 3 or ratios["lock-step"][0] < 1:
        raise SystemExit("too slow: at least 3x one at a time and 1x lock-step are asked for")


if __name__ == "__main__":
    main()
