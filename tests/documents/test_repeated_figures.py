"""Figures that a page repeats are those of the page that measured them."""

from __future__ import annotations

import re

from documents.pages import text_of

from emailrl.settings.names import by_name


def cells(page: str, start: str, section: str = "") -> list[str]:
    """The cells, without emphasis, of the only row of a section (or page) that begins with ``start``."""
    text = text_of(page).partition(section)[2].partition("\n## ")[0] if section else text_of(page)
    [row] = re.findall(rf"^\| {re.escape(start)}.*\|$", text, re.MULTILINE)
    return [cell.strip(" *") for cell in row.strip("|").split("|")]


def test_the_readme_gives_the_answer_check_the_figures_of_both_estimates() -> None:
    _, shown = cells("README.md", "offline answer check")
    half = cells("docs/reference/rewards.md", "the other half of both sets")
    hardest = cells("docs/reference/rewards.md", "400 near misses on email")
    assert f"{half[1]} correct verdicts, {half[2]} of wrong answers accepted" in shown
    assert f"measured: {hardest[1]}, {hardest[2].partition(' (')[0]} (" in shown


def test_the_page_on_engines_says_what_vllm_without_graphs_was_measured_to_take() -> None:
    eager = cells("docs/evidence/performance.md", "0.6B | vLLM, `VLLM_ENFORCE_EAGER=true`", "\n## Sampling\n")
    graphs = cells("docs/evidence/performance.md", "0.6B | vLLM |", "\n## Sampling\n")
    text = " ".join(text_of("docs/guides/engines.md").split())
    sampling, start = (f"{eager[place]} s instead of {graphs[place]} s" for place in (4, 5))
    assert f"sampling took {sampling}, and the start {start}" in text
    assert by_name()["vllm_enforce_eager"].description == "Disable CUDA graphs: less memory, slower sampling."
