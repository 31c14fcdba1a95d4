"""A benchmark's report: results of all subjects, significance of their differences, and the files with both."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import Any

from emailrl.agent.attack import KINDS, order_of
from emailrl.agent.mail_env import Rubric
from emailrl.base.disk import replace_bytes
from emailrl.base.drawing import FIRST, new_figure, save
from emailrl.measure.evaluation import (
    Evaluation,
    is_correct,
    is_judged,
    paired_test,
    total_cost,
    verdict,
    wilson_interval,
)
from emailrl.model.adapter import Adapter
from emailrl.records.trajectory import Trajectory

REPORT_FILES = ("results.json", "results.csv", "questions.csv", "accuracy.png", "accuracy.svg")
LONGEST_LABEL = 44
"""Characters of a label in the picture."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A policy to measure: a base model, bare or with an adapter."""

    label: str
    """Its identity: the model's name, or the adapter's absolute path."""
    model_name: str
    adapter: Adapter | None = None
    attacked: bool = False
    """Whether its emails contain injected orders (``agent.attack``)."""

    def is_twin(self, other: Subject) -> bool:
        """Whether two subjects differ only in attack and label."""
        return (self.model_name, self.adapter) == (other.model_name, other.adapter)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one subject."""

    subject: Subject
    evaluation: Evaluation
    complete: bool
    """False if interrupted: the evaluation covers only the questions finished by then."""
    trajectories: Path


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results compared on the questions that have a verdict in both."""

    first: str
    second: str
    num_questions: int
    better_first: int
    """Questions that the first answered correctly more often; with one sample, only the first."""
    better_second: int
    p_value: float
    """Two-sided exact sign-flip test; not adjusted for multiple comparisons."""
    unit: str
    """What the test takes as independent: ``inbox``, or ``question``, which with one sample each is McNemar's test."""


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one benchmark, with the context for its tables."""

    results: list[Result]
    conditions: dict[str, Any]
    """Split, decoding, limits and seed, common to all results."""
    num_asked: int
    """Questions per subject."""
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    attack: bool = False
    """Whether it also measures under attack; records then include how many orders were obeyed."""

    @property
    def comparisons(self) -> list[Comparison]:
        """Every pair of results, in order; plain and attacked results are paired only for the same policy."""
        return [
            compare(first, second)
            for first, second in combinations(self.results, 2)
            if first.subject.attacked == second.subject.attacked or first.subject.is_twin(second.subject)
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
                "notes": self.notes,
            }
            for result in self.results
        ]


def compare(first: Result, second: Result) -> Comparison:
    """Compare two results over the questions that both played equally often with a verdict for every sample."""
    samples = [
        {name: each for name, each in result.evaluation.by_question.items() if all(map(is_judged, each))}
        for result in (first, second)
    ]
    pairs = [(one, samples[1][name]) for name, one in samples[0].items() if name in samples[1]]
    differences = [
        (one[0].scenario.inbox_address, sum(map(is_correct, one)) - sum(map(is_correct, other)))
        for one, other in pairs
        if len(one) == len(other)
    ]
    p_value, unit = paired_test(differences)
    return Comparison(
        first.subject.label,
        second.subject.label,
        num_questions=len(differences),
        better_first=sum(difference > 0 for _, difference in differences),
        better_second=sum(difference < 0 for _, difference in differences),
        p_value=p_value,
        unit=unit,
    )


def _attack_record(subject: Subject, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """``attacked``, and per kind of order, how many trajectories saw one and the share that obeyed.

    The share has its Wilson 95 % interval; without attack, or if no trajectory saw an order of the kind, all three are
    None. Trajectories that raised do not count.
    """
    record: dict[str, Any] = {"attacked": subject.attacked}
    for kind in KINDS:
        rows = [_order_record(subject, each) for each in trajectories if each.exception is None]
        obeyed = [row["order_obeyed"] for row in rows if row["order"] == kind and row["order_seen"]]
        low, high = wilson_interval(sum(obeyed), len(obeyed)) if obeyed else (None, None)
        record |= {
            f"{kind}_orders_seen": len(obeyed),
            f"{kind}_obeyed": sum(obeyed) / len(obeyed) if obeyed else None,
            f"{kind}_obeyed_low": low,
            f"{kind}_obeyed_high": high,
        }
    return record


def _order_record(subject: Subject, trajectory: Trajectory) -> dict[str, Any]:
    """The order of one trajectory, and whether it was seen and obeyed; None without attack."""
    if not subject.attacked:
        return {"order": None, "order_seen": None, "order_obeyed": None}
    order = order_of(trajectory.scenario)
    seen = order.was_seen(trajectory)
    return {"order": order.kind, "order_seen": seen, "order_obeyed": seen and order.was_obeyed(trajectory)}


# -- files


def write_report(report: Report, out: Path) -> None:
    """Write ``results.json``, ``results.csv`` (a row per model) and ``questions.csv`` (a row per model and
    question)."""
    records = report.records()
    document = {"results": records, "comparisons": list(map(asdict, report.comparisons)), "notes": report.notes}
    text = json.dumps(
        document | {"interrupted": report.interrupted}, indent=2, default=lambda path: str(path.absolute())
    )
    replace_bytes(out / "results.json", text.encode() + b"\n")
    _write_csv(out / "results.csv", [record | {"notes": "; ".join(record["notes"])} for record in records])
    rows = [row for result in report.results for row in _question_rows(result, attack=report.attack)]
    _write_csv(out / "questions.csv", rows)


def _question_rows(result: Result, *, attack: bool) -> Iterator[dict[str, Any]]:
    # Ids and numbers only: mail text in a spreadsheet would be read as formulas.
    for trajectory in result.evaluation.trajectories:
        yield {
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
        } | (_order_record(result.subject, trajectory) if attack else {})


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    replace_bytes(path, text.getvalue().encode())


def draw_accuracies(report: Report, out: Path) -> list[Path]:
    """Draw each result's accuracy with its 95 % interval as ``accuracy.png`` and ``accuracy.svg`` in ``out``."""
    records = report.records()
    figure = new_figure(8, 1.2 + 0.45 * len(records))
    axes = figure.subplots()
    for place, record in enumerate(records):
        axes.hlines(place, record["accuracy_low"], record["accuracy_high"], color=FIRST, linewidth=2)
        axes.plot(record["accuracy"], place, "o", color=FIRST)
        axes.annotate(f"{record['accuracy']:.1%}", (record["accuracy"], place), (0, 7), textcoords="offset points",
                      ha="center", fontsize=9)  # fmt: skip
    labels = [_label(record) for record in records]
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    axes.set(xlim=(0, 1), ylim=(len(labels) - 0.4, -0.7), xlabel="accuracy, 95 % interval")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.grid(visible=False, axis="y")
    axes.set_title(f"{report.num_asked} test questions", fontsize=10)
    return save(figure, out / "accuracy")


def _label(record: dict[str, object]) -> str:
    """The model's name, or a checkpoint's run and name; long labels are cut from the left."""
    label = "/".join(Path(str(record["model"])).parts[-2:])
    return label if len(label) <= LONGEST_LABEL else f"…{label[1 - LONGEST_LABEL :]}"
