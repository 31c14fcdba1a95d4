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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from emailrl.agent import MailEnvironment
from emailrl.agent.runner import run
from emailrl.agent.tools import tool_schemas
from emailrl.engines.base import Advance, Completion, Engine, Request, SamplingParams
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.demo import ask, make_world
from emailrl.model.load import load_policy
from emailrl.records.trajectory import Scenario, Trajectory
from emailrl.settings import Settings, load_settings


@dataclass
class GenerateEngine:
    """``model.generate`` behind the engine's protocol, ``batch`` prompts at a time, without log-probabilities."""

    model: PreTrainedModel
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
            ids,
            attention_mask=mask,
            max_new_tokens=requests[0].sampling.max_tokens,
            do_sample=False,
            eos_token_id=sorted(self.stop_ids),
            pad_token_id=0,
            use_cache=True,
        )
        return [
            self._completion(request, row) for request, row in zip(requests, out[:, longest:].tolist(), strict=True)
        ]

    def _completion(self, request: Request, row: list[int]) -> Completion:
        end = next((i + 1 for i, token in enumerate(row) if token in self.stop_ids), None)
        ids = row[:end]
        return Completion(
            request.trajectory_id,
            ids,
            [0.0] * len(ids),
            "length" if end is None else "stop",
            prompt_tokens=len(request.prompt_ids),
        )

    def close(self) -> None:
        """Nothing to free."""


@dataclass
class Timing:
    """One round of one side."""

    seconds: float
    cpu: float
    trajectories: list[Trajectory]


def time_rollouts(
    engine: Engine, renderer: ChatRenderer, scenarios: Sequence[Scenario], db: Path, settings: Settings
) -> Timing:
    """Play every scenario once, greedily."""
    agent = settings.agent
    mailboxes = [open_mailbox(db, scenario.inbox_address, until=scenario.query_date) for scenario in scenarios]
    environments = [
        MailEnvironment(scenario, mailbox, max_turns=agent.max_turns)
        for scenario, mailbox in zip(scenarios, mailboxes, strict=True)
    ]
    clock, cpu = time.perf_counter(), time.process_time()
    sampling = SamplingParams(agent.max_tokens, temperature=0)
    trajectories = run(environments, engine, renderer, sampling, seeds=[0] * len(scenarios))
    timing = Timing(time.perf_counter() - clock, time.process_time() - cpu, trajectories)
    for mailbox in mailboxes:
        mailbox.close()
    return timing


@contextmanager
def demo(num_questions: int) -> Iterator[tuple[Path, list[Scenario]]]:
    """A mailbox of demo worlds, and questions on it."""
    worlds = [make_world(1, "test", number) for number in range(-(-num_questions // 40))]
    rng = random.Random(1)
    questions = [ask(world, fact, rng) for world in worlds for fact in world.facts]
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "mail.db"
        build_database((email for world in worlds for email in world.emails), db)
        yield db, rng.sample(questions, min(num_questions, len(questions)))


def ratio(rounds: Sequence[dict[str, Timing]], name: str, measure: Callable[[Timing], float]) -> float:
    """How many times longer than the engine a side takes: the median over the rounds."""
    return statistics.median(measure(sides[name]) / measure(sides["engine"]) for sides in rounds)


def report(rounds: Sequence[dict[str, Timing]]) -> str:
    """The table."""
    lines = [f"{'':14}{'seconds':>9}{'cpu':>8}{'traj/s':>8}{'turns':>7}{'engine is faster':>19}{'(cpu)':>8}{'same':>7}"]
    ours = [turn_ids(t) for t in rounds[0]["engine"].trajectories]
    for name in rounds[0]:
        timings = [sides[name] for sides in rounds]
        seconds = statistics.median(t.seconds for t in timings)
        trajectories = timings[0].trajectories
        same = sum(a == turn_ids(b) for a, b in zip(ours, trajectories, strict=True))
        lines.append(
            f"{name:14}{seconds:9.2f}{statistics.median(t.cpu for t in timings):8.2f}{len(ours) / seconds:8.2f}"
            f"{sum(len(t.turns) for t in trajectories):7}"
            f"{ratio(rounds, name, lambda t: t.seconds):18.2f}x{ratio(rounds, name, lambda t: t.cpu):7.2f}x"
            f"{same / len(ours):7.0%}"
        )
    return "\n".join(lines)


def turn_ids(trajectory: Trajectory) -> list[list[int]]:
    """What was sampled, turn by turn."""
    return [turn.completion_ids for turn in trajectory.turns]


def compare(
    model: str, num_questions: int, num_rounds: int, max_rows: int, after_round: Callable[[str], None] = print
) -> list[dict[str, Timing]]:
    """Measure all sides; ``after_round`` gets the table so far."""
    settings = load_settings({"model_name": model, "max_tokens": 256, "device": "cpu"})
    policy = load_policy(settings)
    renderer = ChatRenderer(policy.tokenizer, tool_schemas())
    assert isinstance(policy.model, PreTrainedModel)
    sides: dict[str, Engine] = {
        "engine": TransformersEngine(policy.model, renderer.stop_ids, max_rows=max_rows),
        "lock-step": GenerateEngine(policy.model, renderer.stop_ids, batch=max_rows),
        "one at a time": GenerateEngine(policy.model, renderer.stop_ids, batch=1),
    }
    rounds: list[dict[str, Timing]] = []
    with demo(num_questions) as (db, scenarios), closing(sides["engine"]):
        for engine in sides.values():
            time_rollouts(engine, renderer, scenarios[:2], db, settings)
        for _ in range(num_rounds):
            rounds.append(
                {name: time_rollouts(engine, renderer, scenarios, db, settings) for name, engine in sides.items()}
            )
            after_round(report(rounds))
    return rounds


def main() -> None:
    """Parse, measure, print, and fail where the engine misses its aims: 3x one at a time, no slower than lock-step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, default=64, help="most trajectories at once")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.model}, {options.questions} questions, {options.threads} threads, torch {torch.__version__}")
    rounds = compare(options.model, options.questions, options.rounds, options.rows)
    alone, together = (ratio(rounds, name, lambda t: t.seconds) for name in ("one at a time", "lock-step"))
    if alone < 3 or together < 1:
        raise SystemExit("too slow: at least 3x one at a time and 1x lock-step are asked for")


if __name__ == "__main__":
    main()
