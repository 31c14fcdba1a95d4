"""``emailrl benchmark``: policies on the test split, side by side, with intervals and paired significance."""

from __future__ import annotations

import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from emailrl.cli.options import (
    AllowSharedInbox,
    Db,
    Engine,
    Environment,
    Json,
    Limit,
    Overwrite,
    Questions,
    Reward,
    Trust,
    path_option,
)
from emailrl.cli.output import print_json, progress_console, result_console, say_loading
from emailrl.cli.progress import Tally
from emailrl.environment.rubric import Rubric

if TYPE_CHECKING:
    from rich.console import RenderableType

    from emailrl.benchmark import Report, Subject
    from emailrl.settings import Settings

INTERRUPTED = 130


def benchmark(
    checkpoint: Annotated[
        list[str] | None,
        typer.Option("--checkpoint", help="best, latest, a checkpoint's or an exported adapter's folder; repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="A bare model (nano, folder, hub name); may be repeated.")
    ] = None,
    engine: Engine = None,
    environment: Environment = None,
    reward: Reward = None,
    limit: Limit = None,
    sequential: Annotated[
        bool | None, typer.Option("--sequential", help="One question at a time: latencies without a crowd.")
    ] = None,
    out: Annotated[Path | None, path_option("--out", help="Folder for results.json, CSVs and trajectories.")] = None,
    questions: Questions = None,
    db: Db = None,
    allow_shared_inbox: AllowSharedInbox = None,
    overwrite: Overwrite = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Measure policies on the test questions: accuracy with a 95 % interval, rewards, turns, latency, tokens.

    Without --checkpoint or --model: the newest run's best checkpoint, else the model itself. Several are compared on
    the same questions by the exact McNemar test. Ctrl-C keeps the questions finished so far. --engine openai measures
    a model of the chat server at OPENAI_BASE_URL (OpenRouter's by default), and what its answers cost.

    All but accuracy, num_questions, exceptions and cost are means over the questions. tokens counts each token of a
    conversation once; prompt_tokens what the engine was given, the conversation so far anew at every turn;
    completion_tokens what the policy wrote. docs/benchmark.md explains every row.

    Examples:

    \b
      emailrl benchmark --sequential
      emailrl benchmark --checkpoint best --model nano
      emailrl benchmark --reward my_rewards.py:right_and_brief
      emailrl benchmark --engine openai --model google/gemini-2.0-flash-001 --model openai/gpt-4.1
      emailrl benchmark --checkpoint outputs/grpo_masked/checkpoint-20 --limit 50 --json
    """

    from emailrl.benchmark import choose_subjects, run_benchmark
    from emailrl.engines import is_chat
    from emailrl.policy.adapter import untrained_note
    from emailrl.scenarios.coverage import coverage_notes
    from emailrl.scenarios.load import load_scenario_set
    from emailrl.settings import load_settings

    settings = load_settings(
        {
            "engine": engine,
            "environment": environment,
            "reward": reward,
            "db": db,
            "test_set_size": limit,
            "bench_sequential": sequential,
            "allow_shared_inbox": allow_shared_inbox,
        },
        trust=trust,
    )
    folder = _folder(out, settings, overwrite=overwrite)
    subjects = choose_subjects(checkpoint or [], model or [], settings)
    unnamed = not checkpoint and not model and not is_chat(settings)
    if unnamed and (note := untrained_note(settings.output.output_dir)):
        progress_console().print(note, style="yellow", markup=False, soft_wrap=True)
    chosen = load_scenario_set(
        questions, "test", limit=settings.data.test_set_size, seed=settings.training.seed, data=settings.data
    )
    notes = [*chosen.notes, *coverage_notes(chosen.scenarios, settings.store.db)]
    if not is_chat(settings):
        say_loading()
    with Tally() as tally:

        def ended(subject: Subject, _trajectory: object) -> None:
            tally.advance(_title(subject), len(chosen.scenarios))

        tally.begin(_title(subjects[0]), len(chosen.scenarios))
        report = run_benchmark(subjects, chosen.scenarios, settings, folder, notes=notes, progress=ended)
    console = progress_console() if json else result_console()
    console.print(results_table(report))
    console.print(f"results: {folder}", markup=False, soft_wrap=True)
    if json:
        records = report.records()
        print_json(records[0] if len(subjects) == 1 and records else records)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _folder(out: Path | None, settings: Settings, *, overwrite: bool) -> Path:
    """Where the results go: a fresh folder, or ``out``, which may hold an earlier benchmark only to be replaced."""
    from emailrl.errors import UsageError

    if out is None:
        return _fresh_folder(settings)
    if (out / "results.json").exists():
        if not overwrite:
            raise UsageError(f"{out} holds a benchmark already.", "Give another --out, or --overwrite.")
        shutil.rmtree(out / "trajectories", ignore_errors=True)
    return out


def _fresh_folder(settings: Settings) -> Path:
    root = settings.output.output_dir.parent / "benchmarks"
    name = time.strftime("%Y%m%d-%H%M%S")
    number, folder = 2, root / name
    while folder.exists():
        number, folder = number + 1, root / f"{name}-{number}"
    return folder


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
    if report.conditions["reward_name"] != "art_e":
        title += f", reward {report.conditions['reward_name']}"
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    columns = [_cells(record) for record in report.records()]
    titles = _titles(report)
    for name in titles.values():
        # Folded where a path has its joints: its last name, which tells most, keeps a line of its own.
        table.add_column(Text("/\n".join(name.rsplit("/", 1))), justify="right", overflow="fold")
    for row in dict.fromkeys(row for cells in columns for row in cells):
        table.add_row(Text(row), *(Text(cells.get(row, "")) for cells in columns))
    lines = [
        f"{titles[each.first]} against {titles[each.second]}: {each.only_first} right only with the first, "
        f"{each.only_second} only with the second, of {each.num_questions} questions; "
        f"p = {each.p_value:.3g} (exact McNemar)"
        for each in report.comparisons
    ]
    lines.append(
        "tokens counts a conversation once, prompt_tokens its beginning anew at every turn; a chat server's tokens are "
        "prompt_tokens + completion_tokens: docs/benchmark.md"
    )
    lines += [f"note: {note}" for note in report.notes]
    if report.interrupted:
        lines.append("interrupted: only the questions finished by then are counted")
    return Group(Text(title, style="bold"), table, *map(Text, lines))


def _titles(report: Report) -> dict[str, str]:
    """What to call each subject of a table, by its label; the label itself where a shorter name would mean two."""
    titles = {result.subject.label: _title(result.subject) for result in report.results}
    names = list(titles.values())
    return {label: title if names.count(title) == 1 else label for label, title in titles.items()}


def _title(subject: Subject) -> str:
    """A model's name; an adapter's path from the working directory, or of one elsewhere the run and its checkpoint."""
    if subject.adapter is None:
        return subject.label
    path = subject.adapter.path.absolute()
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else "/".join(path.parts[-2:])


def _cells(record: dict[str, Any]) -> dict[str, str]:
    """A result's numbers as text, in the table's order; rubric fields keep their names."""
    low, high = record["accuracy_low"], record["accuracy_high"]
    cells = {"accuracy": f"{record['accuracy']:.1%}", "95 % interval": f"{low:.1%} to {high:.1%}"}
    tokens = ("tokens", "prompt_tokens", "completion_tokens")
    elsewhere = ("answer_correct", "offline_correct", *tokens)
    rubric = [field.name for field in fields(Rubric) if field.name not in elsewhere]
    compared = ["judge_compared", "only_judge_right", "only_offline_right"] if record["judge_compared"] else []
    priced = ["cost"] if record["cost"] is not None else []
    unjudged = ["unjudged"] if record["unjudged"] else []
    counts = ["num_questions", *unjudged, "exceptions"]
    for name in (*counts, "reward", "latency_seconds", *tokens, *priced, *rubric, *compared):
        value = record[name]
        cells[name] = "none" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)
    return cells
