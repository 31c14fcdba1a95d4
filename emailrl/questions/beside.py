"""The default questions of a command: those next to the database, else ART-E's for Enron's email."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import select

from emailrl.errors import UsageError
from emailrl.questions.hub import HUB_QUESTIONS, download
from emailrl.settings import Settings
from emailrl.store.connection import opened
from emailrl.store.schema import addresses


def questions_file(db: Path) -> Path:
    """The default path of a database's questions: ``mail.db`` → ``mail_questions.jsonl``.

    If the database is a link, a file next to the link has priority over one next to its target.
    """
    beside = db.with_name(f"{db.stem}_questions.jsonl")
    if db.is_symlink() and not os.path.lexists(beside):
        return questions_file(Path(os.path.realpath(db)))
    return beside


def has_questions_beside(db: Path) -> bool:
    """Whether a file, or a link, has the default path of the database's questions."""
    return os.path.lexists(questions_file(db))


def with_questions(settings: Settings) -> tuple[Settings, str | None]:
    """Return the settings with default questions, and a line naming them; None if questions are already set.

    The file next to the database has priority. Without one, a database of Enron's email gets ART-E's questions, which
    are downloaded unless the hub's cache has them. Raises UsageError for another database, EmailRLError if the hub
    cannot be reached.
    """
    if settings.data.questions is not None:
        return settings, None
    db = settings.store.db
    beside = questions_file(db)
    if beside.is_symlink() and not beside.exists():
        raise UsageError(
            f"{beside} is a broken link to {os.readlink(beside)}.", "Remove it, or name a file with --questions."
        )
    if beside.is_file():
        data = settings.data.model_copy(update={"questions": beside})
        return settings.model_copy(update={"data": data}), f"Questions: {beside} (next to the database)"
    if not has_enron_email(db):
        raise UsageError(
            f"No questions are named, and {db} has none next to it ({beside.name}).",
            "Generate some (emailrl gen-questions), or name a file with --questions.",
        )
    download()
    return settings, f"Questions: {HUB_QUESTIONS}, from the hub"


def has_enron_email(db: Path) -> bool:
    """Whether a database has an Enron address: only then can it answer ART-E's questions."""
    with opened(db) as connection:
        found = select(addresses.c.address).where(addresses.c.address.like("%@enron.com")).limit(1)
        return connection.scalar(found) is not None
