"""How far a run or a command has come, on a terminal and elsewhere."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from emailrl.cli import live as progress
from emailrl.cli.live import LiveRun, Tally, sparkline
from emailrl.measure.evaluation import Evaluation
from emailrl.records import write_records
from emailrl.records.trajectory import Trajectory
from emailrl.settings import OutputSettings, Settings


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step, "reward_mean": 0.5 * step, "accuracy": 0.25 * step, "total_tokens": 5000, "num_trajectories": 20,
        "seconds": {"rollout": 7.5, "update": 2.5, "evaluation": 0.01, "total": 10.0},
    } | changes  # fmt: skip


def play(console: Console, trajectory: Trajectory, run_dir: Path, **output: bool) -> LiveRun:
    """A run of four steps, two done before, is seen up to the rollouts of its last step."""
    write_records(run_dir / "metrics.jsonl", [metrics(1), metrics(2)])
    write_records(run_dir / "evaluations.jsonl", [{"step": 0, "accuracy": 0.25}])
    live = LiveRun(Settings(output=OutputSettings(**output)), console)
    live.say("the header")
    live.start(run_dir, 2, 4)
    live.step(metrics(3), 125.0)
    live.evaluation(Evaluation([trajectory], 3))
    live.phase("train rollouts of step 4", 8)
    live.played(trajectory)
    live.recorded(run_dir / "trajectories" / "step-000004.jsonl", [trajectory])
    live.say("a step")
    return live


def drawn(live: LiveRun, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(live)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_on_a_terminal_the_display_stays_below_the_lines(
    trajectory: Trajectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with play(console, trajectory, tmp_path) as live:
        lines = drawn(live)
    assert "the header" in out.getvalue() and "a step" in out.getvalue() and "Step 3/4" in out.getvalue()
    assert [line.split()[0] for line in lines] == ["Step", "Now", "Reward", "Accuracy", "Evaluation", "Last"]
    assert "Step 3/4" in lines[0] and lines[0].endswith("min left")
    assert "train rollouts of step 4" in lines[1] and "1 of 8 rollouts" in lines[1]
    assert "▁▅█" in lines[2] and lines[2].endswith("1.500, best 1.500")
    assert "▃▅▆" in lines[3] and lines[3].endswith("75.0%, best 75.0%")
    assert "▃█" in lines[4] and lines[4].endswith("100.0%, best 100.0%")
    assert "10.0 s: rollout 75%, update 25%" in lines[5] and lines[5].endswith("2.0 rollouts/s, 500 tok/s")
    assert max(map(len, lines)) <= 80
    assert not any(line.startswith("Now") for line in drawn(live))  # it has ended
    assert f" view {tmp_path} # live" in capsys.readouterr().err  # the same in a browser


def test_a_step_takes_one_line_of_a_narrow_terminal_and_all_of_a_wide_one(
    trajectory: Trajectory, tmp_path: Path
) -> None:
    step = "Step 12/200 | Loss: -0.1726 | Policy: -0.1726 | KL: - | Reward: 0.494 | Acc: 27.1% | Trainable tokens: 9/99"
    step += " (9.1%) | 28.2 s | about 7 min left | Dropped: 2 groups with nearly equal rewards"
    warning = "Step 12: no groups left to train on, no update (2 such steps so far), and more than eighty characters."

    def printed(width: int) -> str:
        out = io.StringIO()
        with play(Console(file=out, force_terminal=True, width=width, color_system=None), trajectory, tmp_path) as live:
            live.say(step)
            live.say(warning)
        return out.getvalue()

    [line] = [line for line in printed(80).splitlines() if "Step 12/200" in line]
    assert line.endswith("Step 12/200 | Reward: 0.494 | Acc: 27.1% | 28.2 s | Dropped: 2 groups with near…")
    assert "eighty" in printed(80) and step in printed(240)


def test_elsewhere_there_are_only_lines_and_what_the_settings_ask(trajectory: Trajectory, tmp_path: Path) -> None:
    def printed(**output: bool) -> str:
        out = io.StringIO()
        with play(Console(file=out, width=100), trajectory, tmp_path, **output):
            return out.getvalue()

    assert printed() == "the header\na step\n"
    assert printed(verbose=True).splitlines()[1] == "t-7: correct, reward 1.380, 2 turns, 0.8 s: Who paid?"
    shown = printed(show_trajectory_details=True)
    assert "turn 2" in shown and "Verdict" in shown and "Tokens" not in shown
    assert "Tokens" in printed(show_trajectory_details=True, verbose=True)


def test_a_sparkline_has_a_bar_per_value_or_per_mean_of_several() -> None:
    assert sparkline([0.0, 1.0, 2.0, 7.0], 10, 0.0, 7.0) == "▁▂▃█"
    assert sparkline([0.0, 2.0, 6.0, 8.0], 2, 0.0, 7.0) == "▂█"  # the means 1 and 7
    assert sparkline([3.0, 3.0], 10, 3.0, 3.0) == "▁▁"
    assert sparkline([-5.0, 9.0], 10, 0.0, 1.0) == "▁█"


# -- countable work


@pytest.mark.parametrize(
    ("times", "total", "before", "lines"),
    [
        # Begun at 60, the first ended at 100: 3 in the 14 s since, 6 are left; after 4 s it is too early.
        ((60.0, 100.0, 104.0, 108.0, 114.0), 10, 0, ["nano: 4 of 10, about 28 s left"]),
        # 2 of 41 are less than a twentieth; 3 in all took 20 s each since the first, 38 are left.
        ((0.0, 10.0, 30.0, 50.0), 41, 0, ["nano: 2 of 41", "nano: 3 of 41, about 760 s left"]),
        # One in the 20 s since the first new one: two are left. What had ended before tells nothing.
        ((0.0, 5.0, 25.0), 10, 6, ["nano: 8 of 10, about 40 s left"]),
    ],
)
def test_without_a_terminal_a_line_now_and_then_says_what_is_left(
    monkeypatch, times: tuple[float, ...], total: int, before: int, lines: list[str]
) -> None:
    monkeypatch.setattr(progress.time, "monotonic", iter(times).__next__)
    out = io.StringIO()
    with Tally(Console(file=out)) as tally:
        tally.begin("nano", total, before)
        for _ in times[1:]:
            tally.advance("nano", total)
    assert out.getvalue().splitlines() == lines


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


def test_what_fails_before_its_first_item_leaves_no_bar() -> None:
    out = io.StringIO()
    with Tally(Console(file=out, force_terminal=True, width=80)) as tally:
        tally.begin("nope", 300)
    assert out.getvalue().rpartition("0/300")[2].count("\x1b[2K") == 1  # the line drawn last is erased


def test_only_a_best_evaluation_is_green() -> None:
    lines = ["Eval accuracy: 46.7%", "New best accuracy: 49.3%"]

    def printed(line: str) -> str:
        out = io.StringIO()
        LiveRun(Settings(), Console(file=out, force_terminal=True, color_system="standard")).say(line)
        return out.getvalue()

    assert ["\x1b[1;32m" in printed(line) or "\x1b[32m" in printed(line) for line in lines] == [False, True]
