"""Checks that a command's input files exist, before anything slow is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emailrl.settings import Settings


def check_inputs(settings: Settings) -> None:
    """Raise EmailRLError for a missing database, UsageError for a missing question file."""
    from emailrl.scenarios.load import check_exists
    from emailrl.store.connection import no_database

    if not settings.store.db.is_file():
        raise no_database(settings.store.db)
    check_exists(settings.data.questions)
