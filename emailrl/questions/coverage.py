"""Checks which questions a database can answer: all source emails are in the inbox before the question's date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import bindparam, exists, or_, select

from emailrl.base.errors import UsageError
from emailrl.mail.connection import opened
from emailrl.mail.schema import emails, recipients
from emailrl.records.trajectory import Scenario

MAX_NAMED = 3
"""Maximum message ids in a note."""

_STORED = select(emails.c.id).where(emails.c.message_id == bindparam("message_id"))
_RECEIVED = exists().where(recipients.c.email_id == emails.c.id, recipients.c.recipient_address == bindparam("inbox"))
_VISIBLE = _STORED.where(
    emails.c.date < bindparam("until"), or_(emails.c.from_address == bindparam("inbox"), _RECEIVED)
)


@dataclass(slots=True)
class Coverage:
    """How much of a question set a database covers."""

    missing: list[str]
    """Distinct source ids missing from the database, in the order of the questions."""
    hidden: list[str]
    """Source ids in the database, but not in the question's inbox before its date."""
    num_questions: int
    num_answerable: int
    """Number of questions whose source emails the agent can all read."""

    @property
    def answerable(self) -> float:
        """Share of answerable questions, 0 to 1."""
        return self.num_answerable / self.num_questions if self.num_questions else 0.0


def missing_ids(scenarios: Sequence[Scenario], db: Path) -> Coverage:
    """Look up the source emails of all questions.

    Raises UsageError if ``db`` is not a mail database, EmailRLError if it is damaged.
    """
    missing: dict[str, None] = {}
    hidden: dict[str, None] = {}
    num_answerable = 0
    with opened(Path(db)) as connection:
        for scenario in scenarios:
            place = {"until": scenario.query_date, "inbox": scenario.inbox_address}
            ids = [{"message_id": message_id} for message_id in scenario.message_ids]
            unseen = [each for each in ids if connection.scalar(_VISIBLE, each | place) is None]
            for each in unseen:
                is_there = connection.scalar(_STORED, each) is not None
                (hidden if is_there else missing)[each["message_id"]] = None
            num_answerable += not unseen
    return Coverage(list(missing), list(hidden), len(scenarios), num_answerable)


def coverage_notes(scenarios: Sequence[Scenario], db: Path) -> list[str]:
    """Return the coverage note for tables of these questions; raises UsageError if the database can answer none."""
    coverage = missing_ids(scenarios, db)
    if not coverage.num_answerable:
        raise UsageError(
            f"{db} contains none of the source emails of these questions.",
            "Name the database they were made from: --db FILE.",
        )
    if coverage.num_answerable == coverage.num_questions:
        return []
    causes = [
        f"{words} {_some(ids)}"
        for words, ids in (("missing:", coverage.missing), ("outside the inbox or too late:", coverage.hidden))
        if ids
    ]
    return [
        f"the database can answer {coverage.num_answerable} of {coverage.num_questions} questions "
        f"({coverage.answerable:.1%}); {'; '.join(causes)}"
    ]


def _some(ids: Sequence[str]) -> str:
    """The first message ids of a list, and how many more there are."""
    return ", ".join(ids[:MAX_NAMED]) + (f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else "")
