"""Which groups a step learns from, and the further questions it asks in place of those it cannot learn from.

A group is kept where its advantage means something: enough members, rewards that differ, and, under dynamic filtering
(DAPO, arXiv 2503.14476, section 3.2), a mean strictly inside a range. Every drop is counted by its reason. A refill
asks exactly as many questions as groups are missing, so none is ever left over: each group of a step was sampled from
the policy that the step updates, and between steps there is nothing to keep (docs/decisions/0010).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from emailrl.settings import AlgorithmSettings
from emailrl.training.algorithms import Algorithm
from emailrl.trajectory import Scenario, Trajectory, TrajectoryGroup

Reason = Literal["group_too_small", "group_low_std", "group_below_range", "group_above_range"]
REASONS: tuple[Reason, ...] = ("group_too_small", "group_low_std", "group_below_range", "group_above_range")


@dataclass(frozen=True)
class Filter:
    """What a group must be to be trained on."""

    min_group_size: int
    """Fewest members, those that raised not counted; at least 1."""
    min_group_std: float
    between: tuple[float, float] | None = None
    """The mean must lie strictly inside; None takes every group whose rewards differ, and refills nothing."""
    mean_of: Literal["accuracy", "reward"] = "accuracy"
    """What the mean is taken of: the verdict on the answer as 0 or 1, or the reward."""
    max_refill_rounds: int = 0

    def sift(self, group: TrajectoryGroup) -> TrajectoryGroup | Reason:
        """The group without the members that raised, or the first reason to drop it.

        The standard deviation is the *sample* one (n - 1); a group of one has none and passes.
        """
        sound = [trajectory for trajectory in group.trajectories if trajectory.exception is None]
        if len(sound) < self.min_group_size:
            return "group_too_small"
        if len(sound) > 1 and _sample_std([trajectory.reward for trajectory in sound]) < self.min_group_std:
            return "group_low_std"
        if self.between is not None:
            low, high = self.between
            mean = math.fsum(map(self._measure, sound)) / len(sound)
            if mean <= low:
                return "group_below_range"
            if mean >= high:
                return "group_above_range"
        return replace(group, trajectories=sound)

    def _measure(self, trajectory: Trajectory) -> float:
        return trajectory.reward if self.mean_of == "reward" else float(bool(trajectory.rubric.get("answer_correct")))


def make_filter(algorithm: Algorithm, wanted: AlgorithmSettings, *, answers: bool) -> Filter:
    """The filter of an algorithm with the settings' overrides.

    ``answers`` says whether the rollouts answer their questions; where they do not (mode ``simple``), the mean is that
    of the reward unless FILTER_ON says otherwise.
    """
    min_group_std = wanted.min_group_std if algorithm.compares_rollouts else 0.0
    if not algorithm.dynamic_filtering:
        return Filter(algorithm.min_group_size, min_group_std)
    return Filter(
        algorithm.min_group_size,
        min_group_std,
        between=(wanted.filter_low, wanted.filter_high),
        mean_of=wanted.filter_on or ("accuracy" if answers else "reward"),
        max_refill_rounds=wanted.max_refill_rounds,
    )


@dataclass
class Collected:
    """The rollouts of one step."""

    groups: list[TrajectoryGroup] = field(default_factory=list)
    """Every group that was played, in the order of the questions."""
    kept: list[TrajectoryGroup] = field(default_factory=list)
    """Those to train on, without the members that raised."""
    reasons: dict[str, Reason] = field(default_factory=dict)
    """Why a group was dropped, by its id."""
    refill_rounds: int = 0

    def add(self, groups: Sequence[TrajectoryGroup], wanted: Filter) -> None:
        """Sift further groups."""
        for group in groups:
            sifted = wanted.sift(group)
            if isinstance(sifted, str):
                self.reasons[group.id] = sifted
            else:
                self.kept.append(sifted)
        self.groups += groups

    def dropped(self) -> dict[str, int]:
        """How many were dropped, by reason; every reason stands there, if with 0."""
        counts = Counter(self.reasons.values())
        raised = sum(trajectory.exception is not None for group in self.groups for trajectory in group.trajectories)
        return {"trajectories_exception": raised} | {
            reason.replace("group", "groups"): counts[reason] for reason in REASONS
        }


def collect_groups(
    ask: Callable[[int], Sequence[Scenario]],
    play: Callable[[Sequence[Scenario], int], Sequence[TrajectoryGroup]],
    wanted: Filter,
    *,
    count: int,
) -> Collected:
    """Play ``count`` questions; then, for as many rounds as the filter allows, others in place of what it drops.

    ``ask`` gives the next so many questions, fewer or none where there are no more; ``play`` takes them with the number
    of the refill round, 0 being the first questions.
    """
    collected = Collected()
    for refill in range(wanted.max_refill_rounds + 1):
        questions = ask(count - len(collected.kept))
        if not questions:
            break
        collected.add(play(questions, refill), wanted)
        collected.refill_rounds = refill
        if len(collected.kept) >= count:
            break
    return collected


def _sample_std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
