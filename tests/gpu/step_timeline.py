"""Where the seconds of a training step go: a stack of clocks on the methods of a run, so that nothing counts twice.

Each wrapped method has a name; its *own* seconds are those it spends outside the wrapped methods that it calls. Own
seconds of all names and ``other`` (what no wrapped method covers) add up to the wall time of the step.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

OTHER = "other"
Batch = tuple[float, int, int]
"""Seconds, rows and tokens of one of vLLM's batches, drafts aside: as many tokens as rows if it reads no prompt."""


@dataclass
class Frame:
    """A wrapped method that is running."""

    name: str
    begun: float
    inner: float = 0.0
    """Seconds in wrapped methods that it called."""


@dataclass
class Timeline:
    """The clocks of one run; ``cut`` ends a step."""

    settle: Callable[[], None] = lambda: None
    """Waits for the GPU, so that its work counts where it was asked for."""
    clock: Callable[[], float] = time.perf_counter
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    whole: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by ``Class.method``, those of the methods it called included."""
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    failed_in: list[str] = field(default_factory=list)
    """What was running, outermost first, where an exception began."""

    def __post_init__(self) -> None:
        self._open: list[Frame] = []
        self._begun = self.clock()

    @contextmanager
    def span(self, name: str | None, *, drawn: bool = False, settled: bool = False) -> Iterator[Frame]:
        """Time the block, under the name of what it is inside of where ``name`` is None.

        ``drawn`` keeps beginning and end, ``settled`` waits for the GPU before the end.
        """
        frame = Frame(name or (self._open[-1].name if self._open else OTHER), self.clock())
        self._open.append(frame)
        try:
            yield frame
            if settled:
                self.settle()
        except BaseException:
            self.failed_in = self.failed_in or [one.name for one in self._open]
            raise
        finally:
            self._open.pop()
            seconds = self.clock() - frame.begun
            self.own[frame.name] += seconds - frame.inner
            self.calls[frame.name] += 1
            if self._open:
                self._open[-1].inner += seconds
            if drawn:
                self.spans.append((frame.name, frame.begun, frame.begun + seconds))

    def wrap(self, owner: Any, method: str, name: str | None, *, drawn: bool = False, settled: bool = False) -> None:
        """Replace ``owner.method`` by one that is timed (see ``span``); AttributeError where there is none."""
        inner = getattr(owner, method)
        label = f"{type(owner).__name__}.{method}"

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name, drawn=drawn, settled=settled) as frame:
                result = inner(*args, **kwargs)
            self.whole[label] += self.clock() - frame.begun
            return result

        (type if isinstance(owner, type) else object).__setattr__(owner, method, timed)  # some owners are frozen

    @property
    def now(self) -> Frame:
        """What is running, innermost."""
        return self._open[-1]

    def cut(self) -> dict[str, Any]:
        """End a step: its wall seconds, own seconds by name with the rest as ``other``, calls, spans from 0 on."""
        now = self.clock()
        seconds, begun = now - self._begun, self._begun
        own = {name: value for name, value in self.own.items() if name != OTHER}
        own[OTHER] = seconds - sum(own.values())
        step = {
            "seconds": seconds,
            "own": own,
            "calls": dict(self.calls),
            "whole": dict(self.whole),
            "spans": [(name, on - begun, off - begun) for name, on, off in sorted(self.spans, key=lambda one: one[1])],
        }
        for kept in (self.own, self.calls, self.whole, self.spans):
            kept.clear()
        self._begun = now
        return step


def attach(timeline: Timeline, run: Any, engine: Any) -> None:
    """Put clocks on a ``training.run.Run`` and its ``engine`` (the product's own, inside what wraps it).

    Names before a slash are the phases; what follows it says what part.
    """
    from emailrl.agent.play import Collector, Stage
    from emailrl.engines.renderer import ChatRenderer

    updater = run.updater
    for owner, method, name in (
        (run, "refresh_engine", OTHER), (run, "collect", OTHER), (run, "train", OTHER),
        (run.rollouts, "record", "records"), (run, "record_training", "records"), (run, "end_step", "records"),
        (run.writer, "write", "records"), (run.tracker, "step", "records"),
        (Stage, "open_environment", "sampling/mailbox"), (engine, "generate", "sampling/engine"),
        *((ChatRenderer, method, "sampling/template") for method in ("start", "extend", "parse", "text_of")),
    ):  # fmt: skip
        timeline.wrap(owner, method, name)
    for owner, method, name in (
        (engine, "resume", "wake"), (engine, "release", "sleep"), (run.policy, "save_adapter", "adapter/save"),
        (engine, "load_adapter", "adapter/proof"),
        (Collector, "collect", "sampling/bookkeeping"), (run.collector.scorer, "score", "reward"),
        (updater, "_prepare", "scoring"), (updater, "_backward", "backward"),
        (updater.forward, "train", "forward"), (updater, "_update", "optimizer"),
    ):  # fmt: skip
        timeline.wrap(owner, method, name, drawn=True, settled=True)


def attach_vllm(timeline: Timeline, engine: Any, counts: Counter[str], batches: list[Batch]) -> None:
    """The same for what ``VllmEngine`` does inside; ``counts`` gets the sums of its batches, ``batches`` each one."""
    begin = engine._start

    def start() -> None:
        with timeline.span("start"):
            begin()
        name_steps(timeline, engine._engine.engine_core.engine_core.scheduler, counts, batches)

    engine._start = start
    timeline.wrap(engine, "_take_adapter", "adapter/load", drawn=True)
    timeline.wrap(engine._probe._weights, "load", "adapter/read", settled=True)
    timeline.wrap(engine._probe, "_logits", "adapter/trainer", settled=True)
    timeline.wrap(engine, "_step", None)  # sampling, or an adapter's proof


def name_steps(timeline: Timeline, scheduler: Any, counts: Counter[str], batches: list[Batch]) -> None:
    """Tell vLLM's steps that read prompts from those that only sample.

    A step is what its finished batch was: scheduling may run one batch ahead. A batch takes from the end of the one
    before, as batches queue up on the GPU.
    """
    take = scheduler.update_from_output
    before = timeline.clock()

    def update_from_output(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal before
        before, begun = timeline.clock(), before
        drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        tokens, rows = scheduled.total_num_scheduled_tokens - drafts, len(scheduled.num_scheduled_tokens)
        if rows and timeline.now.name == "sampling/engine":  # not an adapter's proof
            reads = tokens > rows
            timeline.now.name = "sampling/prompts" if reads else "sampling/tokens"
            counts["prompt_steps" if reads else "token_steps"] += 1
            counts["prompt_tokens"] += tokens - rows
            batches.append((before - begun, rows, tokens))
            counts["draft_tokens"] += drafts
            counts["preempted"] += len(scheduled.preempted_req_ids or ())
        return take(scheduled, *args, **kwargs)

    scheduler.update_from_output = update_from_output
