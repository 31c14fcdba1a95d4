"""The fictional mailboxes of ``gen-db --source demo`` and questions with known answers, generated from a seed.

A world is a small company, its projects, and emails that state and correct facts about them, in the words of
``demo.toml``. The checksum of an invented name or value assigns it to one split: no two splits share a person or fact.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Scenario

SPLITS = ("train", "val", "test")
NUM_WORLDS = {"train": 20, "val": 6, "test": 12}
"""Number of worlds per split in the demo database; each world has its own inbox."""
NUM_PROJECTS = 5
FACTS_PER_PROJECT = 5
CORRECTED = 0.35  # share of facts that a later email corrects
QUOTED = 0.5  # share of corrections that quote the corrected sentence
PROMISED = 0.15  # share of facts that another email mentions without stating them
CHATTER_PER_PROJECT = 1
_SCATTER = 387_420_489  # coprime to a million, so that multiplying by it modulo a million keeps numbers distinct
_ONSETS = (*"bcdfghjklmnprstvwz", "br", "dr", "gr", "kr", "pr", "qu", "st", "tr")
_VOWELS = ("a", "a", "e", "e", "i", "i", "o", "o", "u", "ai", "ea", "io", "ou")
_CODAS = ["", "", "", "l", "n", "r", "s", "x", "nd", "rk", "lt"]
_LETTERS = "ABDEFKLMQRSTVXZ"
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_TEXTS = tomllib.loads(Path(__file__).with_name("demo.toml").read_text(encoding="utf-8"))
_VALUES: dict[str, Callable[[random.Random], str]] = {
    "amount": lambda rng: f"${rng.randrange(1_000, 99_999):,}",
    "volume": lambda rng: f"{rng.randrange(1_000, 99_999):,}",
    "date": lambda rng: f"{rng.choice(_TEXTS['months'])} {rng.randrange(1, 29)}",
    "time": lambda rng: f"{rng.randrange(7, 20)}:{rng.randrange(0, 60):02d}",
    "room": lambda rng: f"{rng.choice('ABCDEFGHJK')}{rng.randrange(100, 999)}",
    "flight": lambda rng: f"{rng.choice(_LETTERS)}{rng.choice(_LETTERS)} {rng.randrange(100, 9999)}",
    "phone": lambda rng: f"555-{rng.randrange(1000, 9999)}",
}


class ProjectTopic(NamedTuple):
    """One kind of fact about a project; ``value`` is the kind of its value, in ``_VALUES``, or ``person``."""

    name: str
    value: str
    keyword: str
    statements: list[str]
    corrections: list[str]
    questions: list[str]


TOPICS = tuple(ProjectTopic(**topic) for topic in _TEXTS["topics"])


def split_of(text: str) -> str:
    """Return the only split in which a name or value may be drawn."""
    return SPLITS[crc32(text.encode()) % len(SPLITS)]


class Pool:
    """Draws names and values of one split, each at most once."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, split
        self._used: set[str] = set()

    def draw(self, make: Callable[[], str]) -> str:
        """Return the first text from ``make`` that belongs to this split and was not drawn before."""
        while True:
            text = make()
            if text not in self._used and split_of(text) == self.split:
                self._used.add(text)
                return text

    def name(self, syllables: int = 2) -> str:
        """Return an invented capitalized word."""

        def word() -> str:
            parts = [self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) for _ in range(syllables)]
            return ("".join(parts) + self.rng.choice(_CODAS)).capitalize()

        return self.draw(word)

    def value(self, kind: str) -> str:
        """Return an invented value: an amount, a date, a room, …"""
        unit = f" {self.rng.choice(('barrels', 'tonnes', 'pallets', 'crates'))}" if kind == "volume" else ""
        return self.draw(lambda: _VALUES[kind](self.rng) + unit)


class Person(NamedTuple):
    first: str
    last: str
    address: str

    @property
    def full(self) -> str:
        return f"{self.first} {self.last}"


class ProjectFact(NamedTuple):
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


def expand(pattern: str, rng: random.Random) -> str:
    """Replace every ``[a|b|c]`` by one of its alternatives, the innermost first."""
    while match := _CHOICE.search(pattern):
        pattern = pattern[: match.start()] + rng.choice(match[1].split("|")) + pattern[match.end() :]
    return pattern


def demo_worlds(seed: int) -> list[World]:
    """Return all worlds of the demo database for a seed."""
    return [make_world(seed, split, number) for number, split in enumerate(Counter(NUM_WORLDS).elements())]


def demo_emails(seed: int) -> Iterator[RawEmail]:
    """Yield every email of the demo database, world by world; the splits take turns, so that a limit keeps them all."""
    worlds = demo_worlds(seed)
    by_split = ([world for world in worlds if world.split == split] for split in NUM_WORLDS)
    yield from (email for turn in zip_longest(*by_split) for world in turn if world for email in world.emails)


def demo_questions(seed: int) -> list[Scenario]:
    """Return one question per fact with ``split`` set; splits share no inbox."""
    rng = random.Random(f"{seed}/questions")
    return [ask(world, fact, rng) for world in demo_worlds(seed) for fact in world.facts]


def make_world(seed: int, split: str, number: int) -> World:
    """Build world ``number`` of ``split``; its email ids derive from ``number`` and are unique over all worlds."""
    rng = random.Random(f"{seed}/{split}/{number}")
    pool = Pool(rng, split)
    domain = pool.name(2).lower() + ".example"
    names = [(pool.name(), pool.name()) for _ in range(8)]
    people = [Person(first, last, f"{first}.{last}@{domain}".lower()) for first, last in names]
    drafts = [draft for _ in range(NUM_PROJECTS) for draft in _project_drafts(pool.name(3), pool, rng, people)]
    for draft in drafts:  # corrections, which come later in ``drafts``, stay after what they correct
        draft.order = rng.uniform(draft.after.order if draft.after else 0.0, 1.0)
    return _write(sorted(drafts, key=lambda draft: draft.order), people, rng, split, number)


def _project_drafts(project: str, pool: Pool, rng: random.Random, people: list[Person]) -> list[_Draft]:
    drafts = []

    def value_of(topic: ProjectTopic, among: list[Person]) -> str:
        return rng.choice(among[1:]).full if topic.value == "person" else pool.value(topic.value)

    def add(word: str | None, patterns: list[str], **values: str) -> _Draft:
        """A draft; its subject is general, or project and topic: the project alone would hide it in snippets."""
        text = expand(rng.choice(patterns), rng).format(project=project, **values)
        general = _TEXTS["subjects"]
        is_named = word is not None and word != "approved"
        subject = rng.choice((general, f"[Re: ||FW: ]{project} {word}")) if is_named else general
        drafts.append(_Draft(expand(subject, rng), text))
        return drafts[-1]

    for topic in rng.sample(TOPICS, FACTS_PER_PROJECT):
        value = first = value_of(topic, people)
        is_corrected = rng.random() < CORRECTED
        draft = add(topic.keyword, topic.statements, value=first)
        if is_corrected:
            value = value_of(topic, [person for person in people if person.full != first])
            text = expand(rng.choice(topic.corrections), rng).format(project=project, value=value, old=first)
            draft = _Draft("Re: " + draft.subject.removeprefix("Re: "), text, after=draft)
            drafts.append(draft)
        draft.fact = ProjectFact(project, topic, value, "")
        if rng.random() < PROMISED:
            add(None, _TEXTS["promises"], keyword=topic.keyword)
    for _ in range(CHATTER_PER_PROJECT):
        add(None, _TEXTS["chatter"])
    return drafts


def _write(drafts: list[_Draft], people: list[Person], rng: random.Random, split: str, number: int) -> World:
    owner, *others = people
    day = datetime(rng.randrange(1999, 2003), rng.randrange(1, 13), rng.randrange(1, 28), tzinfo=UTC)
    emails, facts = [], []
    for position, draft in enumerate(drafts):
        day += timedelta(hours=rng.randrange(3, 60), minutes=rng.randrange(60))
        # Six digits, unique for up to 10,000 worlds of at most 100 emails; neighboring ids share no digits.
        digits = f"{(number * 100 + position) * _SCATTER % 1_000_000:06d}"
        other = rng.choice(others)
        sender, receiver = (owner, other) if rng.random() < 0.25 else (other, owner)
        greeting = rng.choice(_TEXTS["greetings"]).format(first=receiver.first)
        sentences = [draft.sentence]
        if rng.random() < 0.5:
            sentences.insert(rng.randrange(2), expand(rng.choice(_TEXTS["fillers"]), rng))
        lines = [greeting, " ".join(sentences), rng.choice(_TEXTS["closings"]).format(sender=sender.first)]
        if draft.after and rng.random() < QUOTED:
            lines.append(f"> {draft.after.sentence}")
        cc = [rng.choice(others).address] if rng.random() < 0.15 else []
        body, name = "\n".join(filter(None, lines)), f"demo/{digits}"
        email = RawEmail(f"<{digits}>", draft.subject, sender.address, [receiver.address], cc, [], day, body, name)
        emails.append(email)
        if draft.fact:
            facts.append(draft.fact._replace(message_id=email.message_id))
    query_date = (day + timedelta(days=rng.randrange(1, 31))).strftime("%Y-%m-%d")
    return World(split, people, emails, facts, query_date)


def ask(world: World, fact: ProjectFact, rng: random.Random) -> Scenario:
    """Return a question about one fact in a random wording."""
    question = expand(rng.choice(fact.topic.questions), rng).format(project=fact.project)
    return Scenario(
        id=f"demo-{fact.message_id[1:-1]}",
        question=question,
        answer=fact.value,
        message_ids=[fact.message_id],
        inbox_address=world.inbox,
        query_date=world.query_date,
        split=world.split,
        kind=fact.topic.name,
    )
