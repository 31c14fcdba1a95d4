"""A run as a picture."""

from __future__ import annotations

from pathlib import Path

from emailrl.records import write_records
from emailrl.settings import Settings
from emailrl.training.ending import curve, draw_curves


def test_a_curve_leaves_out_what_has_no_number() -> None:
    records = [{"step": 1, "accuracy": 0.5}, {"step": 2, "accuracy": None}, {"step": 3}]
    assert curve(records, "accuracy") == [(1, 0.5)]


def test_curves_are_drawn_of_whatever_the_run_has(tmp_path: Path) -> None:
    write_records(tmp_path / "metrics.jsonl", [])
    write_records(tmp_path / "evaluations.jsonl", [])
    settings = Settings().with_model("a $model$ of $1")
    png, svg = draw_curves(tmp_path, settings)
    empty = svg.read_bytes()
    assert (png, svg) == (tmp_path / "curve.png", tmp_path / "curve.svg")
    write_records(tmp_path / "metrics.jsonl", [{"step": 1, "accuracy": None, "reward_mean": 0.5}])
    evaluation = {"step": 0, "accuracy": 0.5, "accuracy_low": 0.25, "accuracy_high": 0.75, "reward": None}
    write_records(tmp_path / "evaluations.jsonl", [evaluation])
    draw_curves(tmp_path, settings)
    assert svg.read_bytes() != empty
