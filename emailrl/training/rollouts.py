"""The rollouts of a step: ask questions, select the groups to train on, replace dropped ones, record everything.

A group is kept if its advantage is informative: enough members, rewards that differ, and, under dynamic filtering
(DAPO, arXiv 2503.14476, section 3.2), a mean strictly inside a range. A refill asks exactly as many questions as groups
are missing, so each group was sampled from the policy that the step updates (docs/decisions/0010).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from emailrl.agent.play import Collector, Play
from emailrl.base.errors import EmailRLError
from emailrl.records import write_trajectories
from emailrl.records.trajectory import Scenario, Trajectory, TrajectoryGroup
from emailrl.runs.log import Display
from emailrl.settings import AlgorithmSettings, TrainingSettings
from emailrl.training.algorithms import Algorithm, questions_per_step
from emailrl.training.state import RunState, StepQuestions

logger = logging.getLogger(__name__)
REASONS = ("group_too_small", "group_low_std", "group_below_range", "group_above_range")


@dataclass(frozen=True)
class Filter:
    """Conditions for training on a group."""

    min_group_size: int  # Minimum number of members, excluding those that raised; at least 1
    min_group_std: float
    between: tuple[float, float] | None = None
    """The mean must be strictly inside; None keeps every group whose rewards differ, without refills."""
    mean_of: Literal["accuracy", "reward"] = "accuracy"
    """What to average: the answer's verdict as 0 or 1, or the reward."""
    max_refill_rounds: int = 0

    def sift(self, group: TrajectoryGroup) -> TrajectoryGroup | str:
        """The group without the members that raised, or the first of ``REASONS`` to drop it.

        The standard deviation is the *sample* one (n - 1); a group of one has none and passes.
        """
        sound = [trajectory for trajectory in group.trajectories if trajectory.exception is None]
        if (size := len(sound)) < self.min_group_size:
            return "group_too_small"
        rewards = [trajectory.reward for trajectory in sound]
        mean = math.fsum(rewards) / size
        squares = math.fsum((reward - mean) ** 2 for reward in rewards)
        if size > 1 and math.sqrt(squares / (size - 1)) < self.min_group_std:
            return "group_low_std"
        if self.between is not None:
            if self.mean_of == "accuracy":
                mean = sum(bool(trajectory.rubric.get("answer_correct")) for trajectory in sound) / size
            if mean <= self.between[0]:
                return "group_below_range"
            if mean >= self.between[1]:
                return "group_above_range"
        return replace(group, trajectories=sound)


def make_filter(algorithm: Algorithm, wanted: AlgorithmSettings, *, answers: bool) -> Filter:
    """The filter of an algorithm with the settings' overrides.

    ``answers``: whether the rollouts answer their questions; if not (mode ``simple``), the mean is of the reward
    unless FILTER_ON is set.
    """
    compares = algorithm.compares_rollouts
    least = Filter(2 if compares else 1, wanted.min_group_std if compares else 0.0)
    if not algorithm.dynamic_filtering:
        return least
    between, mean_of = (
        (wanted.filter_low, wanted.filter_high),
        wanted.filter_on or ("accuracy" if answers else "reward"),
    )
    return replace(least, between=between, mean_of=mean_of, max_refill_rounds=wanted.max_refill_rounds)


@dataclass
class Collected:
    """The rollouts of one step."""

    groups: list[TrajectoryGroup] = field(default_factory=list)  # Every group played, in question order
    kept: list[TrajectoryGroup] = field(default_factory=list)  # Groups to train on, without the members that raised
    reasons: dict[str, str] = field(default_factory=dict)  # Reasons for dropped groups, by id
    refill_rounds: int = 0

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them, in order."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def dropped(self) -> dict[str, int]:
        """Number dropped by reason; every reason is listed, even with 0."""
        counts = Counter(self.reasons.values())
        raised = sum(trajectory.exception is not None for trajectory in self.trajectories)
        groups = {reason.replace("group", "groups"): counts[reason] for reason in REASONS}
        return {"trajectories_exception": raised} | groups


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Plays the steps of one run, from any thread."""

    training: TrainingSettings
    train: Sequence[Scenario]  # The questions
    directory: Path
    filter: Filter
    collector: Collector
    epochs: int | None  # Passes over the questions that end the run; None if only the steps do
    num_ranks: int = 1

    @property
    def per_step(self) -> int:
        """Questions per step, not counting replacements for dropped ones."""
        return questions_per_step(self.training, self.num_ranks)

    @property
    def choose_by_outcome(self) -> bool:
        """Whether the outcomes of earlier questions decide which are asked next."""
        return self.filter.max_refill_rounds > 0

    def questions(self, place: RunState) -> StepQuestions:
        """The questions of the step that begins at ``place``."""
        return StepQuestions(self.train, place.cursor, self.training.seed, epochs=self.epochs)

    def play(self, step: int, questions: StepQuestions, display: Display, play: Play | None = None) -> Collected:
        """Roll out the questions of ``step``, record the trajectories, and replace dropped groups as the filter allows.

        ``play`` replaces the collector's. Raises EmailRLError if every rollout raised.
        """
        collector = self.collector if play is None else replace(self.collector, play=play)
        collected, size, seed = Collected(), self.training.num_generations, self.training.seed
        for refill in range(self.filter.max_refill_rounds + 1):
            missing = self.per_step - len(collected.kept)
            if missing <= 0 or not (scenarios := questions.take(missing)):
                break
            label = f"refill-{refill}" if refill else "train"
            if refill:
                logger.info("Step %d: %s asks %d more questions", step, label, len(scenarios))
            display.phase(f"{label} rollouts of step {step}", len(scenarios) * size)
            groups = collector.collect(
                scenarios, size, step=step, seed=seed, split_label=label, progress=display.played
            )
            for group in groups:
                sifted = self.filter.sift(group)
                if isinstance(sifted, str):
                    collected.reasons[group.id] = sifted
                else:
                    collected.kept.append(sifted)
            collected.groups += groups
            collected.refill_rounds = refill
            new = [trajectory for group in groups for trajectory in group.trajectories]
            self.record(f"step-{step:06d}.jsonl", collected.trajectories, display, new)
        return collected

    def file_of(self, name: str) -> Path:
        """The file for the trajectories of a step or an evaluation."""
        return self.directory / "trajectories" / name

    def record(
        self, name: str, trajectories: Sequence[Trajectory], display: Display, new: Sequence[Trajectory] | None = None
    ) -> None:
        """Write trajectories to a file of the run, and show the ``new`` ones (None: all).

        Raises EmailRLError if every one raised.
        """
        path = self.file_of(name)
        write_trajectories(path, trajectories)
        display.recorded(path, trajectories if new is None else new)
        if trajectories and all(trajectory.exception is not None for trajectory in trajectories):
            first = (trajectories[0].exception or "").rstrip(".")
            what = f"Every rollout failed ({path.stem}). First error: {first}."
            raise EmailRLError(what, "Fix it, then rerun with --resume latest.")
