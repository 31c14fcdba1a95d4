"""Scripted experts: play demo scenarios as a person would, with deliberate mistakes.

They teach an untrained policy the format of the task (``emailrl sft``), not how to solve it: usually they search poorly
(a single keyword) and rarely well, so that reinforcement learning has something to find.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from emailrl.agent.mail_env import MailEnvironment
from emailrl.base.workers import in_order, worker_processes
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.demo import FACTS_PER_PROJECT, NUM_PROJECTS, ProjectFact, World, ask, make_world
from emailrl.records.trajectory import Message, Scenario
from emailrl.settings import StoreSettings
from emailrl.sft.examples import Conversation, Example, converse, examples_of

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer

MAX_RESULTS = 3
"""Hits that experts request: few enough that one keyword often misses the right email."""

USUAL = frozenset(("room", "flight"))
"""Topics for which most experts search well; for the others few do."""

GIVE_UP = "I don't know."


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of expert actions."""

    two_keywords: float = 0.15
    """Search for project and topic together (the good habit) rather than for the project alone."""
    two_keywords_usual: float = 0.8
    """The same for the few topics where it is common (``USUAL``)."""
    topic_only: float = 0.04
    """Search for the topic alone."""
    open_first: float = 0.10
    """Open the newest hit, ignoring its snippet."""
    search_again: float = 0.12
    """If no hit looks right, search with both keywords instead of giving up."""
    try_next: float = 0.5
    """After a wrong email, open another hit instead of giving up."""


class Expert:
    """Plays one scenario, knowing the fact behind the question."""

    def __init__(self, fact: ProjectFact, rng: random.Random, habits: Habits) -> None:
        self.fact = fact
        self.rng = rng
        self.habits = habits
        self.unread: list[dict[str, str]] = []
        self.searches: list[list[str]] = []
        self.opened = ""

    def act(self, messages: Sequence[Message]) -> str:
        """The text of the next assistant turn."""
        last = messages[-1]
        if last.role != "tool":
            return self._search(self._first_keywords())
        result = json.loads(last.content)
        if isinstance(result, list):
            self.unread = list(result)
            return self._open(careless=self.rng.random() < self.habits.open_first)
        if self.opened == self.fact.message_id:
            return self._answer(self.fact.value, [self.opened])
        if self.unread and self.rng.random() < self.habits.try_next:
            return self._open(careless=False)
        return self._give_up_or_search()

    def _first_keywords(self) -> list[str]:
        draw = self.rng.random()
        usual = self.fact.topic.name in USUAL
        two_keywords = self.habits.two_keywords_usual if usual else self.habits.two_keywords
        if draw < two_keywords:
            return [self.fact.project, self.fact.topic.keyword]
        if draw < two_keywords + self.habits.topic_only:
            return [self.fact.topic.keyword]
        return [self.fact.project]

    def _open(self, *, careless: bool) -> str:
        right = [hit for hit in self.unread if hit["message_id"] == self.fact.message_id]
        alike = [hit for hit in self.unread if self.fact.topic.keyword in hit["snippet"].lower()]
        choice = self.unread[:1] if careless else right or alike
        if not choice:
            return self._give_up_or_search()
        self.unread.remove(choice[0])
        self.opened = choice[0]["message_id"]
        return _call("read_email", {"message_id": self.opened})

    def _give_up_or_search(self) -> str:
        both = [self.fact.project, self.fact.topic.keyword]
        if both not in self.searches and self.rng.random() < self.habits.search_again:
            return self._search(both)
        return self._answer(GIVE_UP, [])

    def _search(self, keywords: list[str]) -> str:
        self.searches.append(keywords)
        return _call("search_emails", {"keywords": keywords, "max_results": MAX_RESULTS})

    def _answer(self, answer: str, sources: list[str]) -> str:
        return _call("return_final_answer", {"answer": answer, "sources": sources})


def _call(name: str, arguments: dict[str, object]) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


Split = Literal["train", "val"]

FIRST_WORLD = 1_000
"""Worlds below this number are the demo database's own."""
NUM_WORLDS = 9_000
MAX_TURNS = (4, 10)
TIMES = 2
"""Questions per fact of a world."""
CORPUS_WORLDS = 120
"""Worlds whose texts train a new model's tokenizer."""
AHEAD = 4
"""Worlds per process that are played before the first of them is taken."""


@dataclass(frozen=True, slots=True)
class Play:
    """One scenario for an expert to play."""

    fact: ProjectFact
    scenario: Scenario
    seed: str


def plays(world: World, number: int, seed: int, times: int) -> list[Play]:
    """Every fact of a world asked ``times`` times, each time in different words and by a different expert."""
    found = []
    for index, (fact, repeat) in enumerate(itertools.product(world.facts, range(times))):
        name = f"{seed}/{number}/{index}/{repeat}"
        found.append(Play(fact, ask(world, fact, random.Random(name)), name))
    return found


def transcripts(number: int, *, seed: int, times: int, habits: Habits, split: Split = "train") -> list[list[Message]]:
    """Expert conversations on one world of a split, played against its real database."""
    world = make_world(seed, split, FIRST_WORLD + number % NUM_WORLDS)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "world.db"
        build_database(iter(world.emails), db, settings=StoreSettings())
        mailbox = open_mailbox(db, world.inbox, until=world.query_date)
        try:
            for play in plays(world, number, seed, times):
                rng = random.Random(play.seed + "/expert")
                environment = MailEnvironment(play.scenario, mailbox, max_turns=rng.randint(*MAX_TURNS))
                found.append(converse(environment, Expert(play.fact, rng, habits)))
        finally:
            mailbox.close()
    return found


def corpus(num_worlds: int, *, seed: int) -> Iterator[str]:
    """Texts to train a tokenizer on: templated conversations from some worlds."""
    for number in range(num_worlds):
        for messages in transcripts(number, seed=seed, times=1, habits=Habits()):
            yield "".join(f"\n{message.content}\n" for message in messages[1:])


def batches(
    tokenizer_path: Path, *, steps: int, batch_size: int, start: int, seed: int, workers: int | None
) -> Iterator[list[Example]]:
    """Batches ``start`` … ``steps`` - 1 of expert conversations on training worlds, shuffled.

    Independent of the number of processes; batches before ``start`` are played too, and skipped.
    """
    num_worlds = -(-steps * batch_size // (TIMES * NUM_PROJECTS * FACTS_PER_PROJECT)) + 1
    examples = shuffled(stream(tokenizer_path, num_worlds, seed=seed, workers=workers or os.cpu_count() or 1), seed)
    for _ in itertools.islice(examples, start * batch_size):
        pass
    for _ in range(start, steps):
        yield list(itertools.islice(examples, batch_size))


def held_out(num: int, seed: int, renderer: ChatRenderer) -> list[Example]:
    """At least ``num`` examples of worlds of the split val, which share no inbox, name or value with those of train."""
    found: list[Example] = []
    for number in itertools.count():
        if len(found) >= num:
            return found[:num]
        found += _examples(number, seed=seed, split="val", renderer=renderer)
    raise AssertionError  # itertools.count() has no end


def stream(tokenizer_path: Path, num_worlds: int, *, seed: int, workers: int) -> Iterator[list[Example]]:
    """The examples of training worlds 0 … num_worlds − 1, in an order independent of the number of processes."""
    calls = ((str(tokenizer_path), number, seed) for number in range(num_worlds))
    with worker_processes(min(workers, num_worlds), hint="Lower --workers.") as submit:
        yield from in_order(submit, _play, calls, ahead=AHEAD * workers)


def _play(tokenizer_path: str, number: int, seed: int) -> list[Example]:
    return _examples(number, seed=seed, split="train", renderer=_renderer(tokenizer_path))


@cache
def _renderer(tokenizer_path: str) -> ChatRenderer:
    from transformers import AutoTokenizer

    from emailrl.agent.tools import tool_schemas
    from emailrl.engines.renderer import ChatRenderer

    return ChatRenderer(AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False), tool_schemas())


def _examples(number: int, *, seed: int, split: Split, renderer: ChatRenderer) -> list[Example]:
    played = transcripts(number, seed=seed, times=TIMES, habits=Habits(), split=split)
    return [
        example
        for index, messages in enumerate(played)
        for example in examples_of(
            Conversation(f"{split}-{number}-{index}", f"{split}-{number}", split, messages), renderer
        )
    ]


def shuffled(worlds: Iterable[list[Example]], seed: int, size: int = 4096) -> Iterator[Example]:
    """Shuffle worlds through a buffer of ``size`` examples."""
    rng = random.Random(f"{seed}/shuffle")
    buffer: list[Example] = []
    for examples in worlds:
        for example in examples:
            if len(buffer) < size:
                buffer.append(example)
                continue
            place = rng.randrange(size)
            yield buffer[place]
            buffer[place] = example
    rng.shuffle(buffer)
    yield from buffer
