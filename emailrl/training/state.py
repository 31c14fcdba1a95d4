"""A run's progress: the step, the position in its questions, and when it stops early; and the questions themselves."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from emailrl.measure.evaluation import Z_95, Evaluation
from emailrl.records.trajectory import Scenario
from emailrl.runs.run import State
from emailrl.settings import EvaluationSettings

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
    counts questions. None for fewer than two questions.
    """

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
    """The change from the previous ``patience`` evaluations to the last ``patience``, if it is a fall.

    That is a fall by ``CERTAIN`` standard errors, or no change of any question. None while there are fewer evaluations.
    """
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
    """The best accuracy's 95 % interval; biased upward, as the best of many evaluations."""
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

    def end_step(self, cursor: Cursor, accuracy: float) -> None:
        """Advance by a step whose questions end at ``cursor`` and whose rollouts had this accuracy."""
        self.step += 1
        self.cursor = cursor
        self.recent_accuracies = [*self.recent_accuracies, accuracy][-MOVING_STEPS:]

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
    """The questions of one step, without repeats; ``cursor`` points after those taken.

    Each epoch covers all questions once, in its own permutation, which depends on the seed; its last batch may be
    shorter. If a step continues past the end of an epoch, questions it has already asked come last in the next epoch.
    """

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
