"""Progress: of a run while it trains, on a terminal a live display below the printed lines, and of countable work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from emailrl.cli.output import progress_console, result_console, say
from emailrl.runs.log import Display, duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress

    from emailrl.measure.evaluation import Evaluation
    from emailrl.records.trajectory import Trajectory
    from emailrl.settings import Settings

BARS = "▁▂▃▄▅▆▇█"
REFRESH = 4
"""Display refreshes per second."""


class LiveRun(Display):
    """Prints a run's lines and shows its progress; a context manager."""

    def __init__(self, settings: Settings, console: Console | None = None, *, json: bool = False) -> None:
        super().__init__()
        self._settings = settings
        self._json = json
        self._results: list[str] = []
        self._console = console or progress_console()
        self._live: Live | None = None
        self._run = _Numbers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def say(self, line: str) -> None:
        """Print a line, above the display if there is one."""
        say(line, self._console)

    def result(self, line: str) -> None:
        """Keep a result line to print on stdout after the display stops."""
        self._results.append(line)

    def start(self, run_dir: Path, step: int, total: int) -> None:
        """Start showing a run; curves from before a resume are read from its files."""
        from rich.live import Live

        self._run = _Numbers(step=step, total=total)
        self._run.recall(run_dir)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=REFRESH, vertical_overflow="crop")
            self._live.start()

    def phase(self, name: str, total: int = 0) -> None:
        """Show the new phase."""
        self._run.phase, self._run.phase_total, self._run.phase_done = name, total, 0

    def played(self, trajectory: Trajectory) -> None:
        """Count a finished rollout."""
        self._run.phase_done += 1

    def recorded(self, file: Path, trajectories: Sequence[Trajectory]) -> None:
        """Print the trajectories if the settings enable it."""
        from emailrl.cli.trajectory import show_trajectories

        output, model = self._settings.output, self._settings.model.name
        show_trajectories(file, trajectories, output, model, self._console)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Add an evaluation to the curve."""
        if not evaluation.is_void:
            self._run.evaluations.append(evaluation.accuracy)

    def step(self, metrics: Mapping[str, Any], seconds_left: float) -> None:
        """Add a step to the curves."""
        self._run.take(metrics, seconds_left)

    def end(self) -> None:
        """Stop the display and leave its last state on the terminal, then print the results."""
        if self._live is not None:
            self._run.phase, self._run.phase_total = "", 0
            self._live.stop()
            self._live = None
        for line in self._results:
            say(line, result_console(json=self._json))
        self._results.clear()

    def __rich__(self) -> RenderableType:
        return self._run.drawn(self._console.width)


class _Numbers:
    """The display's view of a run."""

    def __init__(self, step: int = 0, total: int = 1) -> None:
        self.step, self.total = step, total
        self.phase, self.phase_total, self.phase_done = "", 0, 0
        self.rewards: list[float] = []
        self.accuracies: list[float] = []
        self.evaluations: list[float] = []
        self._last: Mapping[str, Any] = {}
        self._begun = time.monotonic()
        self._ends: float | None = None

    def recall(self, run_dir: Path) -> None:
        """Load the curves of earlier steps from the run's files."""
        from emailrl.records import read_records

        for name, take in (("metrics", self._take_curves), ("evaluations", self._take_evaluation)):
            if (path := run_dir / f"{name}.jsonl").is_file():
                for record in read_records(path):
                    take(record)

    def take(self, metrics: Mapping[str, Any], seconds_left: float) -> None:
        """Add a step's numbers."""
        self._take_curves(metrics)
        self._last, self.step = metrics, metrics["step"]
        self._ends = time.monotonic() + seconds_left

    def _take_curves(self, metrics: Mapping[str, Any]) -> None:
        for values, name in ((self.rewards, "reward_mean"), (self.accuracies, "accuracy")):
            if metrics.get(name) is not None:
                values.append(metrics[name])

    def _take_evaluation(self, record: Mapping[str, Any]) -> None:
        self.evaluations.append(record["accuracy"])

    def drawn(self, width: int) -> RenderableType:
        """The display, at most ``width`` columns wide."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        space = max(width - 44, 8)
        rows: list[tuple[str, RenderableType, str]] = [
            (
                f"Step {self.step}/{self.total}",
                ProgressBar(total=self.total, completed=self.step, width=space),
                self._time(),
            ),
            ("Now", Text(self.phase, no_wrap=True, overflow="ellipsis"), self._rollouts()),
        ]
        curves = (
            ("Reward", self.rewards, None, "{:.3f}", "yellow"),
            ("Accuracy", self.accuracies, 1.0, "{:.1%}", "cyan"),
            ("Evaluation", self.evaluations, 1.0, "{:.1%}", "green"),
        )
        for name, values, top, form, style in curves:
            if values:
                low, high = (0.0, top) if top else (min(values), max(values))
                numbers = f"{form.format(values[-1])}, best {form.format(max(values))}"
                rows.append((name, Text(sparkline(values, space, low, high), style=style), numbers))
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True, width=12)
        grid.add_column(width=space)
        grid.add_column(no_wrap=True)
        for name, middle, numbers in rows:
            grid.add_row(Text(name), middle, Text(numbers))
        if speed := self._speed():
            grid.add_row(Text("Last step"), Text(speed, no_wrap=True, overflow="ellipsis"), Text(self._tokens()))
        return grid

    def _time(self) -> str:
        now = time.monotonic()
        left = "" if self._ends is None else f", {duration(max(self._ends - now, 0.0))} left"
        return f"{duration(now - self._begun)}{left}"

    def _rollouts(self) -> str:
        return f"{self.phase_done} of {self.phase_total} rollouts" if self.phase_total else ""

    def _speed(self) -> str:
        """The last step's duration, by phase."""
        seconds = self._last.get("seconds")
        if not seconds:
            return ""
        shares = {name: value / seconds["total"] for name, value in seconds.items() if name != "total"}
        phases = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01]
        return f"{seconds['total']:.1f} s: {', '.join(phases)}"

    def _tokens(self) -> str:
        total = self._last["seconds"]["total"]
        return (
            f"{self._last['num_trajectories'] / total:.1f} rollouts/s, {self._last['total_tokens'] / total:,.0f} tok/s"
        )


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """Draw values as bars between ``low`` and ``high``; beyond ``width`` values, each bar is a mean of several."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        parts = [values[a:b] for a, b in pairwise(edges)]
        values = [sum(part) / len(part) for part in parts]
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round(min(max(value - low, 0.0) * scale, len(BARS) - 1))] for value in values)


LINE_SECONDS = 10
"""Minimum interval between lines without a terminal."""
EARLIEST = 20
"""The time left appears once one item in this many is done: the first of many that run at once predict nothing."""


class Tally:
    """Counts finished items of consecutive tasks; a context manager, which stops the bar on exit."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or progress_console()
        self._bar: Progress | None = None
        self._name = ""
        self._done = self._before = 0
        self._first = self._last = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def advance(self, name: str, total: int) -> None:
        """Count one more of ``total`` as done."""
        self.begin(name, total)
        self._done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
            if self._done == total:
                self._stop()
        elif self._done == self._before + 1:
            self._first = now  # earlier time, such as loading the model, does not predict the rest
        elif now - max(self._last, self._first) >= LINE_SECONDS:  # the first few finish in a burst
            self._last = now
            done = self._done - self._before
            left = (now - self._first) / (done - 1) * (total - self._done)
            known = done * EARLIEST >= total - self._before
            ending = f", about {left:.0f} s left" if known else ""
            say(f"{name}: {self._done} of {total}{ending}", self._console)

    def begin(self, name: str, total: int, done: int = 0) -> None:
        """Show that ``done`` of ``total`` were done before, unless ``name`` has already started."""
        if name == self._name and self._done < total:
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._stop()
        self._name, self._done, self._before = name, done, done
        self._last = time.monotonic()
        if self._console.is_terminal:
            title, left = TextColumn("{task.description}", markup=False), TextColumn("left")
            counted = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, TimeRemainingColumn())
            self._bar = Progress(title, *counted, console=self._console)
            self._bar.add_task(name, total=total, completed=done)
            self._bar.start()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
