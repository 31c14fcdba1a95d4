"""List a file's trajectories in a table, one line each."""

from __future__ import annotations

from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emailrl.base.plain import plain_line
from emailrl.measure.evaluation import verdict
from emailrl.records import Entry, TrajectoryIndex

STYLES = {"correct": "green", "wrong": "yellow", "crashed": "red"}
"""Colors of verdicts; others have none."""


WIDTHS = {"index": 5, "step": 4, "reward": 6, "verdict": 12, "turns": 5, "tokens": 6}
"""Columns of full width; only the question, the last one, is truncated."""
NARROW = 72
"""Width of a terminal below which ``step`` and ``tokens`` are left out, so that the question stays readable."""


def trajectory_list(index: TrajectoryIndex, first: int, limit: int, width: int) -> RenderableType:
    """A table of ``limit`` trajectories from position ``first`` on, for a terminal of ``width`` columns."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    names = [name for name in WIDTHS if width >= NARROW or name not in ("step", "tokens")]
    for name in names:
        justify: Literal["left", "right"] = "left" if name == "verdict" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=WIDTHS[name])
    table.add_column("question")
    shown = index[first : first + limit]
    for position, entry in enumerate(shown, first):
        if entry.id is not None:  # skip lines without a trajectory
            cells = _cells(position, entry)
            table.add_row(*(cells[name] for name in [*names, "question"]))
    count = f"{len(index):,} trajector{'y' if len(index) == 1 else 'ies'}"
    part = f"index {first} to {first + len(shown) - 1} of {count}"
    if len(shown) < len(index):
        part += "; choose others with --index and --limit"
    return Group(*(Text(plain_line(line), style="bold") for line in (str(index.path), part)), table)


def _cells(position: int, entry: Entry) -> dict[str, Text]:
    came_of_it = verdict(entry)
    return {
        "index": Text(str(position)),
        "step": Text(str(entry.step)),
        "reward": Text("-" if entry.reward is None else f"{entry.reward:.3f}"),
        "verdict": Text(came_of_it, style=STYLES.get(came_of_it, "")),
        "turns": Text(str(entry.turns)),
        "tokens": Text(str(entry.tokens)),
        "question": Text(plain_line(entry.question), no_wrap=True, overflow="ellipsis"),
    }
