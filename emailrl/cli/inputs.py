"""A command's input files: chosen if not named, and checked before anything slow is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emailrl.cli.output import say

if TYPE_CHECKING:
    from emailrl.settings import Settings


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
