"""Progress: of a run while it trains, on a terminal a live display below the printed lines, and of countable work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from emailrl.base.plain import cut, duration
from emailrl.cli.output import print_next, progress_console, result_console, say
from emailrl.records import read_metrics
from emailrl.runs.log import Display

if TYPE_CHECKING:
    from emailrl.measure.evaluation import Evaluation
    from emailrl.records.trajectory import Trajectory
    from emailrl.settings import Settings

STYLES = {"Warning": "yellow", "Stopped": "yellow", "New best": "bold green", "---": "bold", "=": "dim", "Note:": "dim"}
"""Styles of log lines, by how they start; step lines have none."""
IN_LOG = ("Loss:", "Policy:", "KL", "Trainable", "about ")
"""Parts of a step line that a terminal too narrow for it leaves to training.log, the page and the display below."""
BARS = "▁▂▃▄▅▆▇█"
REFRESH = 4  # display refreshes per second


class LiveRun(Display, AbstractContextManager["LiveRun"]):
    """Prints a run's lines and shows its progress; a context manager."""

    def __init__(self, settings: Settings, console: Console | None = None, *, json: bool = False) -> None:
        from emailrl.cli.trajectory import show_trajectories

        super().__init__()
        self._settings, self._show, self._json = settings, show_trajectories, json
        self._console, self._results = console or progress_console(), list[str]()
        self._live: Live | None = None
        self._rewards, self._accuracies, self._evaluations = list[float](), list[float](), list[float]()
        self._last: Mapping[str, Any] = {}
        self._begun, self._ends = time.monotonic(), 0.0
        self._step, self._total = 0, 1
        self.phase("")

    def __exit__(self, *_: object) -> None:
        self.end()

    def say(self, line: str) -> None:
        parts, width = line.split(" | "), self._console.width - 1
        if self._live is not None and len(parts) > 3 and len(line) > width:  # a step's
            line = cut(" | ".join(part for part in parts if not part.startswith(IN_LOG)), width)
        say(line, self._console, style=next((style for start, style in STYLES.items() if line.startswith(start)), None))

    def result(self, line: str) -> None:
        """Keep a result line to print on stdout after the display stops."""
        self._results.append(line)

    def start(self, run_dir: Path, step: int, total: int) -> None:
        """Start showing a run; curves from before a resume are read from its files."""
        self._step, self._total, self._begun = step, total, time.monotonic()
        for metrics in read_metrics(run_dir / "metrics.jsonl")[0]:
            self._take_curves(metrics)
        self._evaluations += [each["accuracy"] for each in read_metrics(run_dir / "evaluations.jsonl")[0]]
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            print_next(["view", str(run_dir)], "live, from another terminal")
            self._live = Live(self, console=self._console, refresh_per_second=REFRESH, vertical_overflow="crop")
            self._live.start()

    def _take_curves(self, metrics: Mapping[str, Any]) -> None:
        for values, name in ((self._rewards, "reward_mean"), (self._accuracies, "accuracy")):
            if metrics.get(name) is not None:
                values.append(metrics[name])

    def phase(self, name: str, total: int = 0) -> None:
        self._phase, self._phase_total, self._phase_done = name, total, 0

    def played(self, trajectory: Trajectory) -> None:
        self._phase_done += 1

    def recorded(self, file: Path, trajectories: Sequence[Trajectory]) -> None:
        self._show(file, trajectories, self._settings, self._console)

    def evaluation(self, evaluation: Evaluation) -> None:
        if not evaluation.is_void:
            self._evaluations.append(evaluation.accuracy)

    def step(self, metrics: Mapping[str, Any], seconds_left: float) -> None:
        self._take_curves(metrics)
        self._last, self._step = metrics, metrics["step"]
        self._ends = time.monotonic() + seconds_left

    def end(self) -> None:
        """Stop the display and leave its last state on the terminal, then print the results."""
        if self._live is not None:
            self._ends = 0.0
            self.phase("")
            self._live.stop()
            self._live = None
        for line in self._results:
            say(line, result_console(json=self._json))
        self._results.clear()

    def __rich__(self) -> RenderableType:
        space = max(self._console.width - 44, 8)
        now = time.monotonic()
        left = f", {duration(max(self._ends - now, 0.0))} left" if self._ends else ""
        bar = ProgressBar(total=self._total, completed=self._step, width=space)
        counted = f"{self._phase_done} of {self._phase_total} rollouts" if self._phase_total else ""
        columns = (Column(style="bold", no_wrap=True, width=12), Column(width=space), Column(no_wrap=True))
        grid = Table.grid(*columns, padding=(0, 2))
        grid.add_row(f"Step {self._step}/{self._total}", bar, f"{duration(now - self._begun)}{left}")
        if self._phase:
            grid.add_row("Now", Text(self._phase, no_wrap=True, overflow="ellipsis"), counted)
        for name, values, top, form, style in (
            ("Reward", self._rewards, None, "{:.3f}", "yellow"),
            ("Accuracy", self._accuracies, 1.0, "{:.1%}", "cyan"),
            ("Evaluation", self._evaluations, 1.0, "{:.1%}", "green"),
        ):
            if values:
                low, high = (0.0, top) if top else (min(values), max(values))
                numbers = f"{form.format(values[-1])}, best {form.format(max(values))}"
                grid.add_row(name, Text(sparkline(values, space, low, high), style=style), numbers)
        if seconds := self._last.get("seconds"):
            total = seconds["total"]
            shares = {name: value / total for name, value in seconds.items() if name != "total"}
            phases = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01)
            units = {"num_trajectories": "{:.1f} rollouts/s", "total_tokens": "{:,.0f} tok/s"}
            speeds = [form.format(self._last[name] / total) for name, form in units.items() if name in self._last]
            spent = Text(f"{total:.1f} s: {phases}", no_wrap=True, overflow="ellipsis")
            grid.add_row("Last step", spent, ", ".join(speeds))
        return grid


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """Draw values as bars between ``low`` and ``high``; beyond ``width`` values, each bar is a mean of several."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        parts = [values[a:b] for a, b in pairwise(edges)]
        values = [sum(part) / len(part) for part in parts]
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round(min(max(value - low, 0.0) * scale, len(BARS) - 1))] for value in values)


LINE_SECONDS = 10  # minimum interval between lines without a terminal
EARLIEST = 20  # one item in this many must be done for the time left: the first that run at once predict nothing


class Tally(AbstractContextManager["Tally"]):
    """Counts finished items of consecutive tasks; a context manager, which stops the bar on exit."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or progress_console()
        self._bar: Progress | None = None
        self._name = ""
        self._done = self._before = 0
        self._first = self._last = 0.0

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.live.transient = not self._done  # what fails before its first item leaves no bar
            self._bar.stop()
            self._bar = None

    def begin(self, name: str, total: int, done: int = 0) -> None:
        """Show that ``done`` of ``total`` were done before, unless ``name`` has already started."""
        if name == self._name and self._done < total:
            return
        self.__exit__()
        self._name, self._done, self._before = name, done, done
        self._last = time.monotonic()
        if self._console.is_terminal:
            title, left = TextColumn("{task.description}", markup=False), TextColumn("left")
            counted = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left, TimeRemainingColumn())
            self._bar = Progress(title, *counted, TextColumn("{task.fields[remark]}"), console=self._console)
            self._bar.add_task(name, total=total, completed=done, remark="")
            self._bar.start()

    def advance(self, name: str, total: int, remark: str = "") -> None:
        """Count one more, and show ``remark``."""
        self.begin(name, total)
        self._done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, remark=remark)
            if self._done == total:
                self.__exit__()
        elif self._done == self._before + 1:
            self._first = now  # earlier time, such as loading the model, does not predict the rest
        elif now - max(self._last, self._first) >= LINE_SECONDS:  # the first few finish in a burst
            self._last = now
            done = self._done - self._before
            left = (now - self._first) / (done - 1) * (total - self._done)
            ending = f", about {left:.0f} s left" if done * EARLIEST >= total - self._before else ""
            say(f"{name}: {self._done} of {total}{ending}{remark and f', {remark}'}", self._console)
