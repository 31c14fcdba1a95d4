"""The page used by hand in Chromium: keys, focus, narrow screens, accessibility, and the speed of a long list.

These need playwright and axe (``pip install -e '.[browser]'``) and the system's Chromium.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from chromium import CHROMIUM, needs_chromium
from page.conftest import make_run, written

from emailrl.base.disk import LOCK, Lock
from emailrl.page.server import PageServer, Served
from emailrl.records import write_trajectories
from emailrl.records.trajectory import Trajectory

pytestmark = [pytest.mark.slow, needs_chromium]

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
def file(tmp_path: Path, trajectory: Trajectory) -> Path:
    return written(make_run(tmp_path / "run", trajectory, groups=2))


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
    tab.wait_for_selector("#detail h1")  # the first, beside the list
    press("j")
    offset[0] = press("k")["t"]
    for number in (1, 2):
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


def test_a_live_benchmark_says_when_it_has_ended(browser: Any, tmp_path: Path, trajectory: Trajectory) -> None:
    file = tmp_path / "bench" / "trajectories" / "00-nano.jsonl"
    write_trajectories(file, [trajectory])
    with PageServer(Served(tmp_path / "bench", model_name="nano")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        with Lock(tmp_path / "bench" / "conditions.json"):
            tab = opened(browser, server.address)
            assert tab.inner_text("#live") == "live"
            result = {"model": "nano", "accuracy": 1.0, "complete": True, "trajectories": str(file)}
            (tmp_path / "bench" / "results.json").write_text(json.dumps({"results": [result]}))
            tab.wait_for_selector("h1:has-text('nano')", state="attached", timeout=120_000)
            assert tab.inner_text("#live") == "live"  # it has its results, and is about to end
        tab.wait_for_function("document.title === 'finished · nano · emailrl'", timeout=120_000)
        server.shutdown()
        thread.join()


def test_a_live_page_keeps_what_its_reader_did_and_says_how_the_run_is(
    browser: Any, tmp_path: Path, trajectory: Trajectory
) -> None:
    folder = make_run(tmp_path / "run", trajectory, groups=2)

    def status(**fields: Any) -> None:
        now = {"state": "running", "step": 2, "steps": 9, "at": time.time(), "end": time.time() + 240}
        (folder / "status.json").write_text(json.dumps(now | fields))

    status(phase="rollouts of step 3", done=5, rollouts=48)
    with closing(Lock(folder / LOCK)), PageServer(Served(folder, model_name="nano")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        tab = opened(browser, server.address)
        assert tab.inner_text("#live") == "step 3 of 9 · rollouts 5 of 48 · about 4 min left"
        assert tab.title() == "3/9 · run · emailrl"
        tab.click("summary:has-text('All values by step')")
        tab.locator(".scroller[aria-label='Values by step']").focus()
        tab.evaluate("scrollTo(0, 400)")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "loss": 0.5, "reward_mean": 1.5}\n')
        status(step=3, phase=None, end=None, at=time.time() - 500)
        tab.wait_for_function("document.title.startsWith('stalled')", timeout=120_000)
        assert tab.locator(".scroller[aria-label='Values by step'] tbody tr").count() == 3  # open, and up to date
        assert tab.evaluate("[document.activeElement.getAttribute('aria-label'), scrollY]") == ["Values by step", 400]
        status(state="failed", reason="the disk is full", step=3)
        tab.wait_for_function("document.title.startsWith('failed')", timeout=120_000)
        assert tab.inner_text("#live") == "Failed at step 3 of 9: the disk is full"
        server.shutdown()
        thread.join()
    tab.context.set_offline(True)  # as its process has not ended, the server still answers on open connections
    tab.wait_for_function("document.title.startsWith('not connected')", timeout=120_000)
    assert tab.locator(".scroller[aria-label='Values by step'] tbody tr").count() == 3
    tab.keyboard.press("2")
    tab.keyboard.press("j")
    assert "emailrl view has stopped; start it again" in tab.inner_text("#live")
    assert "emailrl view has stopped" in tab.inner_text("#detail [role=alert]")  # no longer fetched; the list stays
    assert tab.inner_text("#counted") == "16 trajectories"
