"""Scripted experts play demo scenarios as a person would, with deliberate mistakes. They teach an untrained policy the
format of the task (``emailrl sft``), not how to solve it: usually they search poorly (a single keyword) and rarely
well, so that reinforcement learning has something to find."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from emailrl.agent.task import MailEnvironment
from emailrl.base.workers import in_order, worker_processes
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.demo import FACTS_PER_PROJECT, NUM_PROJECTS, ProjectFact, ask, make_world
from emailrl.records.trajectory import Message
from emailrl.settings import AgentSettings, StoreSettings
from emailrl.sft.examples import (
    Conversation,
    Example,
    call_text,
    converse,
    examples_of,
    next_turn,
    shared,
    shared_renderer,
)

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer

MAX_RESULTS = 3  # Hits that experts request: few enough that one keyword often misses the right email
USUAL = frozenset(("room", "flight"))  # Topics for which most experts search well; for the others few do
GIVE_UP = "I don't know."
Split = Literal["train", "val"]
FIRST_WORLD = 1_000  # Worlds below this number are the demo database's own
NUM_WORLDS = 9_000
MAX_TURNS = (4, 10)
TIMES = 2  # Questions per fact of a world
CORPUS_WORLDS = 120  # Worlds whose texts train a new model's tokenizer
AHEAD = 4  # Worlds per process that are played before the first of them is taken


@dataclass(frozen=True, slots=True)
class Habits:
    """Probabilities of expert actions."""

    two_keywords: float = 0.15  # Search for project and topic together (the good habit), not for the project alone
    two_keywords_usual: float = 0.8  # The same for the few topics where it is common (``USUAL``)
    topic_only: float = 0.04  # Search for the topic alone
    open_first: float = 0.10  # Open the newest hit, ignoring its snippet
    search_again: float = 0.12  # If no hit looks right, search with both keywords instead of giving up
    try_next: float = 0.5  # After a wrong email, open another hit instead of giving up


def expert(fact: ProjectFact, rng: random.Random, habits: Habits) -> Generator[str, Any, None]:
    """The turns on one scenario of an expert who knows the fact behind the question; is sent the tool results."""
    topic, both = fact.topic.keyword, [fact.project, fact.topic.keyword]
    two_keywords = habits.two_keywords_usual if fact.topic.name in USUAL else habits.two_keywords
    draw = rng.random()
    keywords = [topic] if draw < two_keywords + habits.topic_only else [fact.project]
    keywords = both if draw < two_keywords else keywords
    while True:
        hits = yield call_text("search_emails", {"keywords": keywords, "max_results": MAX_RESULTS})
        careless = rng.random() < habits.open_first
        while True:
            right = [hit for hit in hits if hit["message_id"] == fact.message_id]
            alike = [hit for hit in hits if topic in hit["snippet"].lower()]
            choice = hits[:1] if careless else right or alike
            if not choice:
                break
            hits.remove(choice[0])
            opened = choice[0]["message_id"]
            yield call_text("read_email", {"message_id": opened})
            if opened == fact.message_id:
                yield call_text("return_final_answer", {"answer": fact.value, "sources": [opened]})
            if not hits or rng.random() >= habits.try_next:
                break
            careless = False
        if keywords == both or rng.random() >= habits.search_again:
            yield call_text("return_final_answer", {"answer": GIVE_UP, "sources": []})
        keywords = both


def transcripts(number: int, *, seed: int, times: int, habits: Habits, split: Split = "train") -> list[list[Message]]:
    """Expert conversations on one world of a split, played against its real database. Every fact is asked ``times``
    times, each time in different words and by a different expert."""
    world = make_world(seed, split, FIRST_WORLD + number % NUM_WORLDS)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "world.db"
        build_database(iter(world.emails), db, settings=StoreSettings())
        with open_mailbox(db, world.inbox, until=world.query_date, names=False) as mailbox:
            for index, (fact, repeat) in enumerate(itertools.product(world.facts, range(times))):
                name = f"{seed}/{number}/{index}/{repeat}"
                scenario, rng = ask(world, fact, random.Random(name)), random.Random(f"{name}/expert")
                environment = MailEnvironment(scenario, mailbox, AgentSettings(max_turns=rng.randint(*MAX_TURNS)))
                found.append(converse(environment, partial(next_turn, expert(fact, rng, habits))))
    return found


def corpus(num_worlds: int, *, seed: int) -> Iterator[str]:
    """Texts to train a tokenizer on: templated conversations from some worlds."""
    for number in range(num_worlds):
        for messages in transcripts(number, seed=seed, times=1, habits=Habits()):
            yield "".join(f"\n{message.content}\n" for message in messages[1:])


def batches(
    renderer: ChatRenderer, *, steps: int, batch_size: int, start: int, seed: int, workers: int | None
) -> Generator[list[Example]]:
    """Batches ``start`` … ``steps`` - 1 of expert conversations on training worlds, shuffled. Independent of the number
    of processes; batches before ``start`` are played too, and skipped."""
    num_worlds = -(-steps * batch_size // (TIMES * NUM_PROJECTS * FACTS_PER_PROJECT)) + 1
    workers = min(workers or os.cpu_count() or 1, num_worlds)
    with shared(renderer) as folder, worker_processes(workers, hint="Lower --workers.") as submit:
        calls = ((folder, number, seed) for number in range(num_worlds))
        examples = shuffled(in_order(submit, _examples, calls, ahead=AHEAD * workers), seed)
        for _ in itertools.islice(examples, start * batch_size):
            pass
        for _ in range(start, steps):
            yield list(itertools.islice(examples, batch_size))


def held_out(num: int, seed: int, renderer: ChatRenderer) -> list[Example]:
    """``num`` examples of worlds of the split val, which share no inbox, name or value with those of train."""
    worlds = (_examples(renderer, number, seed, "val") for number in itertools.count())
    return list(itertools.islice(itertools.chain.from_iterable(worlds), num))


def _examples(given: ChatRenderer | str, number: int, seed: int, split: Split = "train") -> list[Example]:
    renderer, world = shared_renderer(given) if isinstance(given, str) else given, f"{split}-{number}"
    played = transcripts(number, seed=seed, times=TIMES, habits=Habits(), split=split)
    conversations = [Conversation(f"{world}-{n}", world, split, messages) for n, messages in enumerate(played)]
    return [example for conversation in conversations for example in examples_of(conversation, renderer)]


def shuffled(worlds: Iterable[list[Example]], seed: int, size: int = 4096) -> Iterator[Example]:
    """Shuffle worlds through a buffer of ``size`` examples."""
    rng = random.Random(f"{seed}/shuffle")
    buffer: list[Example] = []
    for example in itertools.chain.from_iterable(worlds):
        if len(buffer) < size:
            buffer.append(example)
            continue
        place = rng.randrange(size)
        yield buffer[place]
        buffer[place] = example
    rng.shuffle(buffer)
    yield from buffer
