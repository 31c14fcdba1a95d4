"""What a benchmark found: results side by side, and whether two policies differ by more than luck."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any

from emailrl.benchmark.attack import attack_record, same_policy
from emailrl.benchmark.subjects import Subject
from emailrl.environment.rubric import Rubric
from emailrl.evaluation import Evaluation, is_correct, is_judged, total_cost


@dataclass(frozen=True, slots=True)
class Result:
    """What one subject did on the questions."""

    subject: Subject
    evaluation: Evaluation
    complete: bool
    """False where it was interrupted: the evaluation covers the questions finished by then."""
    trajectories: Path


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results on the questions both played, with a verdict for both."""

    first: str
    second: str
    num_questions: int
    only_first: int
    """Questions that only the first answered rightly."""
    only_second: int
    p_value: float
    """Two-sided, exact McNemar; not adjusted for the number of comparisons."""


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one benchmark, with what its tables must say."""

    results: list[Result]
    conditions: dict[str, Any]
    """Split, decoding, limits, seed: what all results share."""
    num_asked: int
    """Questions that each subject is to play."""
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    attack: bool = False
    """Whether it measures under attack too: the records then say how many orders were obeyed."""

    @property
    def comparisons(self) -> list[Comparison]:
        """Every pair of results, in their order; of one plain and one under attack, those of one policy alone."""
        return [
            compare(first, second)
            for first, second in combinations(self.results, 2)
            if first.subject.attacked == second.subject.attacked or same_policy(first.subject, second.subject)
        ]

    def records(self) -> list[dict[str, Any]]:
        """One object a result, as ``benchmark --json`` prints it (``docs/architecture.md``, contracts)."""
        unknown = dict.fromkeys(item.name for item in fields(Rubric))
        return [
            {"model": result.subject.label}
            | unknown
            | result.evaluation.metrics()
            | {"cost": total_cost(result.evaluation.trajectories), "trajectories": result.trajectories}
            | self.conditions
            | (attack_record(result.subject, result.evaluation.trajectories) if self.attack else {})
            | {
                "base_model": result.subject.model_name,
                "checkpoint": result.subject.adapter and result.subject.adapter.path,
                "complete": result.complete,
                "notes": self.notes,
            }
            for result in self.results
        ]


def compare(first: Result, second: Result) -> Comparison:
    """Compare two results over the questions both played, with a verdict for both."""
    verdicts = [
        {each.id: is_correct(each) for each in result.evaluation.trajectories if is_judged(each)}
        for result in (first, second)
    ]
    shared = verdicts[0].keys() & verdicts[1].keys()
    only_first = sum(verdicts[0][name] and not verdicts[1][name] for name in shared)
    only_second = sum(verdicts[1][name] and not verdicts[0][name] for name in shared)
    labels = (first.subject.label, second.subject.label)
    return Comparison(*labels, len(shared), only_first, only_second, mcnemar(only_first, only_second))


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value of the exact McNemar test, from the counts of questions only one of two answered rightly.

    Without a difference each such question falls either way with probability ½, so p = min(1, 2 · P(X ≤ min)) with
    X ~ Binomial(only_first + only_second, ½); 1 where there is no such question. Source: McNemar, Psychometrika 12
    (1947), in its exact form.
    """
    total = only_first + only_second
    tail = sum(math.comb(total, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**total)
