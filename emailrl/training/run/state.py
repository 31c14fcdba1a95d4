"""How far a run has come: the step, the place in its questions, and the counters of early stopping."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from emailrl.evaluation import Evaluation, is_correct, is_judged
from emailrl.settings import EvaluationSettings, TrainingSettings
from emailrl.training.run.stopping import no_longer_rising
from emailrl.trajectory import Scenario, TrajectoryGroup

MOVING_STEPS = 10
"""Steps whose rollouts the moving accuracy is taken over."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next question: ``position`` in the order of ``epoch``."""

    epoch: int = 0
    position: int = 0
    last: tuple[str, ...] = ()
    """Ids that come last in this epoch: the step that began it had met them already in the epoch before."""
    resting: tuple[str, ...] = ()
    """Ids that this epoch leaves out."""


@dataclass(slots=True)
class RunState:
    """Everything that changes from step to step, save weights, optimizer and random generators."""

    step: int = 0
    """Steps done."""
    cursor: Cursor = Cursor()
    best_accuracy: float | None = None
    best_step: int | None = None
    best_interval: tuple[float, float] | None = None
    """The best accuracy's 95 % interval; of the best of many evaluations, it is too high."""
    last_evaluated: int | None = None
    evaluations_without_better: int = 0
    shares: list[dict[str, float]] = field(default_factory=list)
    """The share of right answers by question, of the evaluations that patience looks back on."""
    recent_accuracies: list[float] = field(default_factory=list)
    """Accuracies of the rollouts of the last ``MOVING_STEPS`` steps."""
    watched: list[dict[str, float | None]] = field(default_factory=list)
    """Numbers of the last steps that tell a collapse (``training.collapse``)."""
    collapsing: list[str] = field(default_factory=list)
    """Signs of collapse that were warned of and have not passed."""
    pass_rates: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By question id: the epoch it was last asked in, and the share of its rollouts that were right."""
    steps_without_update: int = 0
    """Steps in which no group was left to learn from."""
    last_metrics: dict[str, Any] = field(default_factory=dict)
    """``accuracy``, ``reward`` and the rest of the last evaluation, for the metadata of checkpoints."""

    def note_evaluation(self, evaluation: Evaluation, patience: int) -> bool:
        """Count an evaluation of the present step; True if it is the best so far (of equals, the earlier is)."""
        self.last_evaluated = self.step
        shares = {name: float(share) for name, share in evaluation.shares.items()}
        self.shares = [*self.shares, shares][-2 * patience :]
        if self.best_accuracy is None or evaluation.accuracy > self.best_accuracy:
            self.best_accuracy, self.best_interval, self.best_step = evaluation.accuracy, evaluation.interval, self.step
            self.evaluations_without_better = 0
            return True
        self.evaluations_without_better += 1
        return False

    def resting(self, epoch: int, rest_epochs: int) -> set[str]:
        """The questions that this epoch leaves out: asked last in one of the ``rest_epochs`` before, all right or all
        wrong."""
        return {
            name
            for name, (asked, rate) in self.pass_rates.items()
            if rate in (0.0, 1.0) and 0 < epoch - asked <= rest_epochs
        }

    def note_pass_rates(self, asked: Mapping[str, int], groups: Sequence[TrajectoryGroup]) -> None:
        """Keep how many of each question's rollouts were right; ``asked`` says in which epoch it was asked."""
        for group in groups:
            right = [is_correct(trajectory) for trajectory in group.trajectories if is_judged(trajectory)]
            if right:
                self.pass_rates[group.scenario.id] = (asked[group.scenario.id], sum(right) / len(right))

    def end_step(self, cursor: Cursor, accuracy: float) -> None:
        """Count a step whose questions end at ``cursor`` and whose rollouts had this accuracy."""
        self.step += 1
        self.cursor = cursor
        self.recent_accuracies = [*self.recent_accuracies, accuracy][-MOVING_STEPS:]

    @property
    def moving_accuracy(self) -> float:
        """Mean accuracy of the rollouts of the last ``MOVING_STEPS`` steps; 0 before the first."""
        return math.fsum(self.recent_accuracies) / max(1, len(self.recent_accuracies))

    def is_last(self, total_steps: int, epochs: int | None) -> bool:
        """Whether no step follows: all steps are done, or all the epochs (None: no bound) are passed."""
        return self.step >= total_steps or (epochs is not None and self.cursor.epoch >= epochs)

    def stop_reason(self, evaluation: EvaluationSettings, total_steps: int, epochs: int | None = None) -> str | None:
        """Why training ends here, or None while it goes on."""
        if self.best_accuracy is not None and self.best_accuracy >= evaluation.target_accuracy:
            return f"target accuracy {evaluation.target_accuracy:.1%} reached"
        patience = evaluation.patience
        if self.evaluations_without_better >= patience and (fall := no_longer_rising(self.shares, patience)):
            return f"no better accuracy in {patience} evaluation{'s' * (patience > 1)} ({fall})"
        if self.is_last(total_steps, epochs):
            return "all steps done" if self.step >= total_steps else "all epochs done"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``."""
        lists = {name: tuple(values["cursor"].get(name, ())) for name in ("last", "resting")}
        return cls(**(values | {"cursor": Cursor(**(values["cursor"] | lists))}))


def next_questions(
    scenarios: Sequence[Scenario], cursor: Cursor, count: int, seed: int
) -> tuple[list[Scenario], Cursor]:
    """The next ``count`` questions in this seed's order of the epoch, and the cursor behind them.

    Each epoch goes through all questions once, in a permutation of its own; its last batch may be shorter, so that no
    step meets a question twice.
    """
    order = list(scenarios)
    random.Random(f"{seed}/questions/{cursor.epoch}").shuffle(order)
    order.sort(key=lambda scenario: scenario.id in cursor.last)  # stable
    batch = order[cursor.position : cursor.position + count]
    behind = cursor.position + len(batch)
    return batch, (Cursor(cursor.epoch + 1) if behind >= len(order) else replace(cursor, position=behind))


class StepQuestions:
    """The questions of one step, none of them twice; ``cursor`` stands behind those that were taken.

    A step that goes on asking beyond the end of an epoch finds those it has met at the end of the next: every epoch
    still goes through all questions once.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        cursor: Cursor,
        seed: int,
        *,
        epochs: int | None,
        resting: Callable[[int], Container[str]] = lambda _: (),
    ) -> None:
        """``epochs``: take nothing beyond so many; None goes on for ever. ``resting`` says whom an epoch leaves out."""
        self.cursor = cursor
        self.asked: dict[str, int] = {}
        """The epoch in which each question of the step was taken, by its id."""
        self._scenarios, self._seed, self._epochs, self._resting = scenarios, seed, epochs, resting

    def take(self, count: int) -> list[Scenario]:
        """The next ``count`` questions; fewer at the end of an epoch, none where all were met or no epoch follows."""
        if self._epochs is not None and self.cursor.epoch >= self._epochs:
            return []
        if self.cursor.position == 0:
            self._begin_epoch()
        epoch, resting = self.cursor.epoch, set(self.cursor.resting)
        awake = [scenario for scenario in self._scenarios if scenario.id not in resting]
        count = min(count, sum(scenario.id not in self.asked for scenario in awake))
        questions, self.cursor = next_questions(awake, self.cursor, count, self._seed)
        self.asked |= {question.id: epoch for question in questions}
        return questions

    def _begin_epoch(self) -> None:
        """Settle who rests in the epoch, nobody where all would, and that those met already come last."""
        resting = self._resting(self.cursor.epoch)
        names = [scenario.id for scenario in self._scenarios if scenario.id in resting]
        if len(names) == len(self._scenarios):
            names = []
        self.cursor = replace(self.cursor, last=tuple(self.asked), resting=tuple(names))


def questions_per_step(training: TrainingSettings, num_ranks: int = 1) -> int:
    """Questions whose rollouts make one step of so many ranks."""
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * num_ranks


def num_epochs(steps: int, per_step: int, num_questions: int) -> float:
    """Passes that ``steps`` steps make over the questions; the last step of each pass may be short."""
    return steps / math.ceil(num_questions / per_step)


def count_steps(num_questions: int, per_step: int, max_steps: int, epochs: int | None) -> int:
    """Most steps of the run: MAX_STEPS, or fewer where the mode's epochs end before (``epochs`` None: no bound).

    A refill passes through the questions faster; then the epochs end before these steps do.
    """
    return max_steps if epochs is None else min(max_steps, epochs * math.ceil(num_questions / per_step))
