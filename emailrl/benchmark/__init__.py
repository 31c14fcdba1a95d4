"""Policies on the test split, side by side: intervals, and whether they differ by more than luck.

Every policy plays the same questions with the same draws, so that two of them differ question by question; their
accuracies are compared by the exact McNemar test over the questions on which only one of them is right.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emailrl.benchmark.attack import attack_record, same_policy, with_attacked
from emailrl.benchmark.begun import CONDITIONS, all_conditions, is_unfinished, to_resume
from emailrl.benchmark.files import REPORT_FILES, write_report
from emailrl.benchmark.subjects import Subject, choose_subjects, players
from emailrl.environment.rubric import Rubric
from emailrl.errors import EmailRLError, UsageError
from emailrl.evaluation import Evaluation, evaluate, is_correct, is_judged, reason, total_cost
from emailrl.rollout.journal import Conditions, Journal
from emailrl.settings import without_credentials
from emailrl.trajectory import Scenario, Trajectory

if TYPE_CHECKING:
    from emailrl.rollout.collect import Collector
    from emailrl.settings import Settings

__all__ = [
    "CONDITIONS",
    "Comparison",
    "Progress",
    "Report",
    "Result",
    "Subject",
    "choose_subjects",
    "compare",
    "is_unfinished",
    "mcnemar",
    "run_benchmark",
    "to_resume",
    "with_attacked",
]

Progress = Callable[["Subject", Trajectory], None]
"""Hears of each trajectory as it ends, before it is scored; in a resumed benchmark first of those played before."""


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


def run_benchmark(
    subjects: Sequence[Subject],
    scenarios: Sequence[Scenario],
    settings: Settings,
    out: Path,
    *,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> Report:
    """Measure every subject and write results, per-question rows and trajectories into ``out``.

    Trajectories are on disk as they end. With ``resume`` those in ``out`` are not played again unless they raised, and
    scored where they were not; UsageError where they were played under other conditions, or where ``out`` holds a
    benchmark and neither ``resume`` nor ``overwrite`` is given; Busy where another process plays there.
    After KeyboardInterrupt the questions finished so far are scored, written and reported as ``interrupted``. Raises
    EmailRLError where every question of a subject raised.
    """
    with Conditions(out / CONDITIONS, all_conditions(subjects, scenarios, settings), resume=resume) as conditions:
        names = {subject.label: f"{n:02d}-{_slug(subject.label)}.jsonl" for n, subject in enumerate(subjects)}
        files = {label: out / "trajectories" / name for label, name in names.items()}
        if not resume:
            if not overwrite and not conditions.is_new:
                raise UsageError(f"{out} holds a benchmark already.", "Give another --out, or --overwrite.")
            for name in REPORT_FILES:
                (out / name).unlink(missing_ok=True)
            shutil.rmtree(out / "trajectories", ignore_errors=True)
        journals = {label: Journal(file, conditions, resume=resume) for label, file in files.items()}
        results, interrupted = _measure(subjects, scenarios, settings, journals, progress)
    attack = any(subject.attacked for subject in subjects)
    report = Report(results, _conditions(settings), len(scenarios), list(notes), interrupted, attack)
    if results:
        write_report(report, out)
    for result in results:
        if result.evaluation.exceptions == result.evaluation.num_questions:
            first = reason(result.evaluation.trajectories[0].exception)
            raise EmailRLError(
                f"{result.subject.label}: every question raised: {first.rstrip('.')}.",
                f"Check the server or model; then the same command with --resume --out {out} plays them again.",
            )
    return report


def _measure(
    subjects: Sequence[Subject],
    scenarios: Sequence[Scenario],
    settings: Settings,
    journals: Mapping[str, Journal],
    progress: Progress | None,
) -> tuple[list[Result], bool]:
    """Play what is left to be played; the results in the order of the subjects, and whether it was interrupted."""
    place = {scenario.id: number for number, scenario in enumerate(scenarios)}
    waiting = [subject for subject in subjects if not journals[subject.label].is_whole(len(scenarios))]
    interrupted = False
    try:
        for subject, collector in players(waiting, settings):
            journal = journals[subject.label]
            try:
                _play(collector, scenarios, settings, subject, journal, progress)
            except KeyboardInterrupt:
                interrupted = True
                collector.scorer.score(journal.unscored)
            journal.finish(lambda trajectory: place[trajectory.scenario.id])
            if interrupted:
                break
    except KeyboardInterrupt:  # between two subjects, or a second one
        interrupted = True
    results = []
    for subject in subjects:
        journal = journals[subject.label]
        if scored := journal.scored:
            complete = len(scored) == len(scenarios)
            results.append(Result(subject, Evaluation.of(scored), complete, journal.path))
    return results, interrupted


def _play(
    collector: Collector,
    scenarios: Sequence[Scenario],
    settings: Settings,
    subject: Subject,
    journal: Journal,
    progress: Progress | None,
) -> None:
    """Play and score the questions that the journal does not hold."""

    def ended(trajectory: Trajectory) -> None:
        journal.append(trajectory)
        if progress is not None:
            progress(subject, trajectory)

    played = dict(journal.trajectories)
    for trajectory in played.values():
        if progress is not None:
            progress(subject, trajectory)
    portions = [[scenario] for scenario in scenarios] if settings.benchmark.bench_sequential else [list(scenarios)]
    for portion in portions:
        evaluate(
            collector,
            portion,
            step=0,
            seed=settings.training.seed,
            temperature=settings.agent.eval_temperature,
            split_label="test",
            progress=ended,
            played=played,
        )


def _conditions(settings: Settings) -> dict[str, Any]:
    return {
        "split": "test",
        "temperature": settings.agent.eval_temperature,
        "max_turns": settings.agent.max_turns,
        "sequential": settings.benchmark.bench_sequential,
        "seed": settings.training.seed,
        "database": settings.store.db,
        "environment": settings.agent.environment,
        "reward_name": without_credentials(settings.rewards.reward),
    }


def _slug(label: str) -> str:
    """A file name for a subject: of a path its last two parts, the run and its checkpoint."""
    short = "-".join(Path(label).parts[-2:])
    return re.sub(r"[^A-Za-z0-9._]+", "-", short).strip("-.")[-60:] or "model"


# -- significance -----------------------------------------------------------------------------------------------------


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
