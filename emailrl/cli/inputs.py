"""A command's input files: chosen if not named, and checked before anything slow is loaded."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from emailrl.cli.output import say
from emailrl.errors import UsageError

if TYPE_CHECKING:
    from emailrl.settings import Settings

MAX_FOLDERS: Final = 20_000
"""Maximum number of folders to search for trajectories: over 1,000 runs with their checkpoints; walked in seconds."""


def check_searchable(place: Path) -> None:
    """Raise UsageError for a folder too large to search, such as a home folder."""
    if sum(1 for _ in islice(os.walk(place), MAX_FOLDERS + 1)) > MAX_FOLDERS:
        raise UsageError(
            f"{place} contains more than {MAX_FOLDERS:,} folders, too many to search for a run.",
            "Name a run's folder, such as outputs/grpo_masked.",
        )


def note_runs_without_best(output_dir: Path, mode: str | None = None) -> None:
    """Print a note if ``best`` passes over newer runs."""
    from emailrl.checkpoints import runs_without_best

    if runs := runs_without_best(output_dir, mode):
        say(f"Note: runs without a complete best_model are skipped: {', '.join(map(str, runs))}")


def check_inputs(settings: Settings) -> None:
    """Raise EmailRLError for a missing database, UsageError for a missing question file."""
    from emailrl.scenarios.load import check_exists
    from emailrl.store.connection import no_database

    if not settings.store.db.is_file():
        raise no_database(settings.store.db)
    check_exists(settings.data.questions)


def with_inputs(settings: Settings) -> Settings:
    """Choose the questions and print the choice (``with_questions``); raises like ``check_inputs`` too."""
    from emailrl.scenarios.beside import with_questions

    check_inputs(settings)
    settings, chosen = with_questions(settings)
    if chosen is not None:
        say(chosen)
    return settings
