"""Curves of several runs as one figure: reward, validation accuracy and entropy over steps and over wall time.

    python tests/gpu/small_curves.py work/*/seed-*/outputs/grpo_masked --out docs/figures/small_model.svg
    python tests/gpu/small_curves.py work/wide/seed-*/outputs/grpo_masked --short --out docs/images/training_curve.svg

reads each run's ``metrics.jsonl`` and ``evaluations.jsonl`` (CPU only). Lines are the runs, bands the 95 % intervals of
the validation accuracy. Wall time is the sum of the recorded seconds of the steps, evaluations included. ``--short``
draws accuracy over steps only, as the README shows it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from emailrl.base.drawing import FIRST, SECOND, new_figure
from emailrl.records import read_records

ROWS = {"reward_mean": "mean reward, training", "accuracy": "validation accuracy, greedy", "entropy": "entropy, nats"}


@dataclass(frozen=True)
class Run:
    """One run's records, and its wall time at each step."""

    name: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    minutes: dict[int, float]


def read(folder: Path) -> Run:
    """The records under a run's folder; of a step that was run again after a resume the last one counts."""
    metrics, evaluations = (
        [one for _, one in sorted({one["step"]: one for one in read_records(folder / f"{name}.jsonl")}.items())]
        for name in ("metrics", "evaluations")
    )
    ends = accumulate(one["seconds"]["total"] / 60 for one in metrics)
    minutes = {0: 0.0} | {one["step"]: end for one, end in zip(metrics, ends, strict=True)}
    name = folder.name
    if name.startswith("grpo"):  # VARIANT/seed-N/outputs/grpo_masked
        name = f"{folder.parents[2].name}-{folder.parents[1].name.removeprefix('seed-')}"
    return Run(name, metrics, evaluations, minutes)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the figure: one row per quantity, over steps on the left and minutes on the right."""
    figure = new_figure(9, 8)
    grid = figure.subplots(len(ROWS), 2, sharey="row", sharex="col")
    for axes, (key, label) in zip(grid, ROWS.items(), strict=True):
        for run in runs:
            records = run.evaluations if key == "accuracy" else run.metrics
            points = [one for one in records if one.get(key) is not None and one["step"] in run.minutes]
            steps = [one["step"] for one in points]
            for place, at in zip(axes, (steps, [run.minutes[step] for step in steps]), strict=True):
                (line,) = place.plot(at, [one[key] for one in points], marker="o" if key == "accuracy" else "", ms=4,
                                     lw=1.2, label=run.name)  # fmt: skip
                if key == "accuracy":
                    bounds = [[one[name] for one in points] for name in ("accuracy_low", "accuracy_high")]
                    place.fill_between(at, *bounds, color=line.get_color(), alpha=0.12, lw=0)
        axes[0].set(ylabel=label)
        if key == "accuracy":
            axes[0].yaxis.set_major_formatter("{x:.0%}")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    grid[-1][0].set(xlabel="RL step (0: after SFT)")
    grid[-1][1].set(xlabel="minutes of RL")
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_short(runs: Sequence[Run], path: Path) -> None:
    """Write the accuracy over steps: greedy on validation questions on the left, of training rollouts on the right."""
    figure = new_figure(9, 3.6)
    validation, sampled = figure.subplots(1, 2, sharey=True, sharex=True)
    for number, run in enumerate(runs):
        style = {
            "color": (FIRST, SECOND, "#6f5aa8")[number % 3],
            "ls": ("-", "--", ":")[number % 3],
            "label": f"seed {run.name.rpartition('-')[2]}",
        }
        steps = [one["step"] + 0.15 * number for one in run.evaluations]  # so that intervals do not cover each other
        validation.plot(steps, [one["accuracy"] for one in run.evaluations], marker="o", **style)
        bounds = [[one[name] for one in run.evaluations] for name in ("accuracy_low", "accuracy_high")]
        validation.vlines(steps, *bounds, color=style["color"], alpha=0.6)
        sampled.plot([one["step"] for one in run.metrics], [one["accuracy"] for one in run.metrics], **style)
    validation.set(title="Validation, greedy, 95 % interval", xlabel="RL step (0: after SFT)", ylim=(0.5, 1))
    validation.yaxis.set_major_formatter("{x:.0%}")
    last = max(run.metrics[-1]["step"] for run in runs)
    sampled.set(title="Training questions, sampled", xlabel="RL step", xticks=range(0, last + 2, 4))
    sampled.legend(loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders with metrics.jsonl and evaluations.jsonl")
    parser.add_argument("--out", type=Path, required=True, help=".svg or .png")
    parser.add_argument("--short", action="store_true", help="accuracy over steps only")
    given = parser.parse_args()
    (draw_short if given.short else draw)([read(folder) for folder in given.runs], given.out)


if __name__ == "__main__":
    main()
