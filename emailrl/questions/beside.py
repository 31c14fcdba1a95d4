"""The default questions of a command: those next to the database, as the demo has, else ART-E's for Enron's email."""

from __future__ import annotations

import os
from pathlib import Path

from sqlalchemy import select

from emailrl.base.disk import not_a_file
from emailrl.base.errors import UsageError
from emailrl.mail.build import BuildReport, build_database
from emailrl.mail.connection import opened
from emailrl.mail.demo import demo_emails, demo_questions
from emailrl.mail.schema import addresses, emails
from emailrl.questions.load import HUB_QUESTIONS, load_splits, missing_ids, write_scenarios
from emailrl.settings import DataSettings, StoreSettings


def questions_file(db: Path) -> Path:
    """The default path of a database's questions: ``mail.db`` → ``mail_questions.jsonl``.

    If the database is a link, a file next to the link has priority over one next to its target.
    """
    beside = db.with_name(f"{db.stem}_questions.jsonl")
    if db.is_symlink() and not os.path.lexists(beside):
        real = Path(os.path.realpath(db))
        return real.with_name(f"{real.stem}_questions.jsonl")
    return beside


def with_questions(data: DataSettings, db: Path) -> tuple[DataSettings, str | None]:
    """The settings with a database's default questions, and a line naming them; None if questions are already set.

    The file next to the database comes first; without one, a database of Enron's email gets ART-E's questions,
    downloaded unless cached. Raises UsageError for another database, EmailRLError if the hub cannot be reached.
    """
    if data.questions is not None:
        return data, None
    beside = questions_file(db)
    if beside.is_symlink() and not beside.exists():
        raise UsageError(
            f"{beside} is a broken link to {os.readlink(beside)}.", "Remove it, or name a file with --questions."
        )
    if beside.is_file():
        return data.model_copy(update={"questions": beside}), f"Questions: {beside} (next to the database)"
    if not has_enron_email(db):
        raise UsageError(
            f"No questions are named, and {db} has none next to it ({beside.name}).",
            "Generate some (emailrl gen-questions), or name a file with --questions.",
        )
    load_splits(HUB_QUESTIONS)  # into the hub's cache
    return data, f"Questions: {HUB_QUESTIONS}, from the hub"


def has_enron_email(db: Path) -> bool:
    """Whether a database has an Enron address: only then can it answer ART-E's questions."""
    with opened(db) as connection:
        found = select(addresses.c.address).where(addresses.c.address.like("%@enron.com")).limit(1)
        return connection.scalar(found) is not None


def has_only_demo_email(db: Path) -> bool:
    """Whether a database contains only demo email: all its message ids are six digits, as no mail program writes."""
    with opened(db) as connection:
        other = select(emails.c.id).where(~emails.c.message_id.regexp_match("^<[0-9]{6}>$")).limit(1)
        return connection.scalar(other) is None


def write_demo(
    db: Path,
    *,
    settings: StoreSettings,
    seed: int,
    overwrite: bool = False,
    append: bool = False,
    limit: int | None = None,
) -> BuildReport:
    """Build the demo database for a seed, and write the questions that its emails answer next to it.

    Raises the errors of ``build_database``, and UsageError if questions are there, unless ``overwrite``.
    """
    beside = questions_file(db)
    if what := not_a_file(beside):
        raise UsageError(f"{beside} is {what}.", "Remove it.")
    if beside.exists() and not overwrite:
        raise UsageError(f"{beside} already exists.", "Move it away, or replace it and the database with --overwrite.")
    report = build_database(demo_emails(seed), db, settings=settings, overwrite=overwrite, append=append, limit=limit)
    questions = demo_questions(seed)
    lost = set(missing_ids(questions, report.db).missing)
    write_scenarios(questions_file(report.db), [q for q in questions if lost.isdisjoint(q.message_ids)])
    return report
