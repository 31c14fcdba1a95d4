"""A made-up mailbox with questions whose answers are known: what ``gen-db --source demo`` writes, from a seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

from emailrl.store.demo.world import ProjectFact, World, ask, make_world
from emailrl.store.sources import RawEmail
from emailrl.trajectory import Scenario

NUM_WORLDS = {"train": 20, "val": 6, "test": 12}
"""Worlds of each split in the demo database; every world has its own inbox."""

__all__ = ["NUM_WORLDS", "ProjectFact", "World", "ask", "demo_emails", "demo_questions", "demo_worlds", "make_world"]


def demo_worlds(seed: int) -> list[World]:
    """All worlds of the demo database of this seed."""
    worlds, number = [], 0
    for split, count in NUM_WORLDS.items():
        for _ in range(count):
            worlds.append(make_world(seed, split, number))
            number += 1
    return worlds


def demo_emails(seed: int) -> Iterator[RawEmail]:
    """Every mail of the demo database, world by world."""
    for world in demo_worlds(seed):
        yield from world.emails


def demo_questions(seed: int) -> list[Scenario]:
    """One question for each fact, with ``split`` set; splits share no inbox."""
    rng = random.Random(f"{seed}/questions")
    return [ask(world, fact, rng) for world in demo_worlds(seed) for fact in world.facts]
