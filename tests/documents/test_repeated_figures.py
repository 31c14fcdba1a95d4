"""Figures that a page repeats are those of the page that measured them."""

from __future__ import annotations

import re

from documents.pages import text_of


def cells(page: str, start: str) -> list[str]:
    """The cells of the only row of a page that begins with ``start``, without the emphasis of their text."""
    [row] = re.findall(rf"^\| {re.escape(start)}.*\|$", text_of(page), re.MULTILINE)
    return [cell.strip(" *") for cell in row.strip("|").split("|")]


def test_the_readme_gives_the_answer_check_the_figures_of_both_estimates() -> None:
    _, shown = cells("README.md", "offline answer check")
    half = cells("docs/rewards.md", "the other half of both sets")
    hardest = cells("docs/rewards.md", "400 pairs on email by a fourth author")
    assert f"{half[1]} correct verdicts, {half[2]} of wrong answers accepted" in shown
    assert f"measured: {hardest[1]}, {hardest[2].partition(' (')[0]} (" in shown
