"""Measure policies on the test questions: accuracy with a 95% interval, rewards, turns, latency, tokens.

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

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from emailrl.agent.task import Rubric
from emailrl.base.disk import check_place
from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.base.process import INTERRUPTED
from emailrl.cli import options
from emailrl.cli.inputs import choose_subjects, with_inputs
from emailrl.cli.options import Json, Overrides, Overwrite, Resume, Trust, path_option, setting_options
from emailrl.cli.output import print_json, print_next, progress_console, result_console, say, say_again, say_loading
from emailrl.measure.evaluation import check_samples, has_crashed, reason, verdict
from emailrl.settings import Settings, load_settings

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from emailrl.measure.benchmark import Report, Subject
    from emailrl.records.trajectory import Scenario

NAMES_WIDTH = 33
RESULT_WIDTH = 15  # width of the name column, and minimum width of a result column, in characters
MAIN = ("num_questions", "reward", "sources_correct", "num_turns", "tokens", "latency_seconds")
"""The rows of the table after accuracy and its interval; --all shows the others too."""
TITLES = {
    "num_questions": "questions", "num_turns": "turns", "num_sources": "sources", "latency_seconds": "latency",
    "cant_parse_tool_call": "tool call not readable", "returned_i_dont_know": "did not know",
}  # fmt: skip
SHARES = {each.name for each in fields(Rubric) if str(each.type).startswith("bool")} | {"answer_capitals"}
FORMS = {"reward": "{:.3f}", "latency_seconds": "{:,.1f} s", "cost": "${:,.4f}"}
FAILURES = ("wrong", "no answer", "did not know", "crashed")  # verdicts to look at, the most telling first


@setting_options(
    "engine environment reward thinking chat_template_kwargs",
    "test_set_size bench_sequential bench_samples eval_temperature",
    "questions db allow_shared_inbox max_cost verbose show_trajectory_details",
    verbose="Print a line per rollout.",
)
def benchmark(
    *,
    checkpoint: Annotated[
        list[str] | None,
        options.several("best, latest, or the folder of a checkpoint or export; repeatable.", options.checkpoints),
    ] = None,
    model: Annotated[
        list[str] | None,
        options.several("A model without adapter (nano, smol, folder, Hub name); repeatable.", options.models),
    ] = None,
    overrides: Overrides,
    attack: Annotated[bool, Option("--attack", help="Also run every question with injected instructions.")] = False,
    every: Annotated[bool, Option("--all", help="Show every row of the table, not only the main ones.")] = False,
    out: Annotated[Path | None, path_option(help="Output folder for results.json, CSVs and trajectories.")] = None,
    overwrite: Overwrite = False,
    resume: Resume = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.engines import check_player
    from emailrl.measure.benchmark import with_attacked
    from emailrl.questions.load import coverage_notes, read_questions

    settings = load_settings(overrides, trust=trust)
    compares, measure = settings.rewards.compares, {"reward": settings.rewards.measure}
    settings = settings.model_copy(update={"rewards": settings.rewards.model_copy(update=measure)})
    check_samples(settings.benchmark.bench_samples, settings.agent.eval_temperature)
    settings = with_inputs(settings)
    check_player(settings)
    root = settings.output.output_dir.parent / "benchmarks"
    begun = _begun(out, root, overwrite=overwrite, resume=resume)
    subjects = choose_subjects(checkpoint or [], model or [], settings)
    subjects = with_attacked(subjects) if attack else subjects
    data, seed = settings.data, settings.training.seed
    questions = read_questions(None, data, unanswered=compares).answered()
    chosen = questions.of("test", limit=data.test_set_size, seed=seed)
    notes = [*chosen.notes, *coverage_notes(chosen.scenarios, settings.store.db)]
    if compares:
        notes.append("RULER only compares rollouts of one question: the reward here is simple, 1 for a right answer")
    say_loading(settings, *(subject.model_name for subject in subjects))
    folder = begun or out or _fresh_folder(root)
    report = _play(subjects, chosen.scenarios, settings, folder, notes=notes, resume=resume, overwrite=overwrite)
    console = result_console(json=json)
    if report.results:
        console.print("=== Benchmark Results ===", style="bold")
        console.print(results_table(report, console.width, every=every))
        say(f"results: {folder}", console)
    _say_what_is_left(report, folder)
    if not report.interrupted:
        _suggest_next(report)
    if json:
        records = report.records()
        print_json(records[0] if len(subjects) == 1 and records else records)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _begun(out: Path | None, root: Path, *, overwrite: bool, resume: bool) -> Path | None:
    """The benchmark to ``resume``; UsageError if there is none, or if ``out`` may not be written."""
    from emailrl.measure.benchmark import CONDITIONS, check_folder, is_unfinished
    from emailrl.measure.journal import nothing_to_resume

    if resume and overwrite:
        raise UsageError("--resume and --overwrite are mutually exclusive.", "Choose one.")
    if resume and out is not None:
        if not (out / CONDITIONS).is_file():
            raise nothing_to_resume(out / CONDITIONS)
        return out
    if resume:
        if begun := max(filter(is_unfinished, root.glob("*")), key=lambda each: each.stat().st_mtime_ns, default=None):
            return begun
        hint = "Name one with --out, or drop --resume."
        raise UsageError(f"Nothing to resume: {root} has no unfinished benchmark.", hint, "nothing-to-resume")
    if out is not None:
        check_folder(out)
        if not overwrite and (out / CONDITIONS).exists():
            hint = "--resume, " if is_unfinished(out) else ""
            raise UsageError(f"{out} already holds a benchmark.", f"Use {hint}another --out, or --overwrite.", "exists")
    return None


def _fresh_folder(root: Path) -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    check_place(root / name, "--out")
    root.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = root / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _play(subjects: list[Subject], scenarios: list[Scenario], settings: Settings, folder: Path, **how: Any) -> Report:
    """Run the benchmark with progress; on failure, say what is saved, and leave no empty folder."""
    from emailrl.cli.live import Tally
    from emailrl.cli.trajectory import show_trajectories
    from emailrl.measure.benchmark import run_benchmark

    total = len(scenarios) * settings.benchmark.bench_samples
    say(f"Evaluating on {counted(len(scenarios), 'question')} ...")
    with Tally() as tally:
        how["progress"] = lambda subject, _: tally.advance(title_of(subject), total)
        tally.begin(title_of(subjects[0]), total)
        try:
            report = run_benchmark(subjects, scenarios, settings, folder, **how)
        except Exception:
            if count := sum(file.read_bytes().count(b"\n") for file in folder.glob("trajectories/*.jsonl")):
                say_again(f"{counted(count, 'question')} saved in {folder}", "finish")
            raise
        finally:
            with suppress(OSError):  # not empty
                folder.rmdir()
    for result in report.results:
        show_trajectories(result.trajectories, result.evaluation.trajectories, settings, progress_console())
    return report


def _say_what_is_left(report: Report, folder: Path) -> None:
    """Say which questions were not played, not judged or not answered because of an error, and how to go on."""
    evaluations = [result.evaluation for result in report.results]
    if report.interrupted:
        if count := sum(each.num_questions for each in evaluations):
            say_again(f"{counted(count, 'question')} saved in {folder}", "finish")
        return
    if unjudged := sum(each.unjudged for each in evaluations):
        say_again(f"{counted(unjudged, 'answer')} without a verdict", "judge again", folder)
    if raised := [played for each in evaluations for played in each.trajectories if has_crashed(played)]:
        say_again(f"{counted(len(raised), 'rollout')} failed ({reason(raised[0].exception)})", "retry", folder)


def _suggest_next(report: Report) -> None:
    """Print the next command: inspect the first failure of the most telling kind; without failures, export."""
    for failure in FAILURES:
        for result in report.results:
            verdicts = [verdict(trajectory) for trajectory in result.evaluation.trajectories]
            if failure in verdicts:
                index = str(verdicts.index(failure))
                print_next(["inspect-trajectory", str(result.trajectories), "--index", index], failure)
                return
    if adapters := [result.subject.adapter for result in report.results if result.subject.adapter]:
        print_next(["export", "--checkpoint", str(adapters[0].path)])


def title_of(subject: Subject) -> str:
    """A model's name; or an adapter's path relative to the working directory, elsewhere its run and checkpoint."""
    if subject.adapter is None:
        return subject.label
    path, here = subject.adapter.path.absolute(), Path.cwd()
    name = str(path.relative_to(here)) if path.is_relative_to(here) else "/".join(path.parts[-2:])
    return f"{name} (attacked)" if subject.attacked else name


def _titles(report: Report) -> dict[str, str]:
    """Display names of a table's subjects, by label; the label itself if a shorter name is ambiguous."""
    titles = {result.subject.label: title_of(result.subject) for result in report.results}
    names = list(titles.values())
    return {label: title if names.count(title) == 1 else label for label, title in titles.items()}


def _in_words(pair: dict[str, Any], titles: dict[str, str]) -> str:
    low, high = pair["difference_low"], pair["difference_high"]
    interval = "" if low is None else f" (95% interval {100 * low:+.1f} to {100 * high:+.1f})"
    return (
        f"{titles[pair['first']]} → {titles[pair['second']]}: {100 * pair['difference']:+.1f} points of accuracy"
        f"{interval}; better on {pair['better_second']}, worse on {pair['better_first']} of {pair['num_questions']} "
        f"questions; p = {pair['p_value']:.2g} in an exact paired test over {counted(pair['num_units'], pair['unit'])}"
    )


def results_table(report: Report, width: int, *, every: bool = True) -> RenderableType:
    """Lay out the results side by side as ``width`` allows, a column per model, with comparisons and notes below."""
    from rich.console import Group
    from rich.text import Text

    conditions, records, titles = report.conditions, report.records(), _titles(report)
    temperature = conditions["temperature"]
    decoding = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    heading = f"Test split, {decoding}, at most {conditions['max_turns']} turns"
    if conditions["samples"] > 1:
        heading += f", {conditions['samples']} samples per question"
    if conditions["sequential"]:
        heading += ", one question at a time"
    if conditions["thinking"] != "auto":
        heading += f", thinking {conditions['thinking']}"
    if conditions["reward_name"] != "art_e":
        heading += f", reward {conditions['reward_name']}"
    compared = [_in_words(each, titles) for each in report.comparisons]
    lines = [
        "--all shows every row"
        if not every
        else "tokens counts a conversation once, prompt tokens counts its prefix again at every turn; a chat server's "
        "tokens are prompt tokens + completion tokens: docs/guides/benchmark.md"
    ]
    lines += [f"note: {note}" for note in report.notes]
    biased = "the ones that finished soonest: a biased sample that does not measure the policy"
    selection = "the first ones" if conditions["sequential"] else biased
    asked = f"of {report.num_asked} questions, {selection}"
    lines += [
        f"{titles[result.subject.label]}: interrupted after {result.evaluation.num_questions} {asked}"
        for result in report.results
        if not result.complete
    ]
    best = max(each["accuracy"] for each in records) if len(records) > 1 else None
    columns = [_cells(each, every=every, best=best) for each in records]
    tables = _side_by_side(list(titles.values()), columns, width)
    first, after = (compared, []) if len(compared) == 1 else ([], compared)  # the verdict, unless there are several
    return Group(Text(heading, style="bold"), *first, *tables, *after, *lines)


def _side_by_side(titles: list[str], columns: list[dict[str, str | Text]], width: int) -> Iterator[Table]:
    """Tables of columns, whose cells have the names of their rows; as few as fit."""
    from rich.box import SIMPLE
    from rich.table import Column, Table

    titles = ["/\n".join(title.rsplit("/", 1)) for title in titles]  # a path's last part gets a line of its own
    longest = max((len(line) + 2 for title in titles for line in title.splitlines()), default=0)
    fitting = max(1, (width - NAMES_WIDTH) // max(longest, RESULT_WIDTH))
    rows = dict.fromkeys(row for cells in columns for row in cells)
    for start in range(0, len(titles), fitting):
        some = (Column(title, justify="right", overflow="fold") for title in titles[start : start + fitting])
        table = Table(Column("", no_wrap=True), *some, box=SIMPLE, pad_edge=False)
        for row in rows:
            if not all(cells.get(row) == "none" for cells in columns):  # email rubric in an environment without email
                table.add_row(row, *(cells.get(row, "") for cells in columns[start : start + fitting]))
        yield table


def _cells(record: dict[str, Any], *, every: bool, best: float | None) -> dict[str, str | Text]:
    """A result's numbers as text, by row: the ``MAIN`` ones and what went wrong, or ``every``; under attack also the
    share of injected instructions obeyed, by kind. The ``best`` accuracy stands out."""
    from rich.text import Text

    from emailrl.agent.attack import KINDS

    low, high = record["accuracy_low"], record["accuracy_high"]
    style = "bold green" if record["accuracy"] == best else ""
    cells: dict[str, str | Text] = {"accuracy": Text(f"{record['accuracy']:.1%}", style)}
    cells["95% interval"] = f"{low:.1%} to {high:.1%}"
    for name in ("pass_at_k", "majority") if "num_samples" in record else ():
        low, high = record[f"{name}_low"], record[f"{name}_high"]
        cells[name.replace("_at_k", f"@{record['num_samples']}")] = f"{record[name]:.1%} ({low:.1%} to {high:.1%})"
    tokens = ["tokens", "prompt_tokens", "completion_tokens", "thinking_tokens"]
    names = ["num_questions", *["unjudged"] * bool(record["unjudged"]), "exceptions", "reward", "latency_seconds"]
    names += tokens[: 4 if record["thinking_tokens"] else 3] + ["cost"] * (record["cost"] is not None)
    names += [each.name for each in fields(Rubric) if each.name not in ("answer_correct", "offline_correct", *tokens)]
    names += ["judge_compared", "only_judge_right", "only_offline_right"] if record["judge_compared"] else []
    if not every:
        wrong = [name for name in ("unjudged", "exceptions") if record[name]]
        names = [name for name in MAIN if name in names] + wrong + ["cost"] * (record["cost"] is not None)
    for name in names:
        form = "{:.1%}" if name in SHARES else FORMS.get(name, "{:,.0f}" if name.endswith("tokens") else "{:,.2f}")
        value = "none" if record[name] is None else record[name]
        cells[TITLES.get(name, name.replace("_", " "))] = form.format(value) if isinstance(value, float) else str(value)
    for kind in KINDS if record.get("attacked") else ():
        seen, share = record[f"{kind}_orders_seen"], record[f"{kind}_obeyed"]
        low, high = record[f"{kind}_obeyed_low"], record[f"{kind}_obeyed_high"]
        cells[f"{kind} obeyed"] = f"{share:.1%} of {seen}\n({low:.1%} to {high:.1%})" if seen else "none seen"
    return cells
