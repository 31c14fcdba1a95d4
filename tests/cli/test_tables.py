"""What rollouts, benchmarks and the quickstart print at their end, on trajectories made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from emailrl.cli.benchmark import results_table
from emailrl.cli.quickstart import Outcome, has_browser
from emailrl.cli.rollout import rollout_table
from emailrl.measure.benchmark import Report, Result, Subject
from emailrl.measure.evaluation import Evaluation
from emailrl.records.trajectory import Scenario, StopReason, Trajectory
from emailrl.settings import Settings


def trajectory(number: int, stop_reason: StopReason, exception: str | None = None, **rubric: Any) -> Trajectory:
    scenario = Scenario(f"q{number}", "?", "!", [], "a@x", "2001-01-01")
    return Trajectory(
        f"{number}", f"{number}", scenario, rubric=rubric, stop_reason=stop_reason, exception=exception,
        reward_terms={"outcome": 0.0},
    )  # fmt: skip


ENDINGS = [
    trajectory(0, StopReason.ANSWERED, answer_correct=True, attempted_answer=True),
    trajectory(1, StopReason.ANSWERED, answer_correct=False, attempted_answer=True),
    trajectory(2, StopReason.ANSWERED, "JudgeError: away", answer_correct=None, attempted_answer=True),
    trajectory(3, StopReason.ANSWERED, answer_correct=False, attempted_answer=False, returned_i_dont_know=True),
    trajectory(4, StopReason.TRUNCATED, answer_correct=False, attempted_answer=False),
    trajectory(5, StopReason.RAN_OUT_OF_TURNS, answer_correct=False, attempted_answer=False),
    trajectory(6, StopReason.RAN_OUT_OF_TURNS, answer_correct=False, attempted_answer=False),
    trajectory(7, StopReason.EXCEPTION, "OSError: gone", answer_correct=False),
]


def shown(table: RenderableType) -> list[str]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_a_rollouts_endings_are_told_apart() -> None:
    lines = shown(rollout_table(Evaluation(ENDINGS), 8, 2.0, Settings(), None, Path("out.jsonl")))
    assert "ended answered 3, did not know 1, no answer (ran out of turns 2, truncated 1) 3, failed 1" in lines
    assert "trajectories 8 in 2.0 s (4.00 per second)" in lines
    resumed = shown(rollout_table(Evaluation(ENDINGS), 3, 2.0, Settings(), None, Path("out.jsonl")))
    assert "trajectories 8, 3 of them new, in 2.0 s (1.50 per second)" in resumed
    assert "accuracy 14.3% (95%: 2.6% to 51.3%)" in lines  # of the 7 judged
    assert "found / read source - / -" in lines  # an environment without email


CONDITIONS = {"temperature": 0, "max_turns": 6, "samples": 1, "sequential": False, "thinking": "auto"}
CONDITIONS |= {"reward_name": "art_e"}


def report(*, sequential: bool = False) -> Report:
    result = Result(Subject("nano", "nano"), Evaluation(ENDINGS), False, Path("00-nano.jsonl"))
    return Report([result], CONDITIONS | {"sequential": sequential}, 20, interrupted=True)


def test_a_benchmarks_table_says_what_is_missing_and_not_what_does_not_apply() -> None:
    lines = shown(results_table(report(), 200))
    assert "unjudged 1" in lines and "exceptions 2" in lines
    assert not any(line.endswith(" none") for line in lines if line.startswith("ever found"))
    assert any(
        line.startswith("nano: interrupted after 8 of 20 questions, the ones that finished soonest") for line in lines
    )
    assert "nano: interrupted after 8 of 20 questions, the first ones" in shown(
        results_table(report(sequential=True), 200)
    )


def test_of_several_results_the_higher_accuracy_stands_out() -> None:
    results = [
        Result(Subject(name, name), Evaluation(endings), True, Path("t.jsonl"))
        for name, endings in (("small", ENDINGS[1:3]), ("large", ENDINGS[:2]))
    ]
    console = Console(width=120, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(results_table(Report(results, CONDITIONS, 2), 120))
    [row] = [line for line in captured.get().splitlines() if line.strip().startswith("accuracy")]
    plain, _, bright = row.partition("\x1b[1;32m")
    assert plain.split() == ["accuracy", "0.0%"] and bright.strip().startswith("50.0%")


def test_results_that_do_not_fit_side_by_side_make_several_tables() -> None:
    names = ["runs/grpo_masked/checkpoint-20", "runs/grpo_masked/checkpoint-40", "Qwen/Qwen3-0.6B", "smol-base", "nano"]
    evaluation = Evaluation(ENDINGS)
    results = [Result(Subject(name, name), evaluation, True, Path("t.jsonl")) for name in names]
    for width, tables in ((80, 3), (200, 1), (60, 5)):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(results_table(Report(results, CONDITIONS, 8), width))
        text = captured.get()
        rows = [line.split() for line in text.splitlines() if line.split()[:1] == ["accuracy"]]
        assert len(rows) == tables and sum(len(row) - 1 for row in rows) == 5
        assert all(len(line) <= width for line in text.splitlines())
        heads = text.partition(" → ")[0].split()
        assert {"runs/grpo_masked/", "checkpoint-20", "checkpoint-40", "Qwen3-0.6B", "smol-base", "nano"} <= set(heads)


@pytest.mark.parametrize("best_step", [0, 1])
def test_an_untrained_best_model_is_named_as_such(emailrl, tmp_path: Path, monkeypatch, best_step: int) -> None:
    (tmp_path / "evaluations.jsonl").write_text('{"step": 0, "accuracy": 0.5}\n{"step": 1, "accuracy": 0.25}\n')
    made = Outcome(report(), report(), tmp_path, tmp_path / "page.html", best_step, 60.0)
    monkeypatch.setattr("emailrl.cli.quickstart.cycle", lambda *_: made)
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("emailrl.cli.quickstart.has_browser", lambda: True)
    code, out, said = emailrl("quickstart", "--out", "my demo")
    emailrl("quickstart", "--out", "my demo", "--no-open")
    assert code == 0 and ("The best model is the untrained one" in out) is (best_step == 0)
    assert "Test accuracy" in out and "Finished in 1.0 minutes." in out and "Next: " not in out
    view, inspect = said.splitlines()  # the page is found again, then the folder
    assert view.endswith(f" view {tmp_path.parent} # serves the page") and inspect.startswith("Next: cd 'my demo' && ")
    _, out, said = emailrl("quickstart", "--out", "my demo", "--json")
    assert json.loads(out)["best_step"] == best_step and "Test accuracy" in said
    assert opened == [(tmp_path / "page.html").as_uri()]


@pytest.mark.parametrize(
    ("environment", "is_terminal", "expected"),
    [
        ({"DISPLAY": ":0"}, True, True),
        ({"DISPLAY": ":0"}, False, False),
        ({}, True, False),
        ({"DISPLAY": ":0", "CI": "1"}, True, False),
    ],
)
def test_a_page_opens_only_before_somebody(
    monkeypatch, environment: dict[str, str], is_terminal: bool, expected: bool
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: is_terminal))
    monkeypatch.setattr("sys.platform", "linux")
    assert has_browser() is expected
