"""How far a command has come: a bar with the time left on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from emailrl.cli.output import progress_console, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

LINE_SECONDS = 10
"""Between two lines where there is no terminal."""


class Tally:
    """Counts what ends of one thing after the other; a context manager, behind which no bar is left running."""

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
        """One more of ``total`` has ended."""
        self.begin(name, total)
        self._done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])
            if self._done == total:
                self._stop()
        elif self._done == self._before + 1:
            self._first = now  # what came before, the model's loading too, tells nothing of what is left
        elif now - max(self._last, self._first) >= LINE_SECONDS:  # the first few end in a burst
            self._last = now
            left = (now - self._first) / (self._done - self._before - 1) * (total - self._done)
            say(f"{name}: {self._done} of {total}, about {left:.0f} s left", self._console)

    def begin(self, name: str, total: int, done: int = 0) -> None:
        """Show that ``done`` of ``total`` have ended before, unless ``name`` is under way already."""
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
