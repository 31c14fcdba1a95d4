"""Compares policies on the test split: intervals and significance of differences.

Every policy plays the same questions with the same seeds, so that results are paired by question; accuracies are
compared with an exact paired test: by inbox, or by question if there are few inboxes. Under attack, every policy plays
them a second time, on emails with injected instructions.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from emailrl.agent.attack import under_attack
from emailrl.base.credentials import without_credentials
from emailrl.base.disk import check_own
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import find_runs
from emailrl.engines.base import Engine, PolicyEngine
from emailrl.measure.evaluation import Evaluation, check_samples, evaluate, reason
from emailrl.measure.journal import Conditions, Journal, differences, playing_conditions
from emailrl.measure.report import REPORT_FILES, Comparison, Report, Result, Subject, draw_accuracies, write_report
from emailrl.model.adapter import find_adapter
from emailrl.records.trajectory import Scenario, Trajectory

if TYPE_CHECKING:
    from emailrl.agent.play import Collector
    from emailrl.settings import PlayingSettings, PolicySettings

__all__ = ["CONDITIONS", "Comparison", "Progress", "Report", "Result", "Subject", "run_benchmark"]

CONDITIONS: Final = "conditions.json"
"""The conditions of a started benchmark: the file that identifies it for resuming."""
Progress = Callable[["Subject", Trajectory], None]
"""Called with each trajectory as it ends, before scoring; on resume, first with those already played."""


def run_benchmark(
    subjects: Sequence[Subject],
    scenarios: Sequence[Scenario],
    settings: PlayingSettings,
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
    conditions_told = {
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
    report = Report(results, conditions_told, len(scenarios), list(notes), interrupted, attack)
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
    settings: PlayingSettings,
    journals: Mapping[str, Journal],
    progress: Progress | None,
) -> tuple[list[Result], bool]:
    """Play and score the remaining questions; returns the results by subject, and whether it was interrupted."""
    place = {scenario.id: number for number, scenario in enumerate(scenarios)}
    bench = settings.benchmark
    num_trajectories = len(scenarios) * bench.bench_samples
    portions = [[scenario] for scenario in scenarios] if bench.bench_sequential else [list(scenarios)]
    waiting = [subject for subject in subjects if not journals[subject.label].is_whole(num_trajectories)]
    interrupted = False

    def noted(subject: Subject, trajectory: Trajectory) -> None:
        if progress is not None:
            progress(subject, trajectory)

    try:
        for subject, collector in players(waiting, settings):
            journal = journals[subject.label]

            def ended(trajectory: Trajectory, subject: Subject = subject, journal: Journal = journal) -> None:
                journal.append(trajectory)
                noted(subject, trajectory)

            played = dict(journal.trajectories)
            try:
                for trajectory in played.values():
                    noted(subject, trajectory)
                for portion in portions:
                    evaluate(
                        collector,
                        portion,
                        step=0,
                        seed=settings.training.seed,
                        temperature=settings.agent.eval_temperature,
                        num_samples=bench.bench_samples,
                        split_label="test",
                        progress=ended,
                        played=played,
                    )
            except KeyboardInterrupt:
                interrupted = True
                collector.score(journal.unscored)
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
            results.append(Result(subject, Evaluation(scored), complete, journal.path))
    return results, interrupted


def _slug(label: str) -> str:
    """A file name for a subject: for a path its last two parts, run and checkpoint."""
    short = "-".join(Path(label).parts[-2:])
    return re.sub(r"[^A-Za-z0-9._]+", "-", short).strip("-.")[-60:] or "model"


# -- the policies


def choose_subjects(
    checkpoints: Sequence[str], models: Sequence[str], settings: PolicySettings, output_dir: Path
) -> list[Subject]:
    """The policies to measure: those named, else the newest best checkpoint, else the configured base model.

    Each checkpoint, or exported adapter, is verified by its hashes and loaded on the base model it was trained on.
    Raises UsageError for a checkpoint with the openai engine, as chat servers only take model names.
    """
    if settings.is_chat:
        if checkpoints:
            raise UsageError("The openai engine cannot run a checkpoint.", "Name the server's model with --model.")
        return [Subject(name, name) for name in dict.fromkeys(models or [settings.model.name])]
    if not checkpoints and not models:
        checkpoints, models = (["best"], []) if find_runs(output_dir, which="best") else ([], [settings.model.name])
    found = [find_adapter(which, output_dir) for which in checkpoints]
    subjects = [Subject(str(each.path.absolute()), each.base_model, each) for each in found]
    subjects += [Subject(name, name) for name in models]
    return list({subject.label: subject for subject in subjects}.values())


def players(subjects: Sequence[Subject], settings: PlayingSettings) -> Generator[tuple[Subject, Collector], None, None]:
    """Yield each subject with its collector; a base model is loaded once for all its subjects."""
    from emailrl.agent.play import Collector, Stage, build_stage
    from emailrl.agent.task import load_task
    from emailrl.engines import open_policy
    from emailrl.engines.openai import OpenAIEngine
    from emailrl.rewards.build import build_scorer

    task = load_task(settings.agent.environment, settings)  # check the user's code before a model is loaded
    scorer = build_scorer(settings.rewards, settings.reward_weights, settings.agent)
    for model_name in dict.fromkeys(subject.model_name for subject in subjects):
        named = settings.with_model(model_name)
        with ExitStack() as opened:
            if settings.is_chat:
                stage = Stage(named.agent, named.store.db, task.make, None)
                engine: Engine = opened.enter_context(closing(OpenAIEngine(named, task.tools)))
            else:
                policy = opened.enter_context(closing(open_policy(named)))
                stage, engine = build_stage(policy.settings, policy.policy), policy.engine
            for subject in (each for each in subjects if each.model_name == model_name):
                adapter, own = subject.adapter, stage
                if isinstance(engine, PolicyEngine):
                    engine.load_adapter(adapter.path if adapter else None, subject.label)
                if subject.attacked:
                    own = replace(stage, make_environment=under_attack(stage.make_environment))
                run_id = adapter.run_id if adapter else ""
                yield subject, Collector(own.on(engine), scorer.score, own.agent, settings.training.mode, run_id)


def with_attacked(subjects: Sequence[Subject]) -> list[Subject]:
    """Each subject, followed by the same one under attack."""
    twins = ((each, replace(each, label=f"{each.label} (attacked)", attacked=True)) for each in subjects)
    return [subject for pair in twins for subject in pair]


# -- the folder, and what is resumed


def check_folder(out: Path) -> None:
    """Raise UsageError if a new benchmark in ``out`` would remove anything but an old one, or write through a link."""
    check_own(out, "--out")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name a folder with --out.")
    if out.exists() and not (out / CONDITIONS).is_file() and any(out.iterdir()):
        raise UsageError(f"{out} contains something other than a benchmark.", "Name another folder with --out.")


def is_unfinished(folder: Path) -> bool:
    """Whether the folder holds an unfinished benchmark."""
    if not (folder / CONDITIONS).is_file():
        return False
    try:
        return bool(json.loads((folder / "results.json").read_bytes())["interrupted"])
    except (OSError, ValueError, TypeError, KeyError):  # not written, or not by a benchmark
        return True


def to_resume(
    begun: Sequence[Path], subjects: Sequence[Subject], scenarios: Sequence[Scenario], settings: PlayingSettings
) -> Path:
    """The newest of the folders ``begun`` (oldest first) with these conditions; else the newest."""
    now = all_conditions(subjects, scenarios, settings)
    return next((folder for folder in reversed(begun) if _fits(folder / CONDITIONS, now)), begun[-1])


def all_conditions(
    subjects: Sequence[Subject], scenarios: Sequence[Scenario], settings: PlayingSettings
) -> dict[str, Any]:
    """The conditions that a resumed benchmark must share with the original."""
    from emailrl.engines.local.weights import adapter_sha256

    adapters = [subject.adapter and adapter_sha256(subject.adapter.path) for subject in subjects]
    models = ", ".join(subject.label for subject in subjects)
    bases = [subject.model_name for subject in subjects]
    shared = playing_conditions(settings, scenarios, temperature=settings.agent.eval_temperature, models=bases)
    benchmark = {"samples": settings.benchmark.bench_samples, "sequential": settings.benchmark.bench_sequential}
    return {"models": models, "adapters": adapters} | benchmark | shared


def _fits(path: Path, now: dict[str, Any]) -> bool:
    try:
        return not differences(path, now)
    except UsageError:
        return False
