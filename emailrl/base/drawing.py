"""Saves figures: the same data gives the same bytes, whatever configuration is in the working folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.base.disk import replace_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST, SECOND, FAINT = "#0b6a72", "#b5541c", "#7f8891"
"""Colors that stay distinct in grayscale and for color-blind readers, on the figures' own white background."""
IN_THE_DARK = (
    b"<style>@media (prefers-color-scheme: dark) { svg { filter: invert(0.91) hue-rotate(180deg) } }</style>\n"
)
"""In an SVG: it is drawn on a dark background, in lighter shades of the same hues, where its reader prefers that."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcdefaults()  # a matplotlibrc in the working folder may ask for LaTeX and run what it likes there
    matplotlib.rcParams |= {
        "svg.hashsalt": "emailrl",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "0.92",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the figure next to ``path`` as PNG and SVG, and return both paths."""
    written = []
    for suffix in (".png", ".svg"):
        content = io.BytesIO()
        metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=metadata)
        written.append(path.with_suffix(suffix))
        replace_bytes(written[-1], content.getvalue().replace(b"<defs>", IN_THE_DARK + b"<defs>", 1))
    return written
