"""How far a command has come, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from emailrl.cli import live as progress
from emailrl.cli.live import Tally


def test_without_a_terminal_a_line_now_and_then_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([60.0, 100.0, 104.0, 108.0, 114.0, 200.0, 230.0, 290.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with Tally(Console(file=out)) as tally:
        tally.begin("nano", 10)
        for _ in range(4):
            tally.advance("nano", 10)
        tally.advance("trained", 10)
        tally.advance("trained", 10)
    # nano, begun at 60, the first ended at 100: 3 in the 14 s since, 6 are left; after 4 s it is too early.
    # trained: 1 in 60 s, 8 are left.
    assert out.getvalue().splitlines() == ["nano: 4 of 10, about 28 s left", "trained: 2 of 10, about 480 s left"]


def test_the_first_few_of_many_predict_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 30.0, 50.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with Tally(Console(file=out)) as tally:
        tally.begin("nano", 41)
        for _ in range(3):
            tally.advance("nano", 41)
    # 2 of 41 are less than a twentieth; 3 in all took 20 s each since the first, 38 are left.
    assert out.getvalue().splitlines() == ["nano: 2 of 41", "nano: 3 of 41, about 760 s left"]


def test_on_a_terminal_each_thing_has_a_bar_of_its_own() -> None:
    out = io.StringIO()
    with Tally(Console(file=out, force_terminal=True, width=80)) as tally:
        tally.begin("nano", 3)
        assert "0/3" in out.getvalue()  # there from the beginning, not from the first that ends
        for name in ("nano", "trained"):
            for _ in range(3):
                tally.advance(name, 3)
    shown = out.getvalue()
    assert shown.index("nano") < shown.index("3/3") < shown.index("trained")
    assert "nano" not in shown[shown.index("trained") :]  # the first is finished and no longer drawn
    assert "left" in shown


def test_what_had_ended_before_counts_but_tells_nothing_of_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 25.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    with Tally(Console(file=out)) as tally:
        tally.begin("rollout", 10, 6)
        tally.advance("rollout", 10)
        tally.advance("rollout", 10)  # one in the 20 s since the first new one: two are left
    assert out.getvalue().splitlines() == ["rollout: 8 of 10, about 40 s left"]
