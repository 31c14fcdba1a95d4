"""Which questions a command asks if none are named: those beside the database, else ART-E's for Enron's email."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from emailrl.errors import UsageError
from emailrl.scenarios.hub import HUB_QUESTIONS, download
from emailrl.settings import Settings
from emailrl.store.connection import opened
from emailrl.store.schema import addresses


def questions_file(db: Path) -> Path:
    """Where commands write and look for the questions of a database: ``mail.db`` → ``mail_questions.jsonl``."""
    return db.with_name(f"{db.stem}_questions.jsonl")


def with_questions(settings: Settings) -> tuple[Settings, str | None]:
    """Return the settings with their questions chosen, and a line that says which were; None if they name some already.

    The file beside the database comes first. Without one, a database of Enron's email gets ART-E's questions, which are
    downloaded unless the hub's cache has them. Raises UsageError for another database, EmailRLError if the hub cannot
    be reached.
    """
    if settings.data.questions is not None:
        return settings, None
    db = settings.store.db
    beside = questions_file(db)
    if beside.is_file():
        data = settings.data.model_copy(update={"questions": beside})
        return settings.model_copy(update={"data": data}), f"Questions: {beside} (beside the database)"
    if not has_enron_email(db):
        raise UsageError(
            f"No questions are named, and {db} has none beside it ({beside.name}).",
            "Generate some (emailrl gen-questions), or name a file with --questions.",
        )
    download()
    return settings, f"Questions: {HUB_QUESTIONS}, from the hub"


def has_enron_email(db: Path) -> bool:
    """Whether an address of Enron's is in a database: only then can it answer ART-E's questions."""
    with opened(db) as connection:
        found = select(addresses.c.address).where(addresses.c.address.like("%@enron.com")).limit(1)
        return connection.scalar(found) is not None
