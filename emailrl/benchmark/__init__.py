"""Policies on the test split, side by side: intervals, and whether they differ by more than luck.

Every policy plays the same questions with the same draws, so that two of them differ question by question; their
accuracies are compared by the exact McNemar test over the questions on which only one of them is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emailrl.benchmark.files import write_report
from emailrl.checkpoints import find_runs
from emailrl.engines import is_chat
from emailrl.environment.rubric import Rubric
from emailrl.errors import EmailRLError, UsageError
from emailrl.evaluation import Evaluation, evaluate, is_correct, is_judged, total_cost
from emailrl.policy.adapter import Adapter, find_adapter
from emailrl.recording import write_trajectories
from emailrl.settings import without_credentials
from emailrl.trajectory import Scenario, Trajectory

if TYPE_CHECKING:
    from emailrl.rollout.collect import Collector
    from emailrl.settings import Settings

Progress = Callable[["Subject", Trajectory], None]
"""Hears of each trajectory as it ends, before it is scored."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy to measure: a base model, bare or with an adapter."""

    label: str
    """Tells it from the others: the model's name, or the adapter's absolute path."""
    model_name: str
    adapter: Adapter | None = None


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
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def comparisons(self) -> list[Comparison]:
        """Every pair of results, in their order."""
        return [compare(first, second) for first, second in combinations(self.results, 2)]

    def records(self) -> list[dict[str, Any]]:
        """One object a result, as ``benchmark --json`` prints it (``docs/architecture.md``, contracts)."""
        unknown = dict.fromkeys(item.name for item in fields(Rubric))
        return [
            {"model": result.subject.label}
            | unknown
            | result.evaluation.metrics()
            | {"cost": total_cost(result.evaluation.trajectories), "trajectories": result.trajectories}
            | self.conditions
            | {
                "base_model": result.subject.model_name,
                "checkpoint": result.subject.adapter and result.subject.adapter.path,
                "complete": result.complete,
                "notes": self.notes,
            }
            for result in self.results
        ]


def choose_subjects(checkpoints: Sequence[str], models: Sequence[str], settings: Settings) -> list[Subject]:
    """The policies to measure: those named, else the newest run's best checkpoint, else the bare model now set.

    Each checkpoint, or exported adapter, is verified by its hashes and plays on the base model it was trained on. A
    chat server knows models by name only: raises UsageError for a checkpoint with the engine openai.
    """
    output_dir = settings.output.output_dir
    if is_chat(settings):
        if checkpoints:
            raise UsageError("The engine openai plays no checkpoint.", "Name the server's model with --model.")
        return [Subject(name, name) for name in dict.fromkeys(models or [settings.model.name])]
    if not checkpoints and not models:
        checkpoints, models = (["best"], []) if find_runs(output_dir) else ([], [settings.model.name])
    found = [find_adapter(which, output_dir) for which in checkpoints]
    subjects = [Subject(str(each.path.absolute()), each.base_model, each) for each in found]
    subjects += [Subject(name, name) for name in models]
    return list({subject.label: subject for subject in subjects}.values())


def run_benchmark(
    subjects: Sequence[Subject],
    scenarios: Sequence[Scenario],
    settings: Settings,
    out: Path,
    *,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Measure every subject and write results, per-question rows and trajectories into ``out``.

    After KeyboardInterrupt the questions finished so far are scored, written and reported as ``interrupted``. Raises
    EmailRLError where every question of a subject raised.
    """
    results: dict[str, Result] = {}
    interrupted = False
    try:
        for subject, collector in _players(subjects, settings):
            (out / "trajectories").mkdir(parents=True, exist_ok=True)  # an unwritable place is told before, not after
            trajectories, complete = _play(collector, scenarios, settings, subject, progress)
            if trajectories:
                evaluation = Evaluation.of(trajectories)
                file = out / "trajectories" / f"{len(results):02d}-{_slug(subject.label)}.jsonl"
                write_trajectories(file, trajectories)
                results[subject.label] = Result(subject, evaluation, complete, file)
            if not complete:
                interrupted = True
                break
    except KeyboardInterrupt:  # between two subjects: what is finished stays
        interrupted = True
    ordered = [results[subject.label] for subject in subjects if subject.label in results]
    report = Report(ordered, _conditions(settings), list(notes), interrupted)
    write_report(report, out)
    for result in ordered:
        if result.evaluation.exceptions == result.evaluation.num_questions:
            first = result.evaluation.trajectories[0].exception
            raise EmailRLError(
                f"{result.subject.label}: every question raised: {str(first).rstrip('.')}.",
                f"Check the server or model; all of them are in {result.trajectories}.",
            )
    return report


def _players(subjects: Sequence[Subject], settings: Settings) -> Iterator[tuple[Subject, Collector]]:
    """Yield each subject with a collector that plays it; a base model is loaded once for all its subjects."""
    play = _on_chat_server if is_chat(settings) else _on_policies
    yield from play(subjects, settings)


def _on_chat_server(subjects: Sequence[Subject], settings: Settings) -> Iterator[tuple[Subject, Collector]]:
    from emailrl.rewards import build_scorer
    from emailrl.rollout.collect import build_chat_collector

    scorer = build_scorer(settings)
    for subject in subjects:
        model = settings.model.model_copy(update={"name": subject.model_name})
        collector = build_chat_collector(settings.model_copy(update={"model": model}), scorer=scorer)
        with closing(collector.engine):
            yield subject, collector


def _on_policies(subjects: Sequence[Subject], settings: Settings) -> Iterator[tuple[Subject, Collector]]:
    from emailrl.engines import build_engine
    from emailrl.environment.custom import load_task
    from emailrl.policy.load import load_policy
    from emailrl.policy.resolve import with_token_limit
    from emailrl.rewards import build_scorer
    from emailrl.rollout.collect import build_collector

    load_task(settings.agent.environment)  # what the user wrote is found wrong before a model is loaded
    scorer = build_scorer(settings)
    for model_name in dict.fromkeys(subject.model_name for subject in subjects):
        model = settings.model.model_copy(update={"name": model_name})
        own = settings.model_copy(update={"model": model})
        policy = load_policy(own)
        own = with_token_limit(own, policy.model)
        engine = build_engine(own, policy)
        try:
            for subject in subjects:
                if subject.model_name == model_name:
                    adapter = subject.adapter
                    engine.load_adapter(adapter.path if adapter else None, subject.label)
                    run_id = adapter.run_id if adapter else ""
                    yield subject, build_collector(own, policy, engine, scorer=scorer, run_id=run_id)
        finally:
            engine.close()


def _play(
    collector: Collector,
    scenarios: Sequence[Scenario],
    settings: Settings,
    subject: Subject,
    progress: Progress | None,
) -> tuple[list[Trajectory], bool]:
    """Return the scored trajectories in the order of the questions, and whether all were played."""
    finished: list[Trajectory] = []

    def ended(trajectory: Trajectory) -> None:
        finished.append(trajectory)
        if progress is not None:
            progress(subject, trajectory)

    portions = [[scenario] for scenario in scenarios] if settings.benchmark.bench_sequential else [list(scenarios)]
    complete = True
    try:
        for portion in portions:
            evaluate(
                collector,
                portion,
                step=0,
                seed=settings.training.seed,
                temperature=settings.agent.eval_temperature,
                split_label="test",
                progress=ended,
            )
    except KeyboardInterrupt:
        complete = False
        collector.scorer.score(finished)
    place = {scenario.id: number for number, scenario in enumerate(scenarios)}
    return sorted(finished, key=lambda trajectory: place[trajectory.scenario.id]), complete


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
