"""The demo mailbox: answers are in the mails that are named, and splits share nothing."""

from __future__ import annotations

import random
import re

import pytest

from emailrl.mail import Mailbox, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.demo import NUM_WORLDS, SPLITS, TOPICS, Pool, World, demo_questions, demo_worlds, expand, split_of


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return demo_worlds(42)


def test_expand_chooses_innermost_first() -> None:
    seen = {expand("[a [b|c]|d] e", random.Random(i)) for i in range(50)}
    assert seen == {"a b e", "a c e", "d e"}


def test_same_seed_same_worlds(worlds: list[World]) -> None:
    again = demo_worlds(42)
    assert [e.body for w in worlds for e in w.emails] == [e.body for w in again for e in w.emails]
    assert demo_worlds(43)[0].facts[0] != worlds[0].facts[0]


def test_splits_share_no_person_project_or_value(worlds: list[World]) -> None:
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    for world in worlds:
        names = {name for p in world.people for name in (p.first, p.last)}
        values = {f.value for f in world.facts if f.topic.value != "person"}
        seen[world.split] |= names | values | {f.project for f in world.facts}
    assert all(len(texts) > 100 for texts in seen.values())
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["val"]
    assert not seen["val"] & seen["test"]


def test_pool_draws_only_its_split_and_nothing_twice() -> None:
    pool = Pool(random.Random(0), "val")
    drawn = [pool.value("amount") for _ in range(200)]
    assert {split_of(text) for text in drawn} == {"val"}
    assert len(set(drawn)) == 200


def test_each_fact_is_stated_in_its_mail_and_nowhere_later(worlds: list[World]) -> None:
    for world in worlds:
        by_id = {email.message_id: email for email in world.emails}
        for fact in world.facts:
            mail = by_id[fact.message_id]
            assert fact.value in mail.body
            assert fact.project in mail.body
            assert fact.topic.keyword in f"{mail.subject} {mail.body}".lower()
            for other in world.emails:
                if other.date > mail.date and fact.project in other.body and fact.topic.value != "person":
                    assert fact.value not in other.body


def test_a_correction_names_the_old_value_and_comes_after_it(worlds: list[World]) -> None:
    corrected = 0
    for world in worlds:
        by_id = {email.message_id: email for email in world.emails}
        for fact in world.facts:
            mail = by_id[fact.message_id]
            earlier = [
                e for e in world.emails
                if e.date < mail.date and fact.project in e.body
                and mail.subject == "Re: " + e.subject.removeprefix("Re: ")
                and re.search(rf"\b{fact.topic.keyword}\b", e.body, re.IGNORECASE)
            ]  # fmt: skip
            corrected += bool((earlier and "not " in mail.body) or " from " in mail.body)
    share = corrected / sum(len(w.facts) for w in worlds)
    assert 0.15 < share < 0.5


def test_questions_name_their_project_and_every_topic_is_asked(worlds: list[World]) -> None:
    questions = demo_questions(42)
    facts = [fact for world in worlds for fact in world.facts]
    assert len(questions) == len(facts)
    for question, fact in zip(questions, facts, strict=True):
        assert fact.project in question.question
        assert question.answer == fact.value
        assert question.message_ids == [fact.message_id]
    assert {q.kind for q in questions} == {topic.name for topic in TOPICS}
    assert len({q.id for q in questions}) == len(questions)
    assert sum(q.split == "test" for q in questions) >= 200


def test_splits_share_no_inbox() -> None:
    inboxes: dict[str, set[str]] = {split: set() for split in NUM_WORLDS}
    for question in demo_questions(42):
        inboxes[question.split or ""].add(question.inbox_address)
    assert {split: len(found) for split, found in inboxes.items()} == NUM_WORLDS


def test_project_and_keyword_find_the_mail(worlds: list[World], tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The good habit works: with both keywords the right mail is nearly always among the first three hits."""
    from emailrl.settings import StoreSettings

    chosen = worlds[:6]
    db = tmp_path / "demo.db"
    build_database((e for w in chosen for e in w.emails), db, settings=StoreSettings())
    both = alone = total = 0

    def found(box: Mailbox, keywords: list[str]) -> list[str]:
        return [hit.message_id for hit in box.search(keywords, max_results=3)]

    for world in chosen:
        box = open_mailbox(db, world.inbox, until=world.query_date)
        for fact in world.facts:
            total += 1
            both += fact.message_id in [
                h.message_id for h in box.search([fact.project, fact.topic.keyword], max_results=3)
            ]
            alone += fact.message_id in [h.message_id for h in box.search([fact.project], max_results=3)]
        box.close()
    assert both / total > 0.97
    assert 0.3 < alone / total < 0.7
