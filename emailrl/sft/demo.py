"""Experts on demo worlds, each with its own database: endless conversations, no inbox shared by two worlds."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from emailrl.environment.mail_env import MailEnvironment
from emailrl.settings import StoreSettings
from emailrl.sft.examples import Conversation, Example, converse, examples_of
from emailrl.sft.expert import Expert, Habits
from emailrl.store import open_mailbox
from emailrl.store.build import build_database
from emailrl.store.demo import ProjectFact, World, ask, make_world
from emailrl.store.demo.world import FACTS_PER_PROJECT, NUM_PROJECTS
from emailrl.trajectory import Message, Scenario
from emailrl.workers import in_order, worker_processes

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer

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

    from emailrl.engines.renderer import ChatRenderer
    from emailrl.environment.tools import tool_schemas

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
