"""Template questions on real mail: enough of them, in time, each with sources its asker can read."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from emailrl.questions import load_scenario_set, missing_ids
from emailrl.questions.template import generate
from emailrl.records.trajectory import Scenario
from emailrl.rewards.matching import match
from emailrl.settings import DataSettings


@pytest.fixture(scope="module")
def generated(enron_db: Path) -> list[Scenario]:
    return generate(enron_db)


def test_five_thousand_questions_over_fifteen_inboxes(generated: list[Scenario]) -> None:
    assert len(generated) >= 5000
    assert len({s.inbox_address for s in generated}) >= 15
    assert len({s.kind for s in generated}) >= 25
    assert min(Counter(s.split for s in generated).values()) >= 500


def test_every_source_is_in_sight(enron_db: Path, generated: list[Scenario]) -> None:
    coverage = missing_ids(generated, enron_db)
    assert (coverage.missing, coverage.hidden) == ([], [])


def test_no_second_mail_has_the_subject_a_sender_question_names(enron_db: Path, generated: list[Scenario]) -> None:
    asked = [s for s in generated if s.kind == "sender"]
    connection = sqlite3.connect(enron_db)
    for s in asked:
        [subject] = connection.execute("SELECT subject FROM emails WHERE message_id = ?", s.message_ids).fetchone()
        topic = next(
            part for part in (s.question.split('"')[1:2] or [s.question[len("I remember a mail called ") : -18]])
        )
        assert topic in " ".join(subject.split())
        rivals = connection.execute(
            """SELECT message_id FROM emails WHERE subject LIKE '%' || ? || '%' AND date < ? AND (from_address = ?
            OR id IN (SELECT email_id FROM recipients WHERE recipient_address = ?))""",
            (topic, s.query_date, s.inbox_address, s.inbox_address),
        ).fetchall()
        assert len(rivals) <= 1, s.id
    assert len(asked) > 100


def test_the_offline_matcher_accepts_every_answer_in_a_sentence(generated: list[Scenario]) -> None:
    refused = [s.id for s in generated if not match(s.question, s.answer, f"The answer is {s.answer}.")]
    assert len(refused) <= 0.005 * len(generated), refused


def test_art_e_s_questions_on_this_database(enron_db: Path, shared_data: Path) -> None:
    questions = load_scenario_set(
        shared_data / "enron" / "art_e_questions.jsonl", None, limit=None, seed=1, data=DataSettings(max_source_mails=9)
    ).scenarios
    coverage = missing_ids(questions, enron_db)
    assert (coverage.num_questions, coverage.num_answerable, len(coverage.missing)) == (859, 858, 1)
