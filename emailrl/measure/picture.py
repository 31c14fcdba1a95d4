"""Plots the accuracies of several policies."""

from __future__ import annotations

from pathlib import Path

from emailrl.base.drawing import FIRST, new_figure, save
from emailrl.measure.report import Report

LONGEST_LABEL = 44


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
