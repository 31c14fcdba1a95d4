"""What a benchmark found: results side by side, and whether two policies differ by more than luck."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any

from emailrl.benchmark.attack import attack_record, same_policy
from emailrl.benchmark.subjects import Subject
from emailrl.environment.rubric import Rubric
from emailrl.evaluation import Evaluation, is_correct, is_judged, total_cost
from emailrl.evaluation.statistics import paired_p_value


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
    better_first: int
    """Questions that the first answered rightly more often; of one sample each, that only the first did."""
    better_second: int
    p_value: float
    """Two-sided exact sign-flip test (of one sample each, McNemar's); not adjusted for the number of comparisons."""


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
    """Compare two results over the questions that both played equally often, with a verdict for every sample."""
    counts = [
        {
            name: (len(samples), sum(map(is_correct, samples)))
            for name, samples in result.evaluation.by_question.items()
            if all(map(is_judged, samples))
        }
        for result in (first, second)
    ]
    pairs = [(count, counts[1][name]) for name, count in counts[0].items() if name in counts[1]]
    differences = [one[1] - other[1] for one, other in pairs if one[0] == other[0]]
    return Comparison(
        first.subject.label,
        second.subject.label,
        num_questions=len(differences),
        better_first=sum(difference > 0 for difference in differences),
        better_second=sum(difference < 0 for difference in differences),
        p_value=paired_p_value(differences),
    )
