"""List a file's trajectories in a table, one line each."""

from __future__ import annotations

from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from emailrl.evaluation import verdict
from emailrl.plain import plain_line
from emailrl.recording import Entry, TrajectoryIndex

STYLES = {"correct": "green", "wrong": "yellow", "crashed": "red"}
"""Colors of verdicts; others have none."""


def trajectory_list(index: TrajectoryIndex, first: int, limit: int) -> RenderableType:
    """A table of ``limit`` trajectories from position ``first`` on, titled with the range shown."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    widths = {"index": 5, "step": 4, "reward": 6, "verdict": 12, "turns": 5, "tokens": 6}
    for name, width in widths.items():  # full width: only the question is truncated
        justify: Literal["left", "right"] = "left" if name == "verdict" else "right"
        table.add_column(name, justify=justify, no_wrap=True, min_width=width)
    table.add_column("question")
    shown = index[first : first + limit]
    for position, entry in enumerate(shown, first):
        if entry.id is not None:  # skip lines without a trajectory
            table.add_row(str(position), *_cells(entry))
    part = f"{first} to {first + len(shown) - 1} of 0 to {len(index) - 1}"
    return Group(Text(plain_line(f"{index.path}, {part}"), style="bold"), table)


def _cells(entry: Entry) -> list[Text]:
    came_of_it = verdict(entry)
    return [
        Text(str(entry.step)),
        Text("-" if entry.reward is None else f"{entry.reward:.3f}"),
        Text(came_of_it, style=STYLES.get(came_of_it, "")),
        Text(str(entry.turns)),
        Text(str(entry.tokens)),
        Text(plain_line(entry.question), no_wrap=True, overflow="ellipsis"),
    ]
