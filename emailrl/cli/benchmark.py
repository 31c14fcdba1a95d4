"""``emailrl benchmark``: policies on the test split, side by side, with intervals and paired significance."""

from __future__ import annotations

import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emailrl.cli.options import AllowSharedInbox, Db, Json, Limit, Questions
from emailrl.cli.output import print_json, progress_console
from emailrl.environment.rubric import Rubric

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

    from emailrl.benchmark import Report, Subject
    from emailrl.settings import Settings

INTERRUPTED = 130


def benchmark(
    checkpoint: Annotated[
        list[str] | None, typer.Option("--checkpoint", help="best, latest or a checkpoint's folder; may be repeated.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A bare model (nano, folder, hub name); may be repeated.")
    ] = None,
    limit: Limit = None,
    sequential: Annotated[
        bool | None, typer.Option("--sequential", help="One question at a time: latencies without a crowd.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for results.json, CSVs and trajectories.")] = None,
    questions: Questions = None,
    db: Db = None,
    allow_shared_inbox: AllowSharedInbox = None,
    json: Json = False,
) -> None:
    """Measure policies on the test questions: accuracy with a 95 % interval, rewards, turns, latency, tokens.

    Without --checkpoint or --model: the newest run's best checkpoint, else the model itself. Several are compared on
    the same questions by the exact McNemar test. Ctrl-C keeps the questions finished so far.

    Examples:

    \b
      emailrl benchmark --sequential
      emailrl benchmark --checkpoint best --model nano
      emailrl benchmark --checkpoint outputs/grpo_masked/checkpoint-20 --limit 50 --json
    """
    from rich.console import Console

    from emailrl.benchmark import choose_subjects, run_benchmark
    from emailrl.scenarios.coverage import coverage_notes
    from emailrl.scenarios.load import load_scenario_set
    from emailrl.settings import load_settings

    settings = load_settings(
        {
            "db": db,
            "test_set_size": limit,
            "bench_sequential": sequential,
            "allow_shared_inbox": allow_shared_inbox,
        }
    )
    subjects = choose_subjects(checkpoint or [], model or [], settings)
    chosen = load_scenario_set(
        questions, "test", limit=settings.data.test_set_size, seed=settings.training.seed, data=settings.data
    )
    notes = [*chosen.notes, *coverage_notes(chosen.scenarios, settings.store.db)]
    folder = out or _fresh_folder(settings)
    with _progress() as progress:
        task = _Task(progress, len(chosen.scenarios))
        report = run_benchmark(subjects, chosen.scenarios, settings, folder, notes=notes, progress=task.advance)
    console = progress_console() if json else Console(highlight=False)
    console.print(results_table(report))
    console.print(f"results: {folder}", markup=False, soft_wrap=True)
    if json:
        records = report.records()
        print_json(records[0] if len(subjects) == 1 and records else records)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _fresh_folder(settings: Settings) -> Path:
    root = settings.output.output_dir.parent / "benchmarks"
    name = time.strftime("%Y%m%d-%H%M%S")
    number, folder = 2, root / name
    while folder.exists():
        number, folder = number + 1, root / f"{name}-{number}"
    return folder


class _Task:
    """One progress bar a subject, begun with its first trajectory."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total = progress, total
        self.tasks: dict[str, TaskID] = {}

    def advance(self, subject: Subject, _trajectory: object) -> None:
        if subject.label not in self.tasks:
            self.tasks[subject.label] = self.progress.add_task(subject.label, total=self.total)
        self.progress.advance(self.tasks[subject.label])


def _progress() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = progress_console()
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def results_table(report: Report) -> RenderableType:
    """Lay the results out side by side, one column a model, with the comparisons and notes below."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    temperature = report.conditions["temperature"]
    decoding = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    title = f"Test split, {decoding}, at most {report.conditions['max_turns']} turns"
    if report.conditions["sequential"]:
        title += ", one question at a time"
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    columns = [_cells(record) for record in report.records()]
    for result in report.results:
        table.add_column(Text(result.subject.label), justify="right", overflow="fold")
    for name in dict.fromkeys(name for cells in columns for name in cells):
        table.add_row(Text(name), *(Text(cells.get(name, "")) for cells in columns))
    lines = [
        f"{each.first} against {each.second}: {each.only_first} right only with the first, {each.only_second} only "
        f"with the second, of {each.num_questions} questions; p = {each.p_value:.3g} (exact McNemar)"
        for each in report.comparisons
    ]
    lines += [f"note: {note}" for note in report.notes]
    if report.interrupted:
        lines.append("interrupted: only the questions finished by then are counted")
    return Group(Text(title, style="bold"), table, *map(Text, lines))


def _cells(record: dict[str, Any]) -> dict[str, str]:
    """A result's numbers as text, in the table's order; rubric fields keep their names."""
    low, high = record["accuracy_low"], record["accuracy_high"]
    cells = {"accuracy": f"{record['accuracy']:.1%}", "95 % interval": f"{low:.1%} to {high:.1%}"}
    rubric = [field.name for field in fields(Rubric) if field.name != "answer_correct"]
    priced = ["cost"] if record["cost"] is not None else []
    for name in ("num_questions", "exceptions", "reward", "latency_seconds", "tokens", *priced, *rubric):
        value = record[name]
        cells[name] = "none" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)
    return cells
