"""A benchmark's output files: results as JSON and CSV, and a row per question."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from emailrl.base.disk import replace_bytes
from emailrl.measure.attacked import question_record
from emailrl.measure.evaluation import is_correct, is_judged, total_cost, verdict
from emailrl.measure.report import Comparison, Report, Result

REPORT_FILES = ("results.json", "results.csv", "questions.csv", "accuracy.png", "accuracy.svg")


def write_report(report: Report, out: Path) -> None:
    """Write ``results.json``, ``results.csv`` (a row per model) and ``questions.csv`` (a row per model and
    question)."""
    records = report.records()
    document = {"results": records, "comparisons": [_named(each) for each in report.comparisons], "notes": report.notes}
    text = json.dumps(
        document | {"interrupted": report.interrupted}, indent=2, default=lambda path: str(path.absolute())
    )
    replace_bytes(out / "results.json", text.encode() + b"\n")
    _write_csv(out / "results.csv", [record | {"notes": "; ".join(record["notes"])} for record in records])
    rows = [row for result in report.results for row in _question_rows(result, attack=report.attack)]
    _write_csv(out / "questions.csv", rows)


def _named(comparison: Comparison) -> dict[str, Any]:
    return {item.name: getattr(comparison, item.name) for item in fields(comparison)}


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
        } | (question_record(result.subject, trajectory) if attack else {})


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    if rows:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    replace_bytes(path, text.getvalue().encode())
