"""A training run that plays a script, under clocks: what ``bench_grpo_step`` puts on a ``training.run.Run``.

What a run needs of a model that can talk is replaced: calls come from a script, completions have the script's lengths,
and rewards are drawn by seed, for members of a group must differ to be trained. All else is the run's own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench_sampling import Scripted, Timed
from step_timeline import Batch, Timeline, attach, attach_vllm

SHORTEST, LONGEST, RESULTS = 120, 320, 5
"""Tokens of a completion, results of a search: with two rounds of search and read, about a quarter is trained."""


@dataclass
class Bench:
    """A run under clocks, and what is told of it."""

    given: argparse.Namespace
    timeline: Timeline
    records: list[dict[str, Any]] = field(default_factory=list)
    vllm: Counter[str] = field(default_factory=Counter)
    batches: list[Batch] = field(default_factory=list)
    collected: list[Any] = field(default_factory=list)
    """Groups of the step under way."""
    prepared: list[Any] = field(default_factory=list)
    """Micro-batches of the last update."""
    keeps: Counter[str] = field(default_factory=Counter)
    """What the fused layers kept, by micro-batch."""
    memory: dict[str, float] = field(default_factory=dict)
    before_engine: float = 0.0
    allocated: int = 0
    begun: float = field(default_factory=time.monotonic)
    proofs: list[float] = field(default_factory=list)
    """Mean gaps in nats between the engine's log-probabilities of the probe and the trainer's."""

    def tell(self, record: dict[str, Any]) -> None:
        """Keep a record, and write it at once: what comes later may fail."""
        self.records.append(record)
        if self.given.out:
            with self.given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


class TimeUp(Exception):
    """No further step may begin."""


@dataclass
class Told:
    """An engine whose follow-ups are timed as the rollout's bookkeeping."""

    engine: Any
    timeline: Timeline

    def generate(self, requests: Sequence[Any], advance: Any) -> list[Any]:
        """See ``Engine.generate``."""

        def go_on(completion: Any) -> Any:
            with self.timeline.span("sampling/bookkeeping"):
                return advance(completion)

        completions: list[Any] = self.engine.generate(requests, go_on)
        return completions


@dataclass
class Drawn:
    """The run's own scorer, its rewards then replaced by draws."""

    inner: Any

    def score(self, trajectories: Sequence[Any]) -> None:
        """See ``Scorer.score``."""
        self.inner.score(trajectories)
        for trajectory in trajectories:
            trajectory.reward = random.Random(trajectory.id).uniform(-1, 1)
            trajectory.reward_terms = {"drawn": trajectory.reward}


def prepare(bench: Bench, run: Any) -> None:
    """Let the run play the script, and put the clocks on."""
    from emailrl.agent.collect import Collector
    from emailrl.agent.play import build_stage

    timeline, engine, stage = bench.timeline, run.engine, build_stage(run.settings, run.policy)
    make = stage.make_environment

    completion = bench.given.completion
    lengths = (completion, completion) if completion else (SHORTEST, LONGEST)

    def scripted(*given: Any) -> Any:
        environment = Scripted(make(*given), rounds=0 if completion else 2, max_results=RESULTS)
        for method in ("start", "step"):
            timeline.wrap(environment, method, "sampling/mailbox")
        return environment

    assert callable(run.evaluate_if_due)
    run.evaluate_if_due = lambda: None
    run.collector = replace(run.collector, scorer=Drawn(run.collector.scorer))
    attach(timeline, run, engine)
    if bench.given.engine == "vllm":
        attach_vllm(timeline, engine, bench.vllm, bench.batches)
        watch_proofs(bench, engine._probe)
    play = replace(stage, make_environment=scripted).on(Told(Timed(engine, *lengths), timeline))
    run.collector = replace(run.collector, play=play)
    keep(Collector, "collect", bench.collected.extend)
    take_prepared(bench, run.updater)
    watch_memory(bench, run)
    run.end_step = ending_step(bench, run)


def watch_proofs(bench: Bench, probe: Any) -> None:
    """Note by how much the engine's log-probabilities of the tokens drawn after the probe's prefixes are off."""
    from emailrl.engines.vllm.probe import _logprobs, mean_gap

    inner = probe.check

    def check(who: str, drawn: Sequence[int], logprobs: Sequence[float], expected: Any) -> None:
        bench.proofs.append(mean_gap(logprobs, _logprobs(expected.logits, drawn, probe.temperature)))
        inner(who, drawn, logprobs, expected)

    probe.check = check


def keep(owner: Any, method: str, kept: Any) -> None:
    """Give what ``owner.method`` returns to ``kept`` as well."""
    inner = getattr(owner, method)

    def keeping(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        kept(result)
        return result

    setattr(owner, method, keeping)


def take_prepared(bench: Bench, updater: Any) -> None:
    """Keep the micro-batches that an update is made of: the list that is counted, halved where memory runs out."""
    inner = updater.objective.count

    def count(prepared: list[Any]) -> Any:
        bench.prepared = prepared
        return inner(prepared)

    updater.objective.count = count


def watch_memory(bench: Bench, run: Any) -> None:
    """Note what the card holds while the engine samples and once it sleeps, and what the trainer's layers keep."""
    import torch

    from emailrl.model.fused.model import fused_backbone

    if (fused := fused_backbone(run.policy.model)) is not None:
        keep(fused, "keep_for", lambda kept: bench.keeps.update([kept.name]))
    if not torch.cuda.is_available():
        return
    bench.before_engine = used()
    release = run.engine.release

    def releasing() -> None:
        bench.memory["while sampling"] = used()
        release()
        bench.memory["vLLM asleep"] = used()
        torch.cuda.reset_peak_memory_stats()
        bench.allocated = torch.cuda.memory_allocated()

    run.engine.release = releasing


def used() -> float:
    """GiB of the card that are taken, by whomever."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def ending_step(bench: Bench, run: Any) -> Callable[..., None]:
    """What stands in for ``run.end_step``: the step is told of when it is over."""
    inner = run.end_step

    def end_step(metrics: Any = None) -> None:
        inner(metrics)
        step = bench.timeline.cut()
        with (run.directory / "metrics.jsonl").open(encoding="utf-8") as file:
            written = json.loads(file.readlines()[-1])
        bench.tell(
            {"kind": "step", "number": run.state.step, "counts": run.state.step > 1}
            | step
            | {"batch": batch_of(bench, written), "product_seconds": written["seconds"], "memory": memory_of(bench)}
            | {"batches": [(round(seconds, 5), rows, tokens) for seconds, rows, tokens in bench.batches]}
        )
        print(f"step {run.state.step}: {step['seconds']:.1f} s", file=sys.stderr, flush=True)
        for kept in (bench.collected, bench.vllm, bench.batches, bench.keeps, bench.memory):
            kept.clear()
        if time.monotonic() - bench.begun > bench.given.seconds:
            raise TimeUp
        bench.timeline.cut()  # what was told here belongs to no step
        faulthandler.dump_traceback_later(300, exit=False)

    return end_step


def memory_of(bench: Bench) -> dict[str, float]:
    """GiB of the card by occasion, and what the update allocates at most; empty on a CPU.

    Counted from the beginning of the update: PyTorch's own count goes on counting what a sleeping vLLM gave back.
    """
    import torch

    if not torch.cuda.is_available():
        return {}
    update = (torch.cuda.max_memory_allocated() - bench.allocated) / 2**30
    return {"before vLLM": bench.before_engine} | bench.memory | {"update adds": update, "after the update": used()}


def batch_of(bench: Bench, metrics: dict[str, Any]) -> dict[str, Any]:
    """What a step was made of."""
    trajectories = [trajectory for group in bench.collected for trajectory in group.trajectories]
    if raised := [trajectory.exception for trajectory in trajectories if trajectory.exception]:
        raise RuntimeError(f"{len(raised)} trajectories raised; the first: {raised[0]}")
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    lengths = [sum(len(sample.token_ids) for sample in trajectory.samples) for trajectory in trajectories]
    return {
        "trajectories": len(trajectories),
        "broken": sum(len(trajectory.samples) > 1 for trajectory in trajectories),
        "turns": len(turns),
        "sampled_tokens": sum(len(turn.completion_ids) for turn in turns),
        "shortest": min(lengths),
        "mean": statistics.mean(lengths),
        "longest": max(lengths),
        "tokens": metrics["total_tokens"],
        "trained_tokens": metrics["trainable_tokens"],
        "groups_kept": metrics["groups_kept"],
        "computed_tokens": sum(item.num_tokens for item in bench.prepared),
        "micro_batches": len(bench.prepared),
        "halved": metrics["micro_batches_halved"],
        "kept": dict(bench.keeps),
        "vllm": dict(bench.vllm),
        "vllm_version": getattr(sys.modules.get("vllm"), "__version__", None),
        "proof_gap": bench.proofs[-1] if bench.proofs else None,
        "sampler_gap_mean": metrics.get("sampler_gap_mean"),
    }
