"""Tables that commands print for benchmarks, rollouts, checkpoints, questions and checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from emailrl.agent.mail_env import Rubric

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

    from emailrl.checkpoints import Checkpoint
    from emailrl.measure.benchmark import Report, Subject
    from emailrl.measure.doctor import Check
    from emailrl.measure.evaluation import Evaluation
    from emailrl.model.adapter import Adapter
    from emailrl.records.trajectory import Scenario, Trajectory
    from emailrl.settings import PolicySettings

NAMES_WIDTH: Final = 33
RESULT_WIDTH: Final = 15
"""Width of the name column, and minimum width of a result column, in characters."""


def results_table(report: Report) -> RenderableType:
    """Lay out the results side by side, one column per model, with comparisons and notes below."""
    from rich.console import Group
    from rich.text import Text

    temperature = report.conditions["temperature"]
    decoding = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    title = f"Test split, {decoding}, at most {report.conditions['max_turns']} turns"
    if report.conditions["samples"] > 1:
        title += f", {report.conditions['samples']} samples per question"
    if report.conditions["sequential"]:
        title += ", one question at a time"
    if report.conditions["reward_name"] != "art_e":
        title += f", reward {report.conditions['reward_name']}"
    titles = _titles(report)
    results = SideBySide(list(titles.values()), [_cells(record) for record in report.records()])
    lines = [
        f"{titles[each.first]} against {titles[each.second]}: the first is better on {each.better_first}, "
        f"the second on {each.better_second} of {each.num_questions} questions; "
        f"p = {each.p_value:.3g} (exact paired test by {each.unit})"
        for each in report.comparisons
    ]
    lines.append(
        "tokens counts a conversation once, prompt_tokens counts its prefix again at every turn; a chat server's "
        "tokens are prompt_tokens + completion_tokens: docs/guides/benchmark.md"
    )
    lines += [
        f"{titles[record['model']]} saw no injected instruction: no search or read returned an email"
        for record in report.records()
        if record.get("attacked") and not any(record[f"{kind}_orders_seen"] for kind in _kinds_of_orders(record))
    ]
    lines += [f"note: {note}" for note in report.notes]
    for result in report.results:
        if not result.complete:
            lines.append(f"{titles[result.subject.label]}: {_part_of(report, result.evaluation.num_questions)}")
    return Group(Text(title, style="bold"), results, *map(Text, lines))


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Results in columns, split into several tables if the terminal is too narrow."""

    titles: list[str]
    columns: list[dict[str, str]]
    """Per title, the cells by row name."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        longest = max((len(line) + 2 for title in self.titles for line in _wrapped(title).splitlines()), default=0)
        fitting = max(1, (options.max_width - NAMES_WIDTH) // max(longest, RESULT_WIDTH))
        for start in range(0, len(self.titles), fitting):
            yield self._table(slice(start, start + fitting))

    def _table(self, part: slice) -> Table:
        from rich.box import SIMPLE
        from rich.table import Table
        from rich.text import Text

        table = Table(box=SIMPLE, pad_edge=False)
        table.add_column("", no_wrap=True)
        for title in self.titles[part]:
            table.add_column(Text(_wrapped(title)), justify="right", overflow="fold")
        for row in dict.fromkeys(row for cells in self.columns for row in cells):
            if all(cells.get(row) == "none" for cells in self.columns):  # email rubric in an environment without email
                continue
            table.add_row(Text(row), *(Text(cells.get(row, "")) for cells in self.columns[part]))
        return table


def _wrapped(title: str) -> str:
    """A title in two lines if it is a path, so that the last name, the most telling part, gets its own."""
    return "/\n".join(title.rsplit("/", 1))


def result_lines(report: Report) -> list[str]:
    """One line per model: accuracy, average reward and share of correct sources."""
    lines = []
    titles = _titles(report)
    for result in report.results:
        evaluation = result.evaluation
        low, high = evaluation.interval
        facts = [f"accuracy {evaluation.accuracy:.1%} (95% interval {low:.1%} to {high:.1%})"]
        facts.append(f"average reward {_number(evaluation.reward)}")
        if (sources := evaluation.rubric.get("sources_correct")) is not None:
            facts.append(f"correct sources {sources:.1%}")
        lines.append(f"{titles[result.subject.label]}: {', '.join(facts)}")
    return lines


def _part_of(report: Report, count: int) -> str:
    """The note for a result that covers only the finished questions."""
    part = f"interrupted after {count} of {report.num_asked} questions"
    if report.conditions["sequential"]:
        return f"{part}, the first ones"
    return f"{part}, the ones that finished soonest: a biased sample that does not measure the policy"


def _titles(report: Report) -> dict[str, str]:
    """Display names of a table's subjects, by label; the label itself if a shorter name is ambiguous."""
    titles = {result.subject.label: title_of(result.subject) for result in report.results}
    names = list(titles.values())
    return {label: title if names.count(title) == 1 else label for label, title in titles.items()}


def title_of(subject: Subject) -> str:
    """A model's name; or an adapter's path relative to the working directory, elsewhere its run and checkpoint."""
    if subject.adapter is None:
        return subject.label
    path = subject.adapter.path.absolute()
    here = Path.cwd()
    name = str(path.relative_to(here)) if path.is_relative_to(here) else "/".join(path.parts[-2:])
    return f"{name} (attacked)" if subject.attacked else name


def _cells(record: dict[str, Any]) -> dict[str, str]:
    """A result's numbers as text, in the table's order; rubric fields keep their names."""
    low, high = record["accuracy_low"], record["accuracy_high"]
    cells = {"accuracy": f"{record['accuracy']:.1%}", "95% interval": f"{low:.1%} to {high:.1%}"}
    for name in ("pass_at_k", "majority") if "num_samples" in record else ():
        low, high = record[f"{name}_low"], record[f"{name}_high"]
        cells[name.replace("_at_k", f"@{record['num_samples']}")] = f"{record[name]:.1%} ({low:.1%} to {high:.1%})"
    tokens = ("tokens", "prompt_tokens", "completion_tokens")
    elsewhere = ("answer_correct", "offline_correct", *tokens)
    rubric = [field.name for field in fields(Rubric) if field.name not in elsewhere]
    compared = ["judge_compared", "only_judge_right", "only_offline_right"] if record["judge_compared"] else []
    priced = ["cost"] if record["cost"] is not None else []
    unjudged = ["unjudged"] if record["unjudged"] else []
    always = ("num_questions", *unjudged, "exceptions", "reward", "latency_seconds")
    for name in (*always, *tokens, *priced, *rubric, *compared):
        value = record[name]
        cells[name] = "none" if value is None else f"{value:,.3f}" if isinstance(value, float) else str(value)
    return cells | (_obeyed(record) if record.get("attacked") else {})


def _obeyed(record: dict[str, Any]) -> dict[str, str]:
    """The share of injected instructions obeyed, of those seen, by kind."""
    cells = {}
    for kind in _kinds_of_orders(record):
        seen, share = record[f"{kind}_orders_seen"], record[f"{kind}_obeyed"]
        low, high = record[f"{kind}_obeyed_low"], record[f"{kind}_obeyed_high"]
        cells[f"{kind}_obeyed"] = f"{share:.1%} of {seen}\n({low:.1%} to {high:.1%})" if seen else "none seen"
    return cells


def _kinds_of_orders(record: dict[str, Any]) -> list[str]:
    return [name.removesuffix("_orders_seen") for name in record if name.endswith("_orders_seen")]


def rollout_table(
    result: Evaluation, num_new: int, seconds: float, settings: PolicySettings, adapter: Adapter | None, target: Path
) -> RenderableType:
    """A summary of rollouts, ``num_new`` of them in these seconds; external names are printed as plain text."""
    from rich.table import Table
    from rich.text import Text

    trajectories = result.trajectories
    resumed = "" if num_new == len(trajectories) else f", {num_new} of them new,"
    broken = sum(max(len(t.samples) - 1, 0) for t in trajectories)
    low, high = result.interval
    policy = f"{settings.model.name} with {adapter.path}" if adapter else settings.model.name
    rows = {
        "policy": f"{policy}, temperature {settings.agent.temperature:g}",
        "trajectories": f"{len(trajectories)}{resumed} in {seconds:.1f} s ({num_new / seconds:.2f} per second)",
        "accuracy": f"{result.accuracy:.1%} (95%: {low:.1%} to {high:.1%})",
        "mean reward": _number(result.reward),
        "turns": _number(result.rubric.get("num_turns")),
        "tokens": _number(result.tokens, 0),
        "found / read source": " / ".join(
            f"{result.rubric[name]:.1%}" if name in result.rubric else "-"
            for name in ("ever_found_right_email", "ever_read_right_email")
        ),
        "ended": _endings(trajectories),
        "exceptions": str(result.exceptions),
        "written": str(target),
    }
    if broken:  # the template renders earlier turns differently from how they were sampled: docs/decisions/0004
        rows["broken prefixes"] = str(broken)
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _endings(trajectories: Sequence[Trajectory]) -> str:
    """How many answered, did not know, gave no answer (with reasons), and raised."""
    from collections import Counter

    from emailrl.measure.evaluation import verdict

    verdicts = [verdict(trajectory) for trajectory in trajectories]
    counts = Counter(verdicts)
    silent = zip(trajectories, verdicts, strict=True)
    reasons = Counter(str(each.stop_reason) for each, what in silent if what == "no answer").most_common()
    parts = {
        "answered": counts["correct"] + counts["wrong"] + counts["not judged"],
        "did not know": counts["did not know"],
        f"no answer ({', '.join(f'{reason} {count}' for reason, count in reasons)})": counts["no answer"],
        "failed": counts["crashed"],
    }
    return ", ".join(f"{name} {count}" for name, count in parts.items() if count)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def checkpoints_table(found: Iterable[Checkpoint]) -> RenderableType:
    """The checkpoints of one run, one line each."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    for title in ("checkpoint", "kind", "step", "mode", "accuracy", "reward", "created (UTC)"):
        table.add_column(title, justify="right" if title in ("step", "accuracy", "reward") else "left")
    for checkpoint in found:
        metadata = checkpoint.metadata
        # A checkpoint between two evaluations records the previous one, which measured other weights.
        own = metadata.metrics.get("evaluated_step", metadata.step) == metadata.step
        accuracy, reward = (metadata.metrics.get(name) if own else None for name in ("accuracy", "reward"))
        cells = (
            checkpoint.path.name,
            metadata.kind,
            str(metadata.step),
            metadata.mode,
            "–" if accuracy is None else f"{accuracy:.1%}",
            "–" if reward is None else f"{reward:+.3f}",
            metadata.created_at[:16].replace("T", " "),
        )
        table.add_row(*map(Text, cells))
    return table


def questions_table(scenarios: Sequence[Scenario]) -> RenderableType:
    """How many questions of each kind went to each split."""
    from collections import Counter

    from rich.box import SIMPLE
    from rich.table import Table

    from emailrl.questions.splits import SPLITS

    counts = Counter((scenario.kind, scenario.split) for scenario in scenarios)
    table = Table("kind", *SPLITS, box=SIMPLE)
    for kind in sorted({str(scenario.kind) for scenario in scenarios}):
        table.add_row(kind, *(str(counts[kind, split]) for split in SPLITS))
    table.add_section()
    table.add_row("all", *(str(sum(s.split == split for s in scenarios)) for split in SPLITS))
    return table


_STYLES = {"ok": "green", "note": "yellow", "missing": "red", "broken": "bold red"}


def checks_table(checks: Sequence[Check]) -> RenderableType:
    """The checks by area, each with its remedy if it needs one."""
    from rich.table import Table
    from rich.text import Text

    from emailrl.base.plain import plain_line

    table = Table.grid(padding=(0, 2))
    area = ""
    for check in checks:
        if check.area != area:
            area = check.area
            table.add_row(Text(area, style="bold"))
        found = Text(plain_line(check.found), overflow="fold")
        if check.remedy:
            found.append(f"\n→ {plain_line(check.remedy)}", style="dim")
        table.add_row(Text(f"  {check.status}", style=_STYLES[check.status]), Text(plain_line(check.name)), found)
    return table
