"""Where every second of a whole GRPO step goes, on one GPU, sampling among them: vLLM in process, or transformers.

    python tests/gpu/bench_grpo_step.py --shape 14B --db enron_emails.db --questions art_e_questions.jsonl
    python tests/gpu/bench_grpo_step.py --shape 0.6B --tokens 48 144 --engine transformers          # sampling speed
    python tests/gpu/bench_grpo_step.py --shape 4B --tokens 48 144 --set vllm_enforce_eager=true
    python tests/gpu/bench_grpo_step.py --shape 4B --completion 768 --set beta=0 temperature=1

The steps are those of ``emailrl train`` with its default settings but for the batch (8 questions x 6 rollouts); clocks
are on its methods (``clocks``). Random weights of the true shapes say nothing sensible, so what they say is not played:
every trajectory makes the same real calls (search, read, search, read, answer) on the question's own inbox, each after
a completion of ``--tokens`` tokens (by its seed), and its prompt grows by the tools' real results. Rewards are drawn by
seed, so that every group is trained. The first step warms up (vLLM starts, kernels are compiled) and does not count in
the mean. Evaluation is left out.
``--completion N``: one turn of exactly N tokens instead. No step begins after ``--limit``. ``own`` in the rows has the
seconds of every clock.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from clocks import OTHER, Clocks
from runner import Bench, Given, Row, now

from emailrl.questions.load import questions_file, write_demo
from emailrl.records.trajectory import Message, ToolCall
from emailrl.settings import StoreSettings, load_settings
from emailrl.training.loop import train

RESULTS = 5
"""Of a search. With two rounds of it and 120 to 320 tokens, a quarter is trained."""
SETTINGS: Row = {
    "per_device_train_batch_size": 8,
    "num_generations": 6,
    "max_model_len": 16384,
    "learning_rate": 1e-4,  # so large that the engine's proof sees the adapter move
    "warmup_steps": 1,
    "vllm_probe_tolerance": 0.3,  # random weights amplify rounding: 0.04 nats between two kernels in bf16
    "judge": "offline",
    "allow_shared_inbox": True,
    "wandb_mode": "disabled",
}
SMOKE: Row = {"model_name": "nano", "per_device_train_batch_size": 2, "num_generations": 3, "max_model_len": 4096}
SMOKE |= {"vllm_enforce_eager": True}
CLOCKS = {
    "emailrl.training.run:TrainingRun.end_step": "records",
    "emailrl.training.run:TrainingRun.record_training": "records",
    "emailrl.training.state:Rollouts.record": "records",
    "emailrl.agent.play:Collector.collect": "sampling/bookkeeping",
    "emailrl.engines.renderer:ChatRenderer.start": "sampling/template",
    "emailrl.engines.renderer:ChatRenderer.extend": "sampling/template",
    "emailrl.engines.renderer:ChatRenderer.parse": "sampling/template",
    "emailrl.rewards.scorer:Scorer.score": "reward",
    "emailrl.model.policy:Policy.save_adapter": "adapter/save",
    "emailrl.training.update:Updater._prepare": "scoring",
    "emailrl.training.update:Updater._backward": "backward",
    "emailrl.training.forward:Forward.train": "forward",
    "emailrl.training.update:Updater._update": "optimizer",
}
OF_ENGINE = {"generate": "sampling/engine", "load_adapter": "adapter/load", "resume": "wake", "release": "sleep"}
ENGINES = {
    "vllm": "emailrl.engines.vllm.local:VllmEngine",
    "transformers": "emailrl.engines.local.engine:TransformersEngine",
}
PHASES = ("sampling", "reward", "scoring", "forward", "backward", "optimizer", "adapter", "wake", "sleep", "records",
          "start", OTHER)  # fmt: skip
"""``start`` comes in the first step only."""


class Enough(Exception):
    """No further step may begin."""


def cases(given: Given) -> list[Row]:
    named = " ".join(given.set)
    return [{"case": f"{given.shape} {engine} {named}".strip(), "engine": engine} for engine in given.engine]


def measure(given: Given, case: Row) -> list[Row]:
    """The rows of the steps; a failure is a row after those that there are."""
    rows, clocks = list[Row](), Clocks(now)
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as folder:
        overrides = SETTINGS | {"output_dir": Path(folder) / "run", "max_steps": given.steps + 1}
        overrides |= {"engine": case["engine"], "max_tokens": given.completion or given.tokens[1]}
        overrides |= SMOKE if given.smoke else {"model_name": str(given.folder / given.shape)}
        db, questions = (given.db, given.questions) if given.db else demo(Path(folder))
        overrides |= {"db": db, "questions": questions} | dict(one.split("=", 1) for one in given.set)
        try:
            put_on(clocks, given, case["engine"], rows)
            settings = load_settings(overrides, environ={})
            train(settings, progress=partial(print, file=sys.stderr, flush=True))
        except Enough:
            pass
        except Exception as error:
            traceback.print_exc()
            rows.append({"error": f"{error!r:.200}"})
        finally:
            clocks.restore()
    return rows


def put_on(clocks: Clocks, given: Given, kind: str, rows: list[Row]) -> None:
    """Let the run play the script with drawn rewards, and put the clocks on; each step's row goes to ``rows``."""
    engine, begun = ENGINES[kind], time.monotonic()
    shortest, longest = [given.completion] * 2 if given.completion else given.tokens
    groups: list[Any] = []

    def generate(inner: Any, self: Any, requests: Sequence[Any], advance: Any) -> Any:
        """Completions have the lengths of the script, and count as ended however they end."""

        def of_length(request: Any) -> Any:
            length = shortest + request.seed % (longest - shortest + 1)
            return replace(request, sampling=replace(request.sampling, max_tokens=length))

        def go_on(completion: Any) -> Any:
            with clocks.span("sampling/bookkeeping"):
                follow_up = advance(replace(completion, finish_reason="stop"))
            return None if follow_up is None else of_length(follow_up)

        return inner(self, [of_length(request) for request in requests], go_on)

    def open_environment(inner: Any, *args: Any) -> Any:
        with clocks.span("sampling/mailbox"):
            environment = inner(*args)
        return Scripted(environment, clocks, rounds=0 if given.completion else 2)

    def score(inner: Any, self: Any, trajectories: Sequence[Any]) -> None:
        inner(self, trajectories)
        for one in trajectories:
            one.reward = random.Random(one.id).uniform(-1, 1)
            one.reward_terms = {"drawn": one.reward}

    def collect(inner: Any, *args: Any, **named: Any) -> Any:
        made = inner(*args, **named)
        groups.extend(made)
        return made

    def end_step(inner: Any, run: Any, metrics: Row | None = None) -> None:
        inner(run, metrics)
        seconds, own = clocks.cut()
        row = {"step": run.state.step, "seconds": seconds, "own": own}
        row |= by_phase(own) | batch_of(groups, metrics or {})
        rates = {"trajectories_per_second": "trajectories", "tokens_per_second": "sampled_tokens"}
        rows.append(row | {name: row[of] / row["sampling"] for name, of in rates.items()})
        print(f"step {run.state.step}: {seconds:.1f} s", file=sys.stderr, flush=True)
        groups.clear()
        if run.state.step == given.steps or time.monotonic() - begun > given.limit:
            raise Enough
        clocks.cut()  # what was told here belongs to no step

    for path, name in CLOCKS.items() | {(f"{engine}.{method}", name) for method, name in OF_ENGINE.items()}:
        clocks.time(path, name)
    clocks.put("emailrl.training.run:TrainingRun.evaluate_if_due", lambda inner, run: None)
    clocks.put("emailrl.training.run:TrainingRun.end_step", end_step)
    clocks.put("emailrl.agent.play:Stage.open_environment", open_environment)
    clocks.put("emailrl.rewards.scorer:Scorer.score", score)
    clocks.put("emailrl.agent.play:Collector.collect", collect)
    clocks.put(f"{engine}.generate", generate)
    if kind == "vllm":
        clocks.time(f"{engine}._start", "start")
        clocks.time(f"{engine}._step", None)  # sampling, or an adapter's proof
        clocks.time("emailrl.engines.vllm.probe:Probe.load", "adapter/read")
        clocks.time("emailrl.engines.vllm.probe:Probe._logits", "adapter/trainer")


@dataclass
class Scripted:
    """The mail environment, playing its own calls whatever the model says: ``rounds`` of search and read, an answer."""

    inner: Any
    clocks: Clocks
    rounds: int
    number: int = 0
    found: str | None = None

    def __getattr__(self, name: str) -> Any:
        """All else is the environment's own: scenario, rubric, answer."""
        return getattr(self.inner, name)

    def start(self) -> Any:
        with self.clocks.span("sampling/mailbox"):
            return self.inner.start()

    def step(self, message: Any) -> Any:
        words = sorted({word.strip("?.,'\"") for word in self.scenario.question.split()}, key=lambda word: -len(word))
        keywords = [words[self.number // 2 % len(words)]]
        search = ToolCall("search_emails", {"keywords": keywords, "max_results": RESULTS})
        answer = ToolCall("return_final_answer", {"answer": "I don't know", "sources": []})
        read = ToolCall("read_email", {"message_id": self.found}) if self.found else search
        call = [*[search, read] * self.rounds, answer][self.number]
        self.number += 1
        with self.clocks.span("sampling/mailbox"):
            result = self.inner.step(Message("assistant", message.content, [call]))
        if call.name == "search_emails" and (hits := json.loads(result.tool_result)):
            self.found = hits[0]["message_id"]
        return result


def demo(folder: Path) -> tuple[Path, Path]:
    """The demo's mail database and questions."""
    write_demo(db := folder / "demo.db", settings=StoreSettings(), seed=1, overwrite=True)
    return db, questions_file(db)


def by_phase(own: dict[str, float]) -> dict[str, float]:
    """Seconds by phase, which add up to what ``own`` adds up to. KeyError for an unknown one."""
    sums = dict.fromkeys(PHASES, 0.0)
    for name, seconds in own.items():
        sums[name.partition("/")[0]] += seconds
    return sums


def batch_of(groups: Sequence[Any], metrics: Row) -> Row:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if raised := [trajectory.exception for trajectory in trajectories if trajectory.exception]:
        raise RuntimeError(f"{len(raised)} trajectories raised; the first: {raised[0]}")
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {
        "trajectories": len(trajectories),
        "turns": len(turns),
        "sampled_tokens": sum(len(turn.completion_ids) for turn in turns),
        "tokens": metrics["total_tokens"],
        "trained_tokens": metrics["trainable_tokens"],
        "halved": metrics["micro_batches_halved"],
    }


def add_mean(rows: list[Row]) -> None:
    """A last row for each case with the means of the steps that count."""
    for case in dict.fromkeys(row["case"] for row in rows):
        counted = [row for row in rows if row["case"] == case and row.get("step", 0) > 1]
        if counted:
            names = [name for name, value in counted[0].items() if isinstance(value, float)]
            mean: Row = {name: statistics.fmean(row[name] for row in counted) for name in names}
            own = {name: statistics.fmean(row["own"].get(name, 0.0) for row in counted) for name in counted[-1]["own"]}
            tokens = statistics.fmean(row["tokens"] for row in counted)
            mean |= {"step": "mean", "tokens": round(tokens), "rate": tokens / mean["seconds"], "own": own}
            rows.append(counted[-1] | mean | {"sampled_tokens": None})
            print(json.dumps({name: round(seconds, 3) for name, seconds in sorted(own.items())}))


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "case": "case", "step": "step", "trajectories": "trajectories", "tokens": "tokens:,",
        "sampled": "sampled_tokens:,", "sampled a second: trajectories": "trajectories_per_second:.2f",
        " tokens": "tokens_per_second:,.0f", "seconds": "seconds:.2f", "tokens/s": "rate:,.0f",
        **{phase: f"{phase}:.2f" for phase in PHASES},
    },
    {
        "--shape": {"default": "14B"},
        "--engine": {"nargs": "+", "default": ["vllm"], "choices": [*ENGINES]},
        "--tokens": {"nargs": 2, "type": int, "default": [120, 320], "help": "of the shortest and longest completion"},
        "--steps": {"type": int, "default": 3, "help": "steps, the first of which does not count"},
        "--db": {"type": Path, "help": "a mail database; default: the demo's"},
        "--questions": {"type": Path, "help": "questions on it (JSONL)"},
        "--set": {"nargs": "*", "default": [], "metavar": "NAME=VALUE", "help": "further settings: beta=0"},
        "--completion": {"type": int, "help": "one turn of so many tokens"},
    },
    cases,
    smoke={"shape": "nano", "completion": 4},
    shapes=lambda given: [] if given.smoke else [given.shape],
    add=add_mean,
    limit=560,
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
