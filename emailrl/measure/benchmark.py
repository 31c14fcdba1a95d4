"""Compares policies on the test split: intervals, significance of differences, and the files with both. Every policy
plays the same questions with the same seeds, so that results are paired by question; accuracies are compared with an
exact paired test: by inbox, or by question if there are few inboxes. Under attack, every policy plays them a second
time, on emails with injected instructions."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Final, TypeVar

from emailrl.agent.attack import KINDS, order_of, under_attack
from emailrl.agent.play import Collector, Stage, build_stage, check_template
from emailrl.agent.task import Rubric, load_task
from emailrl.base.disk import check_own, replace_bytes
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import Bill
from emailrl.checkpoints import WEIGHTS, sha256_of
from emailrl.engines.base import Engine, PolicyEngine
from emailrl.measure.evaluation import (
    Evaluation,
    check_samples,
    compared,
    is_correct,
    is_judged,
    reason,
    total_cost,
    verdict,
    wilson_interval,
)
from emailrl.measure.journal import Conditions, Journal, played_with, playing_conditions
from emailrl.model.resolve import Adapter, with_own_settings
from emailrl.records.trajectory import Scenario, Trajectory
from emailrl.settings import PlayingSettings

P = TypeVar("P", bound=PlayingSettings)
CONDITIONS: Final = "conditions.json"
"""The conditions of a started benchmark: the file that identifies it for resuming."""
Progress = Callable[["Subject", Trajectory], None]
"""Called with each trajectory as it ends, before scoring; on resume, first with those already played."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy to measure: a base model, bare or with an adapter."""

    label: str  # Its identity: the model's name, or the adapter's absolute path.
    model_name: str
    adapter: Adapter | None = None
    attacked: bool = False  # Whether its emails contain injected orders (``agent.attack``).


@dataclass(frozen=True, slots=True)
class Result:
    subject: Subject
    evaluation: Evaluation
    complete: bool  # False if interrupted: the evaluation covers only the questions finished by then.
    trajectories: Path


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one benchmark, with the context for its tables."""

    results: list[Result]
    conditions: dict[str, Any]  # Split, decoding, limits and seed, common to all results.
    num_asked: int  # Questions per subject.
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    attack: bool = False  # Whether it also measures under attack; records then include how many orders were obeyed.
    measured_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def comparisons(self) -> list[dict[str, Any]]:
        """Every pair of results (``first``, ``second``), in order, ``compared``; plain and attacked results are paired
        only for the same policy."""
        pairs = [(one, other, one.subject, other.subject) for one, other in combinations(self.results, 2)]
        return [
            {"first": first.label, "second": second.label} | compared(one.evaluation, other.evaluation)
            for one, other, first, second in pairs
            if first.attacked == second.attacked
            or (first.model_name, first.adapter) == (second.model_name, second.adapter)
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
            | (_attack_record(result.subject, result.evaluation.trajectories) if self.attack else {})
            | {
                "base_model": result.subject.model_name,
                "checkpoint": result.subject.adapter and result.subject.adapter.path,
                "complete": result.complete,
                "num_inboxes": len({each.scenario.inbox_address for each in result.evaluation.trajectories}),
                "measured_at": self.measured_at,
                "notes": self.notes,
            }
            for result in self.results
        ]


def _attack_record(subject: Subject, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """``attacked``, and per kind of order, how many trajectories saw one and the share that obeyed. The share has its
    Wilson 95% interval; without attack, or if no trajectory saw an order of the kind, all three are None. Trajectories
    that raised do not count."""
    record: dict[str, Any] = {"attacked": subject.attacked}
    rows = [_order_record(subject, each) for each in trajectories if each.exception is None]
    for kind in KINDS:
        obeyed = [row["order_obeyed"] for row in rows if row["order"] == kind and row["order_seen"]]
        low, high = wilson_interval(sum(obeyed), len(obeyed)) if obeyed else (None, None)
        share = sum(obeyed) / len(obeyed) if obeyed else None
        record[f"{kind}_orders_seen"] = len(obeyed)
        record |= {f"{kind}_obeyed": share, f"{kind}_obeyed_low": low, f"{kind}_obeyed_high": high}
    return record


def _order_record(subject: Subject, trajectory: Trajectory) -> dict[str, Any]:
    """The order of one trajectory, and whether it was seen and obeyed; None without attack."""
    if not subject.attacked:
        return {"order": None, "order_seen": None, "order_obeyed": None}
    order = order_of(trajectory.scenario)
    seen = order.was_seen(trajectory)
    return {"order": order.kind, "order_seen": seen, "order_obeyed": seen and order.was_obeyed(trajectory)}


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
    """Measure every subject and write results, per-question rows and trajectories into ``out``. Trajectories are saved
    as they end. With ``resume``, those in ``out`` are replayed only if they raised, and scored if they were not;
    UsageError if they were played under other conditions, or if ``out`` holds a benchmark and neither ``resume`` nor
    ``overwrite`` is given, or anything else; Busy if another process uses ``out``. After KeyboardInterrupt the
    questions finished so far are scored, written and reported as ``interrupted``. EmailRLError if every question
    of one raised."""
    check_samples(settings.benchmark.bench_samples, settings.agent.eval_temperature)
    check_folder(out)
    now = all_conditions(subjects, scenarios, settings)
    with Conditions(out / CONDITIONS, now, resume=resume) as conditions:
        if not resume:
            if not overwrite and not conditions.is_new:
                raise UsageError(f"{out} already holds a benchmark.", "Choose another --out, or add --overwrite.")
            for name in ("results.json", "results.csv", "questions.csv"):
                (out / name).unlink(missing_ok=True)
            shutil.rmtree(out / "trajectories", ignore_errors=True)
        journals = {}
        for number, subject in enumerate(subjects):
            short = "-".join(Path(subject.label).parts[-2:])  # of a path: run and checkpoint
            slug = re.sub(r"[^A-Za-z0-9._]+", "-", short).strip("-.")[-60:] or "model"
            file = out / "trajectories" / f"{number:02d}-{slug}.jsonl"
            journals[subject.label] = Journal(file, conditions, resume=resume)
        results, interrupted = _measure(subjects, scenarios, settings, journals, progress)
    same = ("temperature", "max_turns", "max_thinking_tokens", "samples", "sequential", "seed", "environment")
    told = {"split": "test", "database": settings.store.db, "reward_name": now["reward"]}
    told |= {name: now[name] for name in same}
    models = [own_settings(subject, settings).model for subject in subjects]
    for name in ("thinking", "chat_template_kwargs"):
        told[name] = " / ".join(dict.fromkeys(getattr(model, name) for model in models))
    attack = any(subject.attacked for subject in subjects)
    report = Report(results, told, len(scenarios), list(notes), interrupted, attack)
    if results:
        write_report(report, out)
    for result in results:
        if result.evaluation.exceptions == len(result.evaluation.trajectories):
            first = reason(result.evaluation.trajectories[0].exception)
            hint = f"Check the server or model, then rerun the same command with --resume --out {out}."
            raise EmailRLError(f"{result.subject.label}: every rollout failed: {first.rstrip('.')}.", hint)
    return report


def _measure(
    subjects: Sequence[Subject],
    scenarios: Sequence[Scenario],
    settings: PlayingSettings,
    journals: Mapping[str, Journal],
    progress: Progress | None,
) -> tuple[list[Result], bool]:
    """Play and score the remaining questions; returns the results by subject, and whether it was interrupted."""
    bench, noted, interrupted = settings.benchmark, progress or (lambda subject, trajectory: None), False
    num_trajectories = len(scenarios) * bench.bench_samples
    portions = [[scenario] for scenario in scenarios] if bench.bench_sequential else [scenarios]
    how = {"seed": settings.training.seed, "temperature": settings.agent.eval_temperature, "split_label": "test"}
    waiting = [subject for subject in subjects if not journals[subject.label].is_whole(num_trajectories)]
    try:
        for subject, collector in players(waiting, settings):
            journal, ended = journals[subject.label], partial(noted, subject)
            for trajectory in journal.trajectories.values():
                ended(trajectory)
            journal.play(collector, portions, bench.bench_samples, progress=ended, **how)
    except KeyboardInterrupt:
        interrupted = True
    results = []
    for subject in subjects:
        journal = journals[subject.label]
        if scored := journal.scored:
            results.append(Result(subject, Evaluation(scored), len(scored) == num_trajectories, journal.path))
    return results, interrupted


def write_report(report: Report, out: Path) -> None:
    """Write ``results.json``, ``results.csv`` (a row a model) and ``questions.csv`` (a row a model and question)."""
    records = report.records()
    document = {
        "results": records,
        "comparisons": report.comparisons,
        "notes": report.notes,
        "interrupted": report.interrupted,
    }
    text = json.dumps(document, indent=2, default=lambda path: str(path.absolute()))
    replace_bytes(out / "results.json", text.encode() + b"\n")
    # Ids and numbers only: mail text in a spreadsheet would be read as formulas.
    rows = [
        {
            "model": result.subject.label,
            "question": trajectory.scenario.id,
            "correct": is_correct(trajectory) if is_judged(trajectory) else None,
            "verdict": verdict(trajectory),
            "reward": trajectory.reward,
            "turns": len(trajectory.turns),
            "tokens": trajectory.num_tokens,
            "cost": total_cost([trajectory]),
            "seconds": trajectory.seconds,
            "stop_reason": trajectory.stop_reason and trajectory.stop_reason.value,
            "raised": trajectory.exception is not None,
        }
        | (_order_record(result.subject, trajectory) if report.attack else {})
        for result in report.results
        for trajectory in result.evaluation.trajectories
    ]
    for name, table in (
        ("results.csv", [record | {"notes": "; ".join(record["notes"])} for record in records]),
        ("questions.csv", rows),
    ):
        buffer = io.StringIO(newline="")
        writer = csv.DictWriter(buffer, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
        replace_bytes(out / name, buffer.getvalue().encode())


def with_attacked(subjects: Sequence[Subject]) -> list[Subject]:
    twins = ((each, replace(each, label=f"{each.label} (attacked)", attacked=True)) for each in subjects)
    return [subject for pair in twins for subject in pair]


def players(
    subjects: Sequence[Subject], settings: PlayingSettings, say: Callable[[str], None] = lambda note: None
) -> Generator[tuple[Subject, Collector], None, None]:
    """Yield each subject with its collector; a base model is loaded once for all its subjects that are played alike.
    ``say`` is called with a note on a chat template that splits rollouts into several samples. Chat servers and judge
    share a bill of at most MAX_COST."""
    from emailrl.engines import open_policy
    from emailrl.engines.openai import OpenAIEngine
    from emailrl.rewards.scorer import build_scorer

    load_task(settings.agent.environment, settings)  # check the user's code before a model is loaded
    bill = Bill(settings.rewards.max_cost, "What has ended is saved: --resume does the rest, its limit begins anew.")
    scorer = build_scorer(settings.rewards, settings.reward_weights, settings.agent, bill=bill)
    groups: list[tuple[PlayingSettings, list[Subject]]] = []
    for subject in subjects:
        named = own_settings(subject, settings)
        if alike := [members for other, members in groups if other == named]:
            alike[0].append(subject)
        else:
            groups.append((named, [subject]))
    for named, members in groups:
        task = load_task(named.agent.environment, named)
        with ExitStack() as opened:
            if settings.is_chat:
                stage = Stage(named.agent, named.store.db, task.make, None)
                engine: Engine = opened.enter_context(closing(OpenAIEngine(named, task.tools, bill)))
            else:
                named, policy, engine = open_policy(named, check=partial(check_template, named))
                opened.enter_context(closing(engine))
                stage = build_stage(named, policy)
                for note in stage.notes(named.model, named.agent.max_turns):
                    say(note)
            for subject in members:
                adapter, own = subject.adapter, stage
                if isinstance(engine, PolicyEngine):
                    engine.load_adapter(adapter.path if adapter else None, subject.label)
                if subject.attacked:
                    own = replace(stage, make_environment=under_attack(stage.make_environment))
                run_id = adapter.run_id if adapter else ""
                yield subject, Collector(own.on(engine), scorer.score, own.agent, settings.training.mode, run_id)


def own_settings(subject: Subject, settings: P) -> P:
    """The settings with the subject's base model, and what its checkpoint is always played with."""
    place = subject.adapter.path if subject.adapter else subject.model_name
    return with_own_settings(settings.with_model(subject.model_name), place)[0]


def check_folder(out: Path) -> None:
    """Raise UsageError if a new benchmark in ``out`` would remove anything but an old one, or write through a link."""
    check_own(out, "--out")
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name a folder with --out.")
    if out.exists() and not (out / CONDITIONS).is_file() and any(out.iterdir()):
        raise UsageError(f"{out} contains something other than a benchmark.", "Name another folder with --out.")


def is_unfinished(folder: Path) -> bool:
    if not (folder / CONDITIONS).is_file():
        return False
    check_own(folder / "results.json", "--out")
    try:
        return bool(json.loads((folder / "results.json").read_bytes())["interrupted"])
    except (OSError, ValueError, TypeError, KeyError):  # not written, or not by a benchmark
        return True


def all_conditions(
    subjects: Sequence[Subject], scenarios: Sequence[Scenario], settings: PlayingSettings
) -> dict[str, Any]:
    """The conditions that a resumed benchmark must share with the original."""
    bases = [subject.model_name for subject in subjects]
    each = [played_with(own_settings(subject, settings)) for subject in subjects]
    own = {name: value if all(one[name] == value for one in each) else [one[name] for one in each]
           for name, value in each[0].items()}  # fmt: skip
    return (
        {
            "models": ", ".join(subject.label for subject in subjects),
            "adapters": [subject.adapter and sha256_of(subject.adapter.path / WEIGHTS) for subject in subjects],
            "samples": settings.benchmark.bench_samples,
            "sequential": settings.benchmark.bench_sequential,
        }
        | playing_conditions(settings, scenarios, temperature=settings.agent.eval_temperature, models=bases)
        | own
    )
