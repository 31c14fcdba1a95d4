"""Compares policies on the test split: intervals and significance of differences.

Every policy plays the same questions with the same seeds, so that results are paired by question; accuracies are
compared with an exact paired test: by inbox, or by question if there are few inboxes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.measure.attacked import with_attacked
from emailrl.measure.begun import CONDITIONS, all_conditions, check_folder, is_unfinished, to_resume
from emailrl.measure.evaluation import Evaluation, check_samples, evaluate, reason
from emailrl.measure.files import REPORT_FILES, write_report
from emailrl.measure.journal import Conditions, Journal
from emailrl.measure.picture import draw_accuracies
from emailrl.measure.report import Comparison, Report, Result, compare
from emailrl.measure.subjects import Subject, choose_subjects, players
from emailrl.records.trajectory import Scenario, Trajectory
from emailrl.settings import without_credentials

if TYPE_CHECKING:
    from emailrl.agent.collect import Collector
    from emailrl.settings import Settings

__all__ = [
    "CONDITIONS",
    "Comparison",
    "Progress",
    "Report",
    "Result",
    "Subject",
    "check_folder",
    "choose_subjects",
    "compare",
    "is_unfinished",
    "run_benchmark",
    "to_resume",
    "with_attacked",
]

Progress = Callable[["Subject", Trajectory], None]
"""Called with each trajectory as it ends, before scoring; on resume, first with those already played."""


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

    Trajectories are saved as they end. With ``resume``, those in ``out`` are replayed only if they raised, and scored
    if they were not; UsageError if they were played under other conditions, or if ``out`` holds a benchmark and neither
    ``resume`` nor ``overwrite`` is given, or anything else; Busy if another process uses ``out``. After
    KeyboardInterrupt the questions finished so far are scored, written and reported as ``interrupted``. Raises
    EmailRLError if every question of a subject raised.
    """
    check_samples(settings.benchmark.bench_samples, settings.agent.eval_temperature)
    check_folder(out)
    with Conditions(out / CONDITIONS, all_conditions(subjects, scenarios, settings), resume=resume) as conditions:
        names = {subject.label: f"{n:02d}-{_slug(subject.label)}.jsonl" for n, subject in enumerate(subjects)}
        files = {label: out / "trajectories" / name for label, name in names.items()}
        if not resume:
            if not overwrite and not conditions.is_new:
                raise UsageError(f"{out} already holds a benchmark.", "Choose another --out, or add --overwrite.")
            for name in REPORT_FILES:
                (out / name).unlink(missing_ok=True)
            shutil.rmtree(out / "trajectories", ignore_errors=True)
        journals = {label: Journal(file, conditions, resume=resume) for label, file in files.items()}
        results, interrupted = _measure(subjects, scenarios, settings, journals, progress)
    attack = any(subject.attacked for subject in subjects)
    report = Report(results, _conditions(settings), len(scenarios), list(notes), interrupted, attack)
    if results:
        write_report(report, out)
    if len(results) > 1:
        draw_accuracies(report, out)
    for result in results:
        if result.evaluation.exceptions == len(result.evaluation.trajectories):
            first = reason(result.evaluation.trajectories[0].exception)
            raise EmailRLError(
                f"{result.subject.label}: every rollout failed: {first.rstrip('.')}.",
                f"Check the server or model, then rerun the same command with --resume --out {out}.",
            )
    return report


def _measure(
    subjects: Sequence[Subject],
    scenarios: Sequence[Scenario],
    settings: Settings,
    journals: Mapping[str, Journal],
    progress: Progress | None,
) -> tuple[list[Result], bool]:
    """Play the remaining questions; returns the results by subject, and whether it was interrupted."""
    place = {scenario.id: number for number, scenario in enumerate(scenarios)}
    num_trajectories = len(scenarios) * settings.benchmark.bench_samples
    waiting = [subject for subject in subjects if not journals[subject.label].is_whole(num_trajectories)]
    interrupted = False
    try:
        for subject, collector in players(waiting, settings):
            journal = journals[subject.label]
            try:
                _play(collector, scenarios, settings, subject, journal, progress)
            except KeyboardInterrupt:
                interrupted = True
                collector.scorer.score(journal.unscored)
            journal.finish(lambda trajectory: (place[trajectory.scenario.id], len(trajectory.id), trajectory.id))
            if interrupted:
                break
    except KeyboardInterrupt:  # between two subjects, or a second one
        interrupted = True
    results = []
    for subject in subjects:
        journal = journals[subject.label]
        if scored := journal.scored:
            complete = len(scored) == num_trajectories
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
    """Play and score the questions missing from the journal."""

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
            num_samples=settings.benchmark.bench_samples,
            split_label="test",
            progress=ended,
            played=played,
        )


def _conditions(settings: Settings) -> dict[str, Any]:
    return {
        "split": "test",
        "temperature": settings.agent.eval_temperature,
        "max_turns": settings.agent.max_turns,
        "samples": settings.benchmark.bench_samples,
        "sequential": settings.benchmark.bench_sequential,
        "seed": settings.training.seed,
        "database": settings.store.db,
        "environment": settings.agent.environment,
        "reward_name": without_credentials(settings.rewards.reward),
    }


def _slug(label: str) -> str:
    """A file name for a subject: for a path its last two parts, run and checkpoint."""
    short = "-".join(Path(label).parts[-2:])
    return re.sub(r"[^A-Za-z0-9._]+", "-", short).strip("-.")[-60:] or "model"
