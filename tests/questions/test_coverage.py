"""Which questions a database can answer."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.questions import coverage_notes, missing_ids
from emailrl.records.trajectory import Scenario


@pytest.fixture
def db(tmp_path: Path) -> Path:
    sent_at = datetime(2001, 5, 3, 9, tzinfo=UTC)
    mails = [
        RawEmail("<1@x>", "One", "bo@x.org", ["me@x.org"], [], [], sent_at, "a"),
        RawEmail("<2@x>", "Two", "me@x.org", ["bo@x.org"], [], [], sent_at, "b"),
        RawEmail("<3@x>", "Three", "bo@x.org", ["cy@x.org"], [], [], sent_at, "c"),
    ]
    return build_database(mails, tmp_path / "mail.db").db


def ask(*message_ids: str, day: str = "2001-05-04") -> Scenario:
    return Scenario("q", "Q?", "A", list(message_ids), "me@x.org", day)


def test_sent_and_received_mails_are_there(db: Path) -> None:
    coverage = missing_ids([ask("<1@x>"), ask("<2@x>"), ask("<1@x>", "<2@x>")], db)
    assert (coverage.missing, coverage.hidden, coverage.answerable) == ([], [], 1.0)


def test_what_is_absent_is_told_from_what_is_out_of_sight(db: Path) -> None:
    questions = [ask("<9@x>"), ask("<1@x>", "<9@x>"), ask("<3@x>"), ask("<1@x>", day="2001-05-03"), ask("<1@x>")]
    coverage = missing_ids(questions, db)
    assert coverage.missing == ["<9@x>"]
    assert coverage.hidden == ["<3@x>", "<1@x>"]  # another's mail; a mail of the day itself
    assert (coverage.num_answerable, coverage.num_questions, coverage.answerable) == (1, 5, 0.2)


def test_the_share_of_answerable_questions_is_said(db: Path) -> None:
    assert coverage_notes([ask("<1@x>")], db) == []
    [note] = coverage_notes([ask("<1@x>"), ask("<9@x>"), ask("<2@x>")], db)
    assert note == "the database can answer 2 of 3 questions (66.7%); missing: <9@x>"
    [note] = coverage_notes([ask("<1@x>"), *(ask(f"<{n}@x>") for n in range(5, 10)), ask("<3@x>")], db)
    assert note.endswith("(14.3%); missing: <5@x>, <6@x>, <7@x> and 2 more; outside the inbox or too late: <3@x>")
    with pytest.raises(UsageError, match="contains none of the source emails"):
        coverage_notes([ask("<9@x>")], db)


def test_no_database(tmp_path: Path) -> None:
    with pytest.raises(EmailRLError, match="No such mail database"):
        missing_ids([ask("<1@x>")], tmp_path / "absent.db")
