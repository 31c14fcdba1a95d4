"""Template questions on real mail: enough of them, in time, each with sources its asker can read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from emailrl.questions.load import missing_ids, read_questions
from emailrl.questions.template import generate
from emailrl.records.trajectory import Scenario
from emailrl.rewards.matching import match
from emailrl.settings import DataSettings


@pytest.fixture(scope="module")
def generated(enron_db: Path) -> list[Scenario]:
    return generate(enron_db)


def test_five_thousand_questions_over_fifteen_inboxes_whose_sources_are_in_sight(
    enron_db: Path, generated: list[Scenario]
) -> None:
    assert len(generated) >= 5000
    assert len({s.inbox_address for s in generated}) >= 15
    assert len({s.kind for s in generated}) >= 25
    assert min(Counter(s.split for s in generated).values()) >= 500
    assert missing_ids(generated, enron_db) == ([], [], len(generated))


def test_the_offline_matcher_accepts_every_answer_in_a_sentence(generated: list[Scenario]) -> None:
    asked = generated[::4]
    refused = [s.id for s in asked if not match(s.question, s.answer, f"The answer is {s.answer}.")]
    assert len(refused) <= 0.005 * len(asked), refused


def test_art_e_s_questions_on_this_database(enron_db: Path, shared_data: Path) -> None:
    path = shared_data / "enron" / "art_e_questions.jsonl"
    questions = read_questions(path, DataSettings(max_source_mails=9)).scenarios
    missing, _, num_answerable = missing_ids(questions, enron_db)
    assert (len(questions), num_answerable, len(missing)) == (859, 858, 1)
