"""The page used by hand in Chromium: keys, focus, narrow screens, accessibility, and the speed of a long list.

These need playwright and axe (``pip install -e '.[browser]'``) and the system's Chromium.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from chromium import CHROMIUM, needs_chromium
from two_turns import UNSEEN, trajectory

from emailrl.page import gather, page, place_of
from emailrl.records import write_records, write_trajectories
from emailrl.records.trajectory import Trajectory

__all__ = ["trajectory"]

pytestmark = [pytest.mark.slow, needs_chromium]

WRONG = {"answer_correct": False, "attempted_answer": True} | UNSEEN
VIEWS = {
    "overview": "#view=overview",
    "list": "#view=list",
    "trajectory": "#view=list&t=step-000001.jsonl%400",
    "tokens": "#view=list&t=step-000001.jsonl%400&layer=advantage",
    "group": "#view=list&t=step-000001.jsonl%400&side=group",
    "question": "#view=list&t=eval-000002.jsonl%400&side=question",
    "settings": "#view=about",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def run_dir(tmp_path: Path, trajectory: Trajectory) -> Path:
    """Two steps of two groups of three, of which the third rollout is right; evaluations before and after."""
    folder = tmp_path / "run"
    scenarios = [replace(trajectory.scenario, id=f"q{n}", question=f"Who paid bill {n}?") for n in (0, 1)]
    for step in (1, 2):
        made = [
            replace(
                trajectory, id=f"s{step}-{group}-{n}", group_id=f"g{step}-{group}", step=step, reward=float(n),
                rubric=trajectory.rubric if n == 2 else WRONG, scenario=scenarios[group],
            )
            for group in (0, 1) for n in range(3)
        ]  # fmt: skip
        write_trajectories(folder / "trajectories" / f"step-{step:06}.jsonl", made)
        numbers = [None, None, -0.3, -0.02, None, None, -3.0, -0.4]
        sample = {"loss_mask": [0, 0, 1, 1, 0, 0, 1, 1], "old_logprobs": numbers, "ratio": numbers}
        notes = [{"id": each.id, "advantage": each.reward - 1, "dropped": None, "samples": [sample]} for each in made]
        write_records(folder / "training" / f"step-{step:06}.jsonl", notes)
    for step, rubric in ((0, WRONG), (2, trajectory.rubric)):
        made = [replace(trajectory, id=f"e{step}-{s.id}", step=step, rubric=rubric, scenario=s) for s in scenarios]
        write_trajectories(folder / "trajectories" / f"eval-{step:06}.jsonl", made)
    steps = [
        {"step": step, "reward_mean": 1.0, "accuracy": 1 / 3, "entropy": 0.5 / step, "loss": -0.01 * step, "kl": 0.001,
         "dropped": {"zero_spread": step}, "seconds": {"rollout": 2.0, "update": 1.5, "total": 3.5}}
        for step in (1, 2)
    ]  # fmt: skip
    write_records(folder / "metrics.jsonl", steps)
    held = {"accuracy_low": 0.0, "accuracy_high": 1.0, "reward": 0.5, "num_questions": 2, "num_turns": 2.0}
    write_records(folder / "evaluations.jsonl", [{"step": step, "accuracy": step / 2, **held} for step in (0, 2)])
    return folder


@pytest.fixture
def file(run_dir: Path) -> Path:
    return written(run_dir)


def written(run_dir: Path) -> Path:
    target = run_dir.with_suffix(".html")
    target.write_text(page(gather(place_of(run_dir), model_name="nano")), encoding="utf-8")
    return target


def opened(browser: Any, address: str, *, width: int = 1280, scheme: str = "light") -> Any:
    """A tab that shows an address once its script has drawn it, and fails the test on an error of the script."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    tab = context.new_page()
    tab.on("pageerror", lambda error: pytest.fail(f"{address}: {error}"))
    tab.goto(address)
    tab.wait_for_selector("html[data-ready]", state="attached")
    return tab


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)])
@pytest.mark.parametrize("view", [*VIEWS, "help"])
def test_axe_finds_no_violation(browser: Any, file: Path, view: str, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    tab = opened(browser, f"{file.as_uri()}{VIEWS.get(view, '')}", scheme=scheme, width=width)
    if view == "help":
        tab.keyboard.press("?")
    tab.wait_for_timeout(300)
    found = axe.Axe().run(tab, options={"resultTypes": ["violations"]}).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"], each["nodes"][0]["failureSummary"]) for each in found] == []


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_runs_out_of_a_narrow_screen(browser: Any, file: Path, view: str) -> None:
    tab = opened(browser, f"{file.as_uri()}{VIEWS[view]}", width=360)
    tab.wait_for_timeout(300)
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= 360
    outside = """[...document.querySelectorAll("main *")].filter((node) => {
      const box = node.getBoundingClientRect();
      return box.width && box.right > 361 && !node.closest(".scroller, .sr, [hidden]");
    }).map((node) => node.outerHTML.slice(0, 120))"""
    assert tab.evaluate(outside) == []


def fragment(tab: Any) -> dict[str, str]:
    return dict(re.findall(r"[#&]([^=&]+)=([^&]*)", unquote(tab.evaluate("location.hash"))))


def test_keys_reach_everything(browser: Any, file: Path) -> None:
    tab = opened(browser, file.as_uri())
    offset = {}  # of each rollout of the first step

    def press(key: str) -> dict[str, str]:
        tab.keyboard.press(key)
        tab.wait_for_timeout(150)
        return fragment(tab)

    assert press("2")["view"] == "list"
    for number in range(3):
        offset[number] = press("j")["t"]
    assert [place.partition("@")[0] for place in offset.values()] == ["eval-000000.jsonl"] * 2 + ["step-000001.jsonl"]
    assert press("k")["t"] == offset[1]
    assert press("n")["t"] == offset[2]  # the next failure
    assert press("N")["t"] == offset[1]
    press("j")
    assert press("]")["t"] > offset[2] and press("[")["t"] == offset[2]
    assert press("g")["side"] == "group" and "side" not in press("g")
    assert press("b")["side"] == "question" and "side" not in press("Escape")
    assert "t" not in press("Escape")
    press("/")
    tab.keyboard.type("bill 1")
    tab.wait_for_timeout(150)
    assert tab.inner_text("#counted") == "8 of 16 trajectories"
    assert tab.evaluate("document.activeElement.id") == "search"
    press("Escape")
    assert press("3")["view"] == "about" and "view" not in press("1")
    press("?")
    assert tab.is_visible("#help")
    press("Escape")
    assert not tab.is_visible("#help")
    tab.go_back()
    assert fragment(tab)["view"] == "about"
