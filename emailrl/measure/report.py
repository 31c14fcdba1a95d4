"""A benchmark's report: results of all subjects, and significance of pairwise differences."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any

from emailrl.agent.rubric import Rubric
from emailrl.measure.attacked import attack_record, same_policy
from emailrl.measure.evaluation import Evaluation, is_correct, is_judged, total_cost
from emailrl.measure.statistics import paired_test
from emailrl.measure.subjects import Subject


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one subject."""

    subject: Subject
    evaluation: Evaluation
    complete: bool
    """False if interrupted: the evaluation covers only the questions finished by then."""
    trajectories: Path


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results compared on the questions that have a verdict in both."""

    first: str
    second: str
    num_questions: int
    better_first: int
    """Questions that the first answered correctly more often; with one sample, only the first."""
    better_second: int
    p_value: float
    """Two-sided exact sign-flip test; not adjusted for multiple comparisons."""
    unit: str
    """What the test takes as independent: ``inbox``, or ``question``, which with one sample each is McNemar's test."""


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one benchmark, with the context for its tables."""

    results: list[Result]
    conditions: dict[str, Any]
    """Split, decoding, limits and seed, common to all results."""
    num_asked: int
    """Questions per subject."""
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    attack: bool = False
    """Whether it also measures under attack; records then include how many orders were obeyed."""

    @property
    def comparisons(self) -> list[Comparison]:
        """Every pair of results, in order; plain and attacked results are paired only for the same policy."""
        return [
            compare(first, second)
            for first, second in combinations(self.results, 2)
            if first.subject.attacked == second.subject.attacked or same_policy(first.subject, second.subject)
        ]

    def records(self) -> list[dict[str, Any]]:
        """One object per result, as ``benchmark --json`` prints it (``docs/architecture.md``, contracts)."""
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
    """Compare two results over the questions that both played equally often with a verdict for every sample."""
    samples = [
        {name: each for name, each in result.evaluation.by_question.items() if all(map(is_judged, each))}
        for result in (first, second)
    ]
    pairs = [(one, samples[1][name]) for name, one in samples[0].items() if name in samples[1]]
    differences = [
        (one[0].scenario.inbox_address, sum(map(is_correct, one)) - sum(map(is_correct, other)))
        for one, other in pairs
        if len(one) == len(other)
    ]
    p_value, unit = paired_test(differences)
    return Comparison(
        first.subject.label,
        second.subject.label,
        num_questions=len(differences),
        better_first=sum(difference > 0 for _, difference in differences),
        better_second=sum(difference < 0 for _, difference in differences),
        p_value=p_value,
        unit=unit,
    )
