"""Where a run stands and when it stops; the questions and rollouts of a step, and which groups are trained. A group is
kept if its advantage is informative: enough members, rewards that differ, and, under dynamic filtering (DAPO, arXiv
2503.14476, section 3.2), a mean strictly inside a range. A refill asks exactly as many questions as groups are missing,
so each group was sampled from the policy that the step updates (docs/decisions/0010)."""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from emailrl.agent.play import Collector, Play
from emailrl.base.errors import EmailRLError
from emailrl.measure.evaluation import Z_95, Evaluation, has_crashed
from emailrl.records import write_trajectories
from emailrl.records.trajectory import Scenario, Trajectory, TrajectoryGroup
from emailrl.runs.log import Display
from emailrl.runs.run import State
from emailrl.settings import AlgorithmSettings, EvaluationSettings, TrainingSettings
from emailrl.training.algorithms import Algorithm

logger = logging.getLogger(__name__)
CERTAIN = 3.0
"""Standard errors by which accuracy must have fallen. A run asks after each evaluation: at 1.96, two thirds of level
runs are stopped within 68 evaluations (docs/decisions/0017-stopping-by-evidence.md)."""

FEWEST_UPDATES = 5  # Updates without any effect from which the learning rate is to blame
MOVING_STEPS = 10  # Window of the moving accuracy, in steps

Shares = Mapping[str, float]  # Share of correct answers per question of an evaluation, by id


@dataclass(frozen=True, slots=True)
class Change:
    """How an accuracy changed, with the standard error of that."""

    mean: float
    error: float

    def __str__(self) -> str:
        low, high = (100 * (self.mean + sign * Z_95 * self.error) for sign in (-1, 1))
        return f"{100 * self.mean:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}"


def change(before: Sequence[Shares], after: Sequence[Shares]) -> Change | None:
    """Compare two series of evaluations on their common questions, each averaged over those of a series that judged it.
    The error is s / √n over the n differences, s with n - 1: evaluations of one question are not independent, so n
    counts questions. None for fewer than two questions."""

    def means(evaluations: Sequence[Shares]) -> dict[str, float]:
        seen: defaultdict[str, list[float]] = defaultdict(list)
        for shares in evaluations:
            for name, share in shares.items():
                seen[name].append(share)
        return {name: sum(shares) / len(shares) for name, shares in seen.items()}

    first, second = means(before), means(after)
    differences = [second[name] - first[name] for name in sorted(first.keys() & second.keys())]
    if len(differences) < 2:
        return None
    return Change(statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences)))


def no_longer_rising(shares: Sequence[Shares], patience: int) -> Change | None:
    """The change from the previous ``patience`` evaluations to the last ``patience``, if it is a fall. That is a fall
    by ``CERTAIN`` standard errors, or no change of any question. None while there are fewer evaluations."""
    if len(shares) < 2 * patience:
        return None
    found = change(shares[-2 * patience : -patience], shares[-patience:])
    return found if found is not None and found.mean + CERTAIN * found.error <= 0 else None


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next question: ``position`` in the order of ``epoch``."""

    epoch: int = 0
    position: int = 0
    last: tuple[str, ...] = ()
    """Ids that come last in this epoch: the step that started it had already asked them in the previous epoch."""


@dataclass(slots=True)
class RunState(State):
    """Everything that changes from step to step, except weights, optimizer and random generators."""

    cursor: Cursor = Cursor()
    best_accuracy: float | None = None
    best_interval: tuple[float, float] | None = None
    """The best accuracy's 95% interval; biased upward, as the best of many evaluations."""
    shares: list[dict[str, float]] = field(default_factory=list)
    """Share of correct answers by question, for the evaluations within patience."""
    recent_accuracies: list[float] = field(default_factory=list)
    """Accuracies of the rollouts of the last ``MOVING_STEPS`` steps."""
    watched: list[dict[str, float | None]] = field(default_factory=list)
    """Metrics of the last steps for detecting collapse (``report.watch``)."""
    collapsing: list[str] = field(default_factory=list)  # Signs of collapse already reported and not yet passed
    steps_without_update: int = 0  # Steps without a group to train on

    def note_evaluation(self, evaluation: Evaluation, patience: int) -> bool:
        """Record an evaluation of the current step; True if it is the best so far (ties keep the earlier one)."""
        shares = {name: float(share) for name, share in evaluation.shares.items()}
        self.shares = [*self.shares, shares][-2 * patience :]
        is_best = self.best_accuracy is None or evaluation.accuracy > self.best_accuracy
        if is_best:
            self.best_accuracy, self.best_interval = evaluation.accuracy, evaluation.interval
        self.count_evaluation(is_best=is_best)
        self.last_metrics = {"evaluated_step": self.step} | evaluation.metrics()
        return is_best

    def forget_best(self) -> None:
        """See ``State.forget_best``."""
        self.best_step = self.best_accuracy = self.best_interval = None

    def end_step(self, cursor: Cursor, accuracy: float | None) -> None:
        """Advance by a step whose questions end at ``cursor`` and whose rollouts had this accuracy, if a known one."""
        self.step += 1
        self.cursor = cursor
        known = [] if accuracy is None else [accuracy]
        self.recent_accuracies = [*self.recent_accuracies, *known][-MOVING_STEPS:]

    @property
    def moving_accuracy(self) -> float:
        """Mean accuracy of the rollouts of the last ``MOVING_STEPS`` steps; 0 before the first."""
        return math.fsum(self.recent_accuracies) / max(1, len(self.recent_accuracies))

    @property
    def learned_nothing(self) -> bool:
        """Whether there were steps but no update, or updates after which every evaluation equaled the first."""
        updates, worse = self.step - self.steps_without_update, self.evaluations_without_better
        if self.best_accuracy == 0:
            fewest, still = 1, worse > 0
        else:
            same = len(self.shares) == worse + 1 > 1 and all(shares == self.shares[0] for shares in self.shares)
            fewest, still = FEWEST_UPDATES, self.best_step == 0 and same
        return self.step > 0 and (not updates or (still and updates >= fewest))

    def is_last(self, total_steps: int, epochs: int | None) -> bool:
        """Whether no step follows: all steps or all epochs (None: unlimited) are done."""
        return self.step >= total_steps or (epochs is not None and self.cursor.epoch >= epochs)

    def stop_reason(self, evaluation: EvaluationSettings, total_steps: int, epochs: int | None = None) -> str | None:
        """Why training ends here, or None if it continues."""
        if self.best_accuracy is not None and self.best_accuracy >= evaluation.target_accuracy:
            return f"target accuracy {evaluation.target_accuracy:.1%} reached"
        patience = evaluation.patience
        if self.evaluations_without_better >= patience and (fall := no_longer_rising(self.shares, patience)):
            return f"no better accuracy in {patience} evaluation{'s' * (patience > 1)} ({fall})"
        if self.is_last(total_steps, epochs):
            return "all steps done" if self.step >= total_steps else "all epochs done"
        return None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """See ``State.from_dict``."""
        cursor = values["cursor"]
        return cls(**(values | {"cursor": Cursor(cursor["epoch"], cursor["position"], tuple(cursor["last"]))}))


class StepQuestions:
    """The questions of one step, without repeats; ``cursor`` points after those taken. Each epoch covers all questions
    once, in its own permutation, which depends on the seed; its last batch may be shorter. If a step continues past the
    end of an epoch, questions it has already asked come last in the next epoch."""

    def __init__(self, scenarios: Sequence[Scenario], cursor: Cursor, seed: int, *, epochs: int | None) -> None:
        """``epochs``: the maximum, None for no limit."""
        self.cursor = cursor
        self._asked: tuple[str, ...] = ()
        self._scenarios, self._seed, self._epochs = scenarios, seed, epochs

    def take(self, count: int) -> list[Scenario]:
        """The next ``count`` questions; fewer at the end of an epoch, none if all were asked or no epoch follows."""
        cursor = self.cursor
        if self._epochs is not None and cursor.epoch >= self._epochs:
            return []
        if cursor.position == 0:
            cursor = replace(cursor, last=self._asked)
        order = list(self._scenarios)
        random.Random(f"{self._seed}/questions/{cursor.epoch}").shuffle(order)
        order.sort(key=lambda scenario: scenario.id in cursor.last)  # stable
        count = min(count, sum(scenario.id not in self._asked for scenario in order))
        taken = order[cursor.position : cursor.position + count]
        behind = cursor.position + len(taken)
        self.cursor = Cursor(cursor.epoch + 1) if behind >= len(order) else replace(cursor, position=behind)
        self._asked += tuple(question.id for question in taken)
        return taken


REASONS = ("group_too_small", "group_unscored", "group_low_std", "group_below_range", "group_above_range")


@dataclass(frozen=True)
class Filter:
    """Conditions for training on a group."""

    min_group_size: int  # Minimum number of members, excluding those that raised; at least 1
    min_group_std: float
    between: tuple[float, float] | None = None
    """The mean must be strictly inside; None keeps every group whose rewards differ."""
    mean_of: Literal["accuracy", "reward"] = "accuracy"
    """What to average: the answer's verdict as 0 or 1, or the reward."""
    max_refill_rounds: int = 0

    def sift(self, group: TrajectoryGroup) -> TrajectoryGroup | str:
        """The group without the members that raised, or the first of ``REASONS`` to drop it. The standard deviation is
        the *sample* one (n - 1); a group of one has none and passes."""
        sound = [trajectory for trajectory in group.trajectories if trajectory.exception is None]
        if (size := len(sound)) < self.min_group_size:
            played = [each for each in group.trajectories if not has_crashed(each)]
            return "group_unscored" if len(played) >= self.min_group_size else "group_too_small"
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
    """The filter of an algorithm with the settings' overrides. ``answers``: whether the rollouts answer their
    questions; if not (mode ``simple``), the mean is of the reward unless FILTER_ON is set."""
    compares = algorithm.compares_rollouts
    least = 2 if compares else 1, wanted.min_group_std if compares else 0.0
    if not algorithm.dynamic_filtering:
        return Filter(*least)
    if wanted.filter_on == "spread":
        return Filter(*least, max_refill_rounds=wanted.max_refill_rounds)
    between, mean_of = (
        (wanted.filter_low, wanted.filter_high),
        wanted.filter_on or ("accuracy" if answers else "reward"),
    )
    return Filter(*least, between, mean_of, wanted.max_refill_rounds)


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
    per_step: int  # Questions per step, not counting replacements for dropped ones

    @property
    def choose_by_outcome(self) -> bool:
        """Whether the outcomes of earlier questions decide which are asked next."""
        return self.filter.max_refill_rounds > 0

    def questions(self, place: RunState) -> StepQuestions:
        """The questions of the step that begins at ``place``."""
        return StepQuestions(self.train, place.cursor, self.training.seed, epochs=self.epochs)

    def play(self, step: int, questions: StepQuestions, display: Display, play: Play | None = None) -> Collected:
        """Roll out the questions of ``step``, record the trajectories, and replace dropped groups as the filter allows.
        ``play`` replaces the collector's. Raises EmailRLError if every rollout raised."""
        collector = self.collector if play is None else replace(self.collector, play=play)
        collected, size, seed = Collected(), self.training.num_generations, self.training.seed
        for refill in range(self.filter.max_refill_rounds + 1):
            missing = self.per_step - len(collected.kept)
            if missing <= 0 or not (scenarios := questions.take(missing)):
                break
            label = f"refill-{refill}" if refill else "train"
            if refill:
                logger.info("Step %d: %s asks %d more questions", step, label, len(scenarios))
            display.phase(f"{'more ' * bool(refill)}rollouts of step {step}", len(scenarios) * size)
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
        """Write trajectories to a file of the run, and show the ``new`` ones (None: all). Raises EmailRLError if every
        one raised."""
        path = self.file_of(name)
        write_trajectories(path, trajectories)
        display.recorded(path, trajectories if new is None else new)
        if trajectories and all(trajectory.exception is not None for trajectory in trajectories):
            first = (trajectories[0].exception or "").rstrip(".")
            what = f"Every rollout failed ({path.stem}). First error: {first}."
            raise EmailRLError(what, "Fix it, then rerun with --resume latest.")
