"""One demo world: a small company, its projects, and emails that state and correct facts about them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from emailrl.mail.demo.names import Pool
from emailrl.mail.demo.topics import (
    CHATTER,
    CLOSINGS,
    FILLERS,
    GREETINGS,
    PROMISES,
    TOPICS,
    ProjectTopic,
    expand,
)
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Scenario

NUM_PROJECTS = 5
FACTS_PER_PROJECT = 5
CORRECTED = 0.35
"""Share of facts that a later email corrects."""
QUOTED = 0.5
"""Share of corrections that quote the corrected sentence."""
PROMISED = 0.15
"""Share of facts that another email mentions without stating them."""
CHATTER_PER_PROJECT = 1
_SCATTER = 387_420_489
"""Coprime to a million, so that multiplying by it modulo a million keeps numbers distinct."""


@dataclass(frozen=True, slots=True)
class Person:
    first: str
    last: str
    address: str

    @property
    def full(self) -> str:
        return f"{self.first} {self.last}"


@dataclass(frozen=True, slots=True)
class ProjectFact:
    """The final value of one topic of one project, and the email that states it."""

    project: str
    topic: ProjectTopic
    value: str
    message_id: str


@dataclass(frozen=True, slots=True)
class World:
    """A complete world; the first of ``people`` owns the inbox."""

    split: str
    people: list[Person]
    emails: list[RawEmail]
    facts: list[ProjectFact]
    query_date: str

    @property
    def inbox(self) -> str:
        return self.people[0].address


@dataclass(slots=True)
class _Draft:
    """An email without a date yet; ``after`` is a draft that must come before it."""

    subject: str
    sentence: str
    fact: ProjectFact | None = None
    after: _Draft | None = None
    order: float = 0.0


def make_world(seed: int, split: str, number: int) -> World:
    """Build world ``number`` of ``split``; its email ids derive from ``number`` and are unique over all worlds."""
    rng = random.Random(f"{seed}/{split}/{number}")
    pool = Pool(rng, split)
    domain = pool.name(2).lower() + ".example"
    people = []
    for _ in range(8):
        first, last = pool.name(2), pool.name(2)
        people.append(Person(first, last, f"{first}.{last}@{domain}".lower()))
    drafts = [draft for _ in range(NUM_PROJECTS) for draft in _project_drafts(pool.name(3), pool, rng, people)]
    _order(drafts, rng)
    return _write(drafts, people, rng, split, number)


def _project_drafts(project: str, pool: Pool, rng: random.Random, people: list[Person]) -> list[_Draft]:
    drafts = []
    for topic in rng.sample(TOPICS, FACTS_PER_PROJECT):
        first = _value(topic, pool, rng, people)
        corrected = rng.random() < CORRECTED
        statement = expand(rng.choice(topic.statements), rng).format(project=project, value=first)
        draft = _Draft(_subject(project, topic.keyword, rng), statement)
        drafts.append(draft)
        value = first
        if corrected:
            value = _value(topic, pool, rng, [p for p in people if p.full != first])
            text = expand(rng.choice(topic.corrections), rng).format(project=project, value=value, old=first)
            draft = _Draft("Re: " + draft.subject.removeprefix("Re: "), text, after=draft)
            drafts.append(draft)
        draft.fact = ProjectFact(project, topic, value, "")
        if rng.random() < PROMISED:
            text = expand(rng.choice(PROMISES), rng).format(project=project, keyword=topic.keyword)
            drafts.append(_Draft(_subject(project, None, rng), text))
    for _ in range(CHATTER_PER_PROJECT):
        text = expand(rng.choice(CHATTER), rng).format(project=project)
        drafts.append(_Draft(_subject(project, None, rng), text))
    return drafts


def _value(topic: ProjectTopic, pool: Pool, rng: random.Random, people: list[Person]) -> str:
    return rng.choice(people[1:]).full if topic.value == "person" else getattr(pool, topic.value)()


def _subject(project: str, keyword: str | None, rng: random.Random) -> str:
    """A generic subject, or project and topic; never the project alone, which would hide the topic in snippets."""
    general = "[Update|News|A note|Quick note|For your files|FYI|Hello]"
    if keyword is None or keyword == "approved":
        return expand(general, rng)
    return expand(rng.choice((general, f"[Re: ||FW: ]{project} {keyword}")), rng)


def _order(drafts: list[_Draft], rng: random.Random) -> None:
    """Shuffle the drafts; corrections stay after what they correct (they come later in ``drafts``)."""
    for draft in drafts:
        draft.order = rng.uniform(draft.after.order if draft.after else 0.0, 1.0)
    drafts.sort(key=lambda draft: draft.order)


def _write(drafts: list[_Draft], people: list[Person], rng: random.Random, split: str, number: int) -> World:
    owner = people[0]
    day = datetime(rng.randrange(1999, 2003), rng.randrange(1, 13), rng.randrange(1, 28), tzinfo=UTC)
    emails, facts = [], []
    for position, draft in enumerate(drafts):
        day += timedelta(hours=rng.randrange(3, 60), minutes=rng.randrange(60))
        message_id = _message_id(number, position)
        emails.append(_email(draft, message_id, day, owner, rng.choice(people[1:]), rng, people))
        if draft.fact:
            facts.append(ProjectFact(draft.fact.project, draft.fact.topic, draft.fact.value, message_id))
    query_date = (day + timedelta(days=rng.randrange(1, 31))).strftime("%Y-%m-%d")
    return World(split, people, emails, facts, query_date)


def _message_id(number: int, position: int) -> str:
    """Six digits, unique for up to 10,000 worlds of at most 100 emails; neighboring ids share no digits."""
    return f"<{(number * 100 + position) * _SCATTER % 1_000_000:06d}>"


def _email(
    draft: _Draft,
    message_id: str,
    date: datetime,
    owner: Person,
    other: Person,
    rng: random.Random,
    people: list[Person],
) -> RawEmail:
    sender, receiver = (owner, other) if rng.random() < 0.25 else (other, owner)
    lines = [rng.choice(GREETINGS).format(first=receiver.first)]
    sentences = [draft.sentence]
    if rng.random() < 0.5:
        sentences.insert(rng.randrange(2), expand(rng.choice(FILLERS), rng))
    lines += [" ".join(sentences), rng.choice(CLOSINGS).format(sender=sender.first)]
    if draft.after and rng.random() < QUOTED:
        lines.append(f"> {draft.after.sentence}")
    cc = [rng.choice(people[1:]).address] if rng.random() < 0.15 else []
    return RawEmail(
        message_id=message_id, subject=draft.subject, from_address=sender.address, to=[receiver.address], cc=cc, bcc=[],
        date=date, body="\n".join(line for line in lines if line), file_name=f"demo/{message_id[1:-1]}",
    )  # fmt: skip


def ask(world: World, fact: ProjectFact, rng: random.Random) -> Scenario:
    """Return a question about one fact in a random wording."""
    question = expand(rng.choice(fact.topic.questions), rng).format(project=fact.project)
    return Scenario(
        id=f"demo-{fact.message_id[1:-1]}", question=question, answer=fact.value,
        message_ids=[fact.message_id], inbox_address=world.inbox, query_date=world.query_date,
        split=world.split, kind=fact.topic.name,
    )  # fmt: skip
