"""A command's progress: on a terminal a bar with the time left, elsewhere an occasional line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from emailrl.cli.output import progress_console, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

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
