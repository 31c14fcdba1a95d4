"""Print trajectories as they finish: VERBOSE prints one line each, SHOW_TRAJECTORY_DETAILS every turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.cli.output import say

if TYPE_CHECKING:
    from rich.console import Console

    from emailrl.records.trajectory import Trajectory
    from emailrl.settings import Settings


def show_trajectories(file: Path, trajectories: Sequence[Trajectory], settings: Settings, console: Console) -> None:
    """Print a file's scored trajectories according to the settings; with both set, every token too."""
    if settings.output.show_trajectory_details:
        _show_in_full(file, trajectories, settings, console)
    elif settings.output.verbose:
        for trajectory in trajectories:
            say(_line(trajectory), console)


def _show_in_full(file: Path, trajectories: Sequence[Trajectory], settings: Settings, console: Console) -> None:
    from emailrl.cli.trajectory import render_trajectory
    from emailrl.page.place import origin
    from emailrl.page.tokens import fitting_tokenizer, tokenizer_folders

    verbose, tokens = settings.output.verbose, None
    for trajectory in trajectories:
        if verbose and tokens is None:  # a file holds trajectories of one policy
            tokens = fitting_tokenizer(tokenizer_folders(file, settings.model.name), trajectory)
        made_by = origin(file, trajectory)
        console.print(render_trajectory(trajectory, title=str(file), verbose=verbose, tokens=tokens, origin=made_by))


def _line(trajectory: Trajectory) -> str:
    from emailrl.measure.evaluation import verdict

    turns = len(trajectory.turns)
    facts = f"{verdict(trajectory)}, reward {trajectory.reward:.3f}, {turns} turn{'s' * (turns != 1)}"
    return f"{trajectory.id}: {facts}, {trajectory.seconds:.1f} s: {trajectory.scenario.question}"
