"""What is told of learning curves: areas, steps to a share of right answers, a table and a figure.

A record is a run as ``compare_algorithms.py`` writes it: a ``label``, and a ``curve`` of evaluations with ``step``,
``accuracy`` and its 95 % interval.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

THRESHOLDS = (0.8, 0.9)


def area(curve: Sequence[dict[str, Any]]) -> float:
    """Mean accuracy from the first to the last step, by trapezoids."""
    whole = sum((b["accuracy"] + a["accuracy"]) / 2 * (b["step"] - a["step"]) for a, b in pairwise(curve))
    return whole / (curve[-1]["step"] - curve[0]["step"])


def steps_to(curve: Sequence[dict[str, Any]], threshold: float) -> int | None:
    """The first evaluated step at which the accuracy is no lower; None if there is none."""
    return next((point["step"] for point in curve if point["accuracy"] >= threshold), None)


def rows(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object a label: means over its seeds, with the spread from lowest to highest."""
    told = []
    for label in dict.fromkeys(record["label"] for record in records):
        runs = [record for record in records if record["label"] == label]
        curves = [record["curve"] for record in runs]
        apart = [curve[-1]["accuracy_low"] > curve[0]["accuracy_high"] for curve in curves]
        row: dict[str, Any] = {"label": label, "learning_rate": runs[0]["learning_rate"], "seeds": len(runs)}
        row["start"] = spread([curve[0]["accuracy"] for curve in curves])
        row["final"] = spread([curve[-1]["accuracy"] for curve in curves])
        row["area"] = spread([area(curve) for curve in curves])
        row["steps_to"] = {str(share): [steps_to(curve, share) for curve in curves] for share in THRESHOLDS}
        row["runs_with_intervals_apart"] = sum(apart)
        for name in ("num_trajectories", "trainable_tokens", "seconds"):
            row[name] = statistics.mean(record[name] for record in runs)
        told.append(row)
    return sorted(told, key=lambda row: -row["area"]["mean"])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, lowest and highest."""
    return {"mean": statistics.mean(values), "low": min(values), "high": max(values)}


def table(told: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""

    def share(of: dict[str, float]) -> str:
        return f"{of['mean']:.1%} ({of['low']:.1%} to {of['high']:.1%})".replace("%", " %")

    def steps(of: Sequence[int | None]) -> str:
        return ", ".join("–" if step is None else str(step) for step in of)

    head = "| algorithm | rate | start | final | apart | steps to 80 % | steps to 90 % | area | rollouts | tokens |"
    lines = [head, "|---" * 10 + "|"]
    for row in told:
        reached = [steps(row["steps_to"][str(threshold)]) for threshold in THRESHOLDS]
        cells = [
            f"`{row['label']}`", f"{row['learning_rate']:g}", share(row["start"]), share(row["final"]),
            f"{row['runs_with_intervals_apart']} of {row['seeds']}", *reached, share(row["area"]),
            f"{row['num_trajectories']:,.0f}", f"{row['trainable_tokens']:,.0f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over steps: left every algorithm in masked mode, right one algorithm's modes; bands span the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1])
    modal = {record["algorithm"] for record in records if record["mode"] != "masked"}
    masked = [record for record in records if record["mode"] == "masked"]
    for axes, chosen in ((left, masked), (right, [record for record in records if record["algorithm"] in modal])):
        for marker, label in zip("osD^v<>pX*", dict.fromkeys(record["label"] for record in chosen), strict=False):
            curves = [record["curve"] for record in chosen if record["label"] == label]
            at = [point["step"] for point in curves[0]]
            points = [[point["accuracy"] for point in points] for points in zip(*curves, strict=True)]
            (line,) = axes.plot(at, list(map(statistics.mean, points)), marker=marker, ms=4, label=label)
            band = {"color": line.get_color(), "alpha": 0.1, "lw": 0}
            axes.fill_between(at, list(map(min, points)), list(map(max, points)), **band)
        axes.set(xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=8)
    left.set(ylabel="answers right on held-out worlds", title="Named algorithms")
    right.set(title="Masked against rollout mode")
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
