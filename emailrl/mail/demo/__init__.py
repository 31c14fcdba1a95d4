"""The fictional mailboxes of ``gen-db --source demo`` and questions with known answers, generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import zip_longest

from emailrl.mail.demo.world import ProjectFact, World, ask, make_world
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Scenario

NUM_WORLDS = {"train": 20, "val": 6, "test": 12}
"""Number of worlds per split in the demo database; each world has its own inbox."""

__all__ = ["NUM_WORLDS", "ProjectFact", "World", "ask", "demo_emails", "demo_questions", "demo_worlds", "make_world"]


def demo_worlds(seed: int) -> list[World]:
    """Return all worlds of the demo database for a seed."""
    worlds, number = [], 0
    for split, count in NUM_WORLDS.items():
        for _ in range(count):
            worlds.append(make_world(seed, split, number))
            number += 1
    return worlds


def demo_emails(seed: int) -> Iterator[RawEmail]:
    """Yield every email of the demo database, world by world; the splits take turns, so that a limit keeps them all."""
    worlds = demo_worlds(seed)
    by_split = ([world for world in worlds if world.split == split] for split in NUM_WORLDS)
    for turn in zip_longest(*by_split):
        for world in filter(None, turn):
            yield from world.emails


def demo_questions(seed: int) -> list[Scenario]:
    """Return one question per fact with ``split`` set; splits share no inbox."""
    rng = random.Random(f"{seed}/questions")
    return [ask(world, fact, rng) for world in demo_worlds(seed) for fact in world.facts]
