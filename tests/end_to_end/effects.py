"""Which settings the tests of ``test_effects_*`` show the effect of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emailrl.records.trajectory import Scenario, Trajectory, TrajectoryGroup

SHOWN: set[str] = set()
"""Settings with a test among those imported."""


def shows(*keys: str) -> Callable[[Any], Any]:
    """Note which settings a test shows the effect of."""
    SHOWN.update(keys)
    return lambda test: test


def group(*, rewards: list[float], right: list[bool]) -> TrajectoryGroup:
    scenario = Scenario("q", "?", "!", [], "a@x", "2001-01-01")
    members = [
        Trajectory(str(n), "g", scenario, reward=reward, rubric={"answer_correct": correct})
        for n, (reward, correct) in enumerate(zip(rewards, right, strict=True))
    ]
    return TrajectoryGroup("g", scenario, members)
