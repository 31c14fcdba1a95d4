"""Values that shell completion offers for options: choices, models, checkpoints and mailboxes.

Errors are silent here: a shell would treat a message as a value.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from typer import Context

from emailrl.base.errors import EmailRLError

MAX_INBOXES: Final = 50


def one_of(*choices: str) -> Callable[[str], list[str]]:
    """A completer for fixed choices."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def presets(incomplete: str) -> list[str]:
    """The size presets."""
    from emailrl.settings import PRESETS

    return one_of(*PRESETS)(incomplete)


def models(incomplete: str) -> list[str]:
    """The packaged models; for anything else, shells complete file names."""
    from emailrl.model.resolve import PACKAGED

    return one_of(*PACKAGED)(incomplete)


def checkpoints(incomplete: str) -> list[str]:
    """``best``, ``latest`` and the checkpoints below OUTPUT_DIR."""
    from emailrl.checkpoints import find_runs, list_checkpoints
    from emailrl.settings import load_settings

    found = ["best", "latest"]
    with suppress(EmailRLError):
        runs = find_runs(load_settings(looks_only=True).output.output_dir)
        found += [str(checkpoint.path) for run in reversed(runs) for checkpoint in list_checkpoints(run)]
    return one_of(*found)(incomplete)


def inboxes(context: Context, incomplete: str) -> list[str]:
    """The addresses in the database with this prefix."""
    from sqlalchemy import select

    from emailrl.mail.connection import opened
    from emailrl.mail.schema import addresses
    from emailrl.settings import load_settings

    address = addresses.c.address
    wanted = select(address).where(address >= incomplete, address < f"{incomplete}\U0010ffff").order_by(address)
    with suppress(EmailRLError):
        db = context.params.get("db") or load_settings(looks_only=True).store.db
        with opened(db) as connection:
            return list(connection.scalars(wanted.limit(MAX_INBOXES)))
    return []


BY_SETTING: Final[dict[str, Any]] = {
    "model_name": models,
    "resume": one_of("auto", "latest", "best"),
}
"""Completers of settings without a fixed list of choices, by name."""
