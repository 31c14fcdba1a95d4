"""The rows of ``bench_scaling`` as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLES = {
    "weak": ("tab:blue", "weak: 24 trajectories per rank", 5),
    "strong": ("tab:orange", "strong: 24 in all", -12),
}
"""Color, label, and where a point's number stands, in points above it."""


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens per second and GPU by number of ranks, and what they come to together."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    rcParams["svg.hashsalt"] = "emailrl"  # the same rows draw the same bytes
    one = next(row for row in rows if row["ranks"] == 1)
    ranks = sorted({row["ranks"] for row in rows})
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    each, together = figure.subplots(1, 2)
    together.plot(ranks, [one["tokens_per_second_per_gpu"] * number for number in ranks], "k:", label="ideal")
    for kind, (colour, label, above) in STYLES.items():
        of_kind = [one, *(row for row in rows if row["kind"] == kind and row["ranks"] > 1)]
        numbers = [row["ranks"] for row in of_kind]
        speeds = [row["tokens_per_second_per_gpu"] for row in of_kind]
        each.plot(numbers, speeds, "o-", color=colour, label=label)
        together.plot(numbers, [row["tokens"] / row["seconds"] for row in of_kind], "o-", color=colour)
        for number, speed in zip(numbers[1:], speeds[1:], strict=True):
            share = speed / one["tokens_per_second_per_gpu"]
            each.annotate(
                f"{share:.3f}", (number, speed), (0, above), textcoords="offset points", ha="center", fontsize=8
            )
    each.set(title="per GPU", ylim=(0, 1.25 * one["tokens_per_second_per_gpu"]))
    together.set(title="together", ylim=(0, None))
    each.legend(loc="lower left", fontsize=8, frameon=False)
    together.legend(loc="upper left", fontsize=8, frameon=False)
    for axes in (each, together):
        axes.set(xlabel="ranks", ylabel="tokens/s")
        axes.set_xticks(ranks, [str(number) for number in ranks])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
