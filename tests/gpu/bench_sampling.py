"""Trajectories a second on a real mail database, 48 at once: vLLM in process against in-process transformers.

    python tests/gpu/bench_sampling.py --shape 0.6B 4B --db enron_emails.db --questions art_e_questions.jsonl

Random weights of the true shapes say nothing sensible, so what they say is not played: every trajectory makes the same
real calls (search, read, search, read, answer) on the question's own inbox, each after a completion of 48 to 144 tokens
(by its seed, the same for all sides), and its prompt grows by the tools' real results. Everything else is the product's
own: renderer, runner, engines, an adapter of rank 16 loaded and proven. Each side runs in a process of its own.

``tools`` is the time inside the mailbox, ``between`` all that happens between two completions of a trajectory (tools,
template, tokenizer, bookkeeping), both as shares of the wall time. ``start`` is what comes before the first token.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner import Bench, Given, Row, peak_gib

SIDES = {
    "transformers": {"engine": "transformers"},
    "vllm": {"engine": "vllm", "vllm_enable_sleep": False},
    "vllm, sleeping": {"engine": "vllm", "vllm_enable_sleep": True},
    "vllm, eager": {"engine": "vllm", "vllm_enforce_eager": True, "vllm_enable_sleep": False},
}
AT_ONCE, GROUP_SIZE = 48, 6
SHORTEST, LONGEST = 48, 144  # tokens of a completion


def measure(given: Given, case: Row) -> Row:
    """Play the questions once and say how long everything took."""
    from emailrl.engines import build_engine
    from emailrl.model.load import load_policy
    from emailrl.settings import load_settings

    model = "nano" if given.smoke else str(given.folder / case["shape"])
    overrides = {"model_name": model, "temperature": 1.0, "lora_rank": 16, "max_tokens": LONGEST}
    settings = load_settings(overrides | SIDES[case["side"]], environ={})
    started = time.perf_counter()
    policy = load_policy(settings, trainable=True)
    with tempfile.TemporaryDirectory() as folder, closing(build_engine(settings, policy)) as engine:
        engine.load_adapter(random_adapter(policy, Path(folder) / "v-1"), "v-1")
        db, scenarios = questions_of(given, Path(folder))
        play(engine, policy, db, scenarios[:2])  # kernels are compiled, caches grown
        start = time.perf_counter() - started
        engine.release()
        before = time.perf_counter()
        engine.resume()
        wake = time.perf_counter() - before
        played = play(engine, policy, db, scenarios)
        return {"start": start, "wake": wake, "peak_gib": peak_gib()} | played


def random_adapter(policy: Any, folder: Path) -> Path:
    import torch

    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.trainable_parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    policy.save_adapter(folder)
    return folder


def demo(folder: Path) -> tuple[Path, Path]:
    """The demo's mail database and questions."""
    from emailrl.questions.beside import questions_file, write_demo

    from emailrl.settings import StoreSettings

    write_demo(db := folder / "demo.db", settings=StoreSettings(), seed=1, overwrite=True)
    return db, questions_file(db)


def questions_of(given: Given, folder: Path) -> tuple[Path, list[Any]]:
    """A database, and its first questions, each as often as a group has members."""
    from emailrl.questions.load import read_questions
    from emailrl.settings import DataSettings

    count, members = (2, 3) if given.smoke else (AT_ONCE // GROUP_SIZE, GROUP_SIZE)
    db, questions = (given.db, given.questions) if given.db else demo(folder)
    found = read_questions(questions, DataSettings()).of(None, limit=count, seed=1, check_inboxes=False)
    return db, [scenario for scenario in found.scenarios for _ in range(members)]


@dataclass
class Scripted:
    """The mail environment, playing its own calls whatever the model says: ``rounds`` of search and read, an answer."""

    inner: Any
    rounds: int = 2
    max_results: int = 10
    number: int = 0
    found: str | None = None

    def __getattr__(self, name: str) -> Any:
        """All else is the environment's own: first messages, scenario, rubric, answer."""
        return getattr(self.inner, name)

    def step(self, message: Any) -> Any:
        from emailrl.records.trajectory import Message, ToolCall

        words = sorted({word.strip("?.,'\"") for word in self.scenario.question.split()}, key=lambda word: -len(word))
        keywords = [words[self.number // 2 % len(words)]]
        search = ToolCall("search_emails", {"keywords": keywords, "max_results": self.max_results})
        answer = ToolCall("return_final_answer", {"answer": "I don't know", "sources": []})
        read = ToolCall("read_email", {"message_id": self.found}) if self.found else search
        call = [*[search, read] * self.rounds, answer][self.number]
        self.number += 1
        result = self.inner.step(Message("assistant", message.content, [call]))
        if call.name == "search_emails" and (hits := json.loads(result.tool_result)):
            self.found = hits[0]["message_id"]
        return result


@dataclass
class Timed:
    """An engine whose completions have the lengths of the script, and count as ended however they end."""

    engine: Any
    shortest: int = SHORTEST
    longest: int = LONGEST  # tokens of a completion
    between: float = 0.0

    def generate(self, requests: Sequence[Any], advance: Any) -> list[Any]:
        def of_length(request: Any) -> Any:
            length = self.shortest + request.seed % (self.longest - self.shortest + 1)
            return replace(request, sampling=replace(request.sampling, max_tokens=length))

        def go_on(completion: Any) -> Any:
            before = time.perf_counter()
            follow_up = advance(replace(completion, finish_reason="stop"))
            self.between += time.perf_counter() - before
            return None if follow_up is None else of_length(follow_up)

        completions: list[Any] = self.engine.generate([of_length(request) for request in requests], go_on)
        return completions

    def close(self) -> None:
        """The engine is closed elsewhere."""


def play(engine: Any, policy: Any, db: Path, scenarios: Sequence[Any]) -> dict[str, float]:
    from emailrl.agent import MailEnvironment, tool_schemas
    from emailrl.agent.runner import run
    from emailrl.engines import SamplingParams
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.mail import open_mailbox
    from emailrl.records.trajectory import Trajectory

    timed, renderer = Timed(engine), ChatRenderer(policy.tokenizer, tool_schemas())
    with ExitStack() as opened:
        environments = [
            Scripted(MailEnvironment(scenario, opened.enter_context(closing(box)), max_turns=10))
            for scenario in scenarios
            for box in [open_mailbox(db, scenario.inbox_address, until=scenario.query_date)]
        ]
        # With ids of their own, since members of a group play the same question.
        empty = [Trajectory(str(n), scenario.id, scenario) for n, scenario in enumerate(scenarios)]
        sampling, seeds = SamplingParams(LONGEST, temperature=1.0), list(range(len(scenarios)))
        before = time.perf_counter()
        ended = run(environments, timed, renderer, sampling, seeds=seeds, trajectories=empty)
        seconds = time.perf_counter() - before
    broken = [trajectory.exception for trajectory in ended if trajectory.exception]
    if broken:
        raise RuntimeError(f"{len(broken)} trajectories raised; the first: {broken[0]}")
    turns = [turn for trajectory in ended for turn in trajectory.turns]
    return {
        "trajectories": len(ended),
        "seconds": seconds,
        "trajectories_per_second": len(ended) / seconds,
        "sampled_tokens_per_second": sum(len(turn.completion_ids) for turn in turns) / seconds,
        "turns": len(turns),
        "prompt_tokens": max(turn.prompt_tokens for turn in turns),
        "tools": sum(turn.tool_seconds for turn in turns) / seconds,
        "between": timed.between / seconds,
    }


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "shape": "shape", "side": "side", "at once": "trajectories", "trajectories/s": "trajectories_per_second:.2f",
        "sampled tokens/s": "sampled_tokens_per_second:,.0f", "seconds": "seconds:.1f", "tools": "tools:.2%",
        "between": "between:.2%", "longest prompt": "prompt_tokens:,", "start s": "start:.0f", "wake s": "wake:.2f",
    },
    {
        "--shape": {"nargs": "+", "default": ["4B"]},
        "--sides": {"nargs": "+", "default": list(SIDES), "choices": SIDES},
        "--db": {"type": Path, "help": "a mail database; default: the demo's"},
        "--questions": {"type": Path, "help": "questions on it (JSONL)"},
    },
    smoke={"shape": ["nano"], "sides": ["transformers"]},
    shapes=lambda given: [] if given.smoke else given.shape,
    limit=400,
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
