"""Measure policies on the test questions: accuracy with a 95 % interval, rewards, turns, latency, tokens.

Without --checkpoint or --model, the newest best checkpoint is measured, else the model itself. Several
policies are compared on the same questions with an exact paired test. Each question is saved as soon as it ends.
After Ctrl-C or a crash, --resume with the same options runs the rest of the benchmark in --out, or of the newest
unfinished one. --engine openai measures a model on the chat server at OPENAI_BASE_URL (OpenRouter by default) and the
cost of its answers.

docs/guides/benchmark.md explains every row of the table.

--attack measures each policy twice: on the original emails, and on emails with injected instructions (answer this,
cite that, read that), and reports how many were obeyed.

Examples:

\b
  emailrl benchmark --sequential
  emailrl benchmark --checkpoint best --model nano
  emailrl benchmark --reward my_rewards.py:right_and_brief
  emailrl benchmark --engine openai --model openai/gpt-4.1
  emailrl benchmark --checkpoint latest --limit 50 --json
  emailrl benchmark --sequential --resume
  emailrl benchmark --checkpoint best --attack
  emailrl benchmark --samples 8 --temperature 0.7
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.base.plain import counted
from emailrl.cli.inputs import note_adapters, note_runs_without_best, with_inputs
from emailrl.cli.live import Tally
from emailrl.cli.options import (
    Json,
    Overrides,
    Overwrite,
    Resume,
    Trust,
    checkpoints,
    models,
    path_option,
    setting_options,
)
from emailrl.cli.output import print_json, print_next, progress_console, result_console, say, say_loading
from emailrl.cli.tables import result_lines, results_table, title_of

if TYPE_CHECKING:
    from emailrl.measure.benchmark import Report, Subject
    from emailrl.records.trajectory import Scenario, Trajectory
    from emailrl.settings import Settings

INTERRUPTED = 130
FAILURES = {
    "wrong": "a wrong answer",
    "no answer": "no answer",
    "did not know": "the model did not know",
    "crashed": "a failed rollout",
}
"""Verdicts to look at, the most telling first, and how the suggested command describes them."""


@setting_options(
    "engine environment reward test_set_size bench_sequential bench_samples eval_temperature",
    "questions db allow_shared_inbox verbose show_trajectory_details",
    verbose="Print a line per rollout.",
)
def benchmark(
    *,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="<str>",
            help="best, latest, or the folder of a checkpoint or exported adapter; repeatable.",
            autocompletion=checkpoints,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="<str>",
            help="A model without adapter (nano, smol, folder, Hub name); repeatable.",
            autocompletion=models,
        ),
    ] = None,
    overrides: Overrides,
    attack: Annotated[
        bool, typer.Option("--attack", help="Also run every question on emails with injected instructions.")
    ] = False,
    out: Annotated[
        Path | None, path_option("--out", help="Output folder for results.json, CSVs and trajectories.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.measure.benchmark import to_resume
    from emailrl.settings import load_settings

    settings = _checked(load_settings(overrides, trust=trust))
    root = settings.output.output_dir.parent / "benchmarks"
    begun = _begun(out, root, overwrite=overwrite, resume=resume)
    subjects = _subjects(checkpoint or [], model or [], settings, attack=attack)
    scenarios, notes = _questions(settings)
    if not settings.is_chat:
        say_loading(settings, *(subject.model_name for subject in subjects))
    folder = to_resume(begun, subjects, scenarios, settings) if begun else out or _fresh_folder(root)
    report = _play(subjects, scenarios, settings, folder, notes=notes, resume=resume, overwrite=overwrite)
    _show(report, folder, json=json)
    if json:
        records = report.records()
        print_json(records[0] if len(subjects) == 1 and records else records)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _subjects(checkpoints: list[str], models: list[str], settings: Settings, *, attack: bool) -> list[Subject]:
    """The policies to measure; prints notes on them and on newer runs that are skipped."""
    from emailrl.measure.benchmark import choose_subjects, with_attacked

    subjects = choose_subjects(checkpoints, models, settings, settings.output.output_dir)
    if "best" in checkpoints or not (checkpoints or models or settings.is_chat):
        note_runs_without_best(settings.output.output_dir)
    note_adapters((subject.adapter.path for subject in subjects if subject.adapter), settings)
    return with_attacked(subjects) if attack else subjects


def _questions(settings: Settings) -> tuple[list[Scenario], list[str]]:
    """The test questions, with notes about them."""
    from emailrl.questions.load import coverage_notes, load_scenario_set

    chosen = load_scenario_set(
        None, "test", limit=settings.data.test_set_size, seed=settings.training.seed, data=settings.data
    )
    return chosen.scenarios, [*chosen.notes, *coverage_notes(chosen.scenarios, settings.store.db)]


def _play(
    subjects: list[Subject],
    scenarios: list[Scenario],
    settings: Settings,
    folder: Path,
    *,
    notes: list[str],
    resume: bool,
    overwrite: bool,
) -> Report:
    """Run the benchmark with progress; on failure, say what is saved, and leave no empty folder."""
    from emailrl.cli.trajectory import show_trajectories
    from emailrl.measure.benchmark import run_benchmark

    num_ended, total = 0, len(scenarios) * settings.benchmark.bench_samples
    say(f"Evaluating on {counted(len(scenarios), 'question')} ...")
    with Tally() as tally:

        def ended(subject: Subject, trajectory: Trajectory) -> None:
            nonlocal num_ended
            num_ended += trajectory.exception is None
            tally.advance(title_of(subject), total)

        tally.begin(title_of(subjects[0]), total)
        try:
            report = run_benchmark(
                subjects, scenarios, settings, folder, notes=notes, progress=ended, resume=resume, overwrite=overwrite
            )
        except Exception:
            if num_ended:
                progress_console().print(_kept(num_ended, folder), soft_wrap=True)
            raise
        finally:
            with suppress(OSError):  # not empty
                folder.rmdir()
    for result in report.results:
        show_trajectories(
            result.trajectories,
            result.evaluation.trajectories,
            settings.output,
            settings.model.name,
            progress_console(),
        )
    return report


def _show(report: Report, folder: Path, *, json: bool) -> None:
    """Print the results on stdout (with ``json`` on stderr), notes and the next command on stderr."""
    console = result_console(json=json)
    if report.results:
        console.print("=== Benchmark Results ===", style="bold")
        for line in result_lines(report):
            say(line, console)
        console.print(results_table(report))
        console.print(f"results: {folder}", soft_wrap=True)
    for note in _what_is_left(report, folder):
        progress_console().print(note, soft_wrap=True)
    if not report.interrupted:
        _suggest_next(report)


def _checked(settings: Settings) -> Settings:
    """The settings with their inputs chosen; raises for settings and inputs that cannot be measured."""
    from emailrl.engines import check_player
    from emailrl.measure.evaluation import check_samples

    check_samples(settings.benchmark.bench_samples, settings.agent.eval_temperature)
    settings = with_inputs(settings)
    check_player(settings)
    return settings


def _begun(out: Path | None, root: Path, *, overwrite: bool, resume: bool) -> list[Path]:
    """Benchmarks that ``resume`` may resume, oldest first; UsageError if none, or if ``out`` may not be written."""
    from emailrl.base.errors import UsageError
    from emailrl.measure.benchmark import CONDITIONS, check_folder, is_unfinished
    from emailrl.measure.journal import nothing_to_resume

    if resume and overwrite:
        raise UsageError("--resume and --overwrite are mutually exclusive.", "Choose one.")
    if resume and out is not None:
        if not (out / CONDITIONS).is_file():
            raise nothing_to_resume(out / CONDITIONS)
        return [out]
    if resume:
        begun = sorted(filter(is_unfinished, root.glob("*")), key=lambda folder: folder.stat().st_mtime_ns)
        if not begun:
            raise UsageError(
                f"Nothing to resume: {root} has no unfinished benchmark.",
                "Name one with --out, or drop --resume.",
                "nothing-to-resume",
            )
        return begun
    if out is not None:
        check_folder(out)
    if out is not None and not overwrite and (out / CONDITIONS).exists():
        hint = "--resume, " if is_unfinished(out) else ""
        raise UsageError(f"{out} already holds a benchmark.", f"Use {hint}another --out, or --overwrite.", "exists")
    return []


def _fresh_folder(root: Path) -> Path:
    """A new folder for this benchmark."""
    from emailrl.base.disk import check_place

    name = time.strftime("%Y%m%d-%H%M%S")
    check_place(root / name, "--out")
    number, folder = 2, root / name
    root.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number, folder = number + 1, root / f"{name}-{number}"
        else:
            return folder


def _kept(count: int, folder: Path) -> str:
    return f"{counted(count, 'question')} saved in {folder}; to finish, {_again(folder)}"


def _again(folder: Path) -> str:
    return f"rerun the same command with --resume --out {shlex.quote(str(folder))}"


def _what_is_left(report: Report, folder: Path) -> Iterator[str]:
    """Notes on questions that were not played, not judged or not answered because of an error, and how to go on."""
    from emailrl.measure.evaluation import has_crashed, reason

    if report.interrupted:
        if count := sum(result.evaluation.num_questions for result in report.results):
            yield _kept(count, folder)
        return
    if unjudged := sum(result.evaluation.unjudged for result in report.results):
        yield f"{counted(unjudged, 'answer')} without a verdict; to judge again, {_again(folder)}"
    if raised := [each for result in report.results for each in result.evaluation.trajectories if has_crashed(each)]:
        cause = reason(raised[0].exception)
        yield f"{counted(len(raised), 'rollout')} failed ({cause}); to retry, {_again(folder)}"


def _suggest_next(report: Report) -> None:
    """Print the next command: inspect the first failure of the most telling kind; without failures, export."""
    from emailrl.measure.evaluation import verdict

    for failure, shown in FAILURES.items():
        for result in report.results:
            verdicts = [verdict(trajectory) for trajectory in result.evaluation.trajectories]
            if failure in verdicts:
                index = str(verdicts.index(failure))
                print_next(["inspect-trajectory", str(result.trajectories), "--index", index], shown)
                return
    if adapters := [result.subject.adapter for result in report.results if result.subject.adapter]:
        print_next(["export", "--checkpoint", str(adapters[0].path)])
