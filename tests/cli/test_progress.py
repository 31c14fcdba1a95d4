"""How far a command has come, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from emailrl.cli import progress
from emailrl.cli.progress import Tally


def test_without_a_terminal_a_line_now_and_then_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 104.0, 111.0, 111.0, 113.0, 200.0, 200.0, 290.0, 290.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with Tally(Console(file=out)) as tally:
        for _ in range(4):
            tally.advance("nano", 10)
        tally.advance("trained", 10)
        tally.advance("trained", 10)
    # nano: 2 ended in the 11 s since the first had, 7 are left: 38.5 s. trained: 1 in 90 s, 8 are left.
    assert out.getvalue().splitlines() == [
        "nano: 3 of 10, about 38 s left",
        "trained: 2 of 10, about 720 s left",
    ]


def test_on_a_terminal_each_thing_has_a_bar_of_its_own() -> None:
    out = io.StringIO()
    with Tally(Console(file=out, force_terminal=True, width=80)) as tally:
        for name in ("nano", "trained"):
            for _ in range(3):
                tally.advance(name, 3)
    shown = out.getvalue()
    assert shown.index("nano") < shown.index("3/3") < shown.index("trained")
    assert "nano" not in shown[shown.index("trained") :]  # the first is finished and no longer drawn
    assert "left" in shown
