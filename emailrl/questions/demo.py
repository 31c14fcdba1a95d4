"""Writes the demo mailbox: the database, and its questions in a file next to it."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select

from emailrl.questions.beside import questions_file
from emailrl.questions.coverage import missing_ids
from emailrl.questions.rows import write_scenarios
from emailrl.settings import StoreSettings
from emailrl.store.build import BuildReport, build_database
from emailrl.store.connection import opened
from emailrl.store.demo import demo_emails, demo_questions
from emailrl.store.schema import emails


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

    Raises the errors of ``build_database``.
    """
    report = build_database(demo_emails(seed), db, settings=settings, overwrite=overwrite, append=append, limit=limit)
    questions = demo_questions(seed)
    lost = set(missing_ids(questions, report.db).missing)
    write_scenarios(questions_file(report.db), [q for q in questions if lost.isdisjoint(q.message_ids)])
    return report


def has_only_demo_email(db: Path) -> bool:
    """Whether a database contains only demo email: all its message ids are six digits, as no mail program writes."""
    with opened(db) as connection:
        other = select(emails.c.id).where(~emails.c.message_id.regexp_match("^<[0-9]{6}>$")).limit(1)
        return connection.scalar(other) is None
