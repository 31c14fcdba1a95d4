"""The demo mailbox: answers are in the mails that are named, and splits share nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mail.mails import found

from emailrl.mail.build import build_database
from emailrl.mail.demo import NUM_WORLDS, SPLITS, TOPICS, World, demo_questions, demo_worlds


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return demo_worlds(42)


def test_same_seed_same_worlds(worlds: list[World]) -> None:
    again = demo_worlds(42)
    assert [e.body for w in worlds for e in w.emails] == [e.body for w in again for e in w.emails]
    assert demo_worlds(43)[0].facts[0] != worlds[0].facts[0]


def test_splits_share_no_person_project_value_or_inbox(worlds: list[World]) -> None:
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    for world in worlds:
        seen[world.split] |= {name for p in world.people for name in (p.first, p.last)}
        seen[world.split] |= {f.value for f in world.facts if f.topic.value != "person"}
        seen[world.split] |= {f.project for f in world.facts}
    assert all(len(texts) > 100 for texts in seen.values())
    assert not (seen["train"] & seen["test"] or seen["train"] & seen["val"] or seen["val"] & seen["test"])
    inboxes = {split: {q.inbox_address for q in demo_questions(42) if q.split == split} for split in NUM_WORLDS}
    assert {split: len(found) for split, found in inboxes.items()} == NUM_WORLDS
    assert len(set().union(*inboxes.values())) == sum(NUM_WORLDS.values())


def test_each_fact_is_stated_in_its_mail_and_nowhere_later_and_some_are_corrected(worlds: list[World]) -> None:
    corrected = 0
    for world in worlds:
        by_id = {email.message_id: email for email in world.emails}
        for fact in world.facts:
            mail = by_id[fact.message_id]
            assert fact.value in mail.body and fact.project in mail.body
            assert fact.topic.keyword in f"{mail.subject} {mail.body}".lower()
            about = [other for other in world.emails if fact.project in other.body]
            if fact.topic.value != "person":
                assert not any(fact.value in other.body for other in about if other.date > mail.date)
            earlier = [
                e for e in about
                if e.date < mail.date and mail.subject == "Re: " + e.subject.removeprefix("Re: ")
                and re.search(rf"\b{fact.topic.keyword}\b", e.body, re.IGNORECASE)
            ]  # fmt: skip
            corrected += bool((earlier and "not " in mail.body) or " from " in mail.body)
    assert 0.15 < corrected / sum(len(w.facts) for w in worlds) < 0.5


def test_questions_name_their_project_and_every_topic_is_asked(worlds: list[World]) -> None:
    questions = demo_questions(42)
    for question, fact in zip(questions, (fact for world in worlds for fact in world.facts), strict=True):
        assert fact.project in question.question
        assert (question.answer, question.message_ids) == (fact.value, [fact.message_id])
    assert {q.kind for q in questions} == {topic.name for topic in TOPICS}
    assert len({q.id for q in questions}) == len(questions)
    assert sum(q.split == "test" for q in questions) >= 200


def test_project_and_keyword_find_the_mail(worlds: list[World], tmp_path: Path) -> None:
    """The good habit works: with both keywords the right mail is nearly always among the first three hits."""
    db, both, alone = tmp_path / "demo.db", [], []
    build_database((e for w in worlds[:6] for e in w.emails), db)
    for world in worlds[:6]:
        for fact in world.facts:
            for keywords, hit in (((fact.project, fact.topic.keyword), both), ((fact.project,), alone)):
                ids = found(db, world.inbox, *keywords, until=world.query_date, max_results=3)
                hit.append(fact.message_id in ids)
    assert sum(both) / len(both) > 0.97
    assert 0.3 < sum(alone) / len(alone) < 0.7
