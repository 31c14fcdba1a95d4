"""Where the seconds of a training step go: a stack of clocks on the methods of its classes; nothing counts twice.

Each clocked method has a name; its *own* seconds are those it spends outside the clocked methods that it calls. Own
seconds of all names and ``other`` (what no clocked method covers) add up to the wall time of the step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

OTHER = "other"


@dataclass
class Frame:
    name: str
    begun: float
    inner: float = 0.0  # seconds in clocked methods that it called


@dataclass
class Clocks:
    """The clocks of one run; ``cut`` ends a step, ``restore`` takes them off again."""

    settle: Callable[[], object] = lambda: None  # waits for the GPU, so that its work counts where it was asked for
    clock: Callable[[], float] = time.perf_counter
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self._open: list[Frame] = []
        self._begun = self.clock()
        self._before: list[tuple[Any, str, Any]] = []

    @contextmanager
    def span(self, name: str | None, *, settled: bool = False) -> Iterator[None]:
        """Time the block, under the name of what it is inside of where ``name`` is None. ``settled`` waits for the GPU
        before the end."""
        frame = Frame(name or (self._open[-1].name if self._open else OTHER), self.clock())
        self._open.append(frame)
        try:
            yield
            if settled:
                self.settle()
        finally:
            self._open.pop()
            seconds = self.clock() - frame.begun
            self.own[frame.name] += seconds - frame.inner
            if self._open:
                self._open[-1].inner += seconds

    def put(self, path: str, instead: Callable[..., Any]) -> None:
        """Have calls of ``module:Class.method`` go to ``instead``, with the method itself before their arguments."""
        owner, _, method = path.rpartition(".")
        cls = resolve_name(owner)
        inner = getattr(cls, method)
        self._before.append((cls, method, inner))
        setattr(cls, method, lambda *args, **named: instead(inner, *args, **named))

    def time(self, path: str, name: str | None) -> None:
        """Clock the method at ``module:Class.method``, the GPU's work with it (see ``span``)."""

        def timed(inner: Any, *args: Any, **named: Any) -> Any:
            with self.span(name, settled=True):
                return inner(*args, **named)

        self.put(path, timed)

    def restore(self) -> None:
        while self._before:
            setattr(*self._before.pop())

    @property
    def now(self) -> Frame:
        return self._open[-1]

    def cut(self) -> tuple[float, dict[str, float]]:
        """End a step: its wall seconds, and own seconds by name with the rest as ``other``."""
        now = self.clock()
        seconds, self._begun = now - self._begun, now
        own = {name: value for name, value in self.own.items() if name != OTHER}
        self.own.clear()
        return seconds, own | {OTHER: seconds - sum(own.values())}
