"""The page in a browser: what it draws of a run, and what its address selects."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import needs_chromium, shown
from page.conftest import WRONG, make_run, written

from emailrl.records import write_records, write_trajectories
from emailrl.records.trajectory import Trajectory


@pytest.fixture
def file(tmp_path: Path, trajectory: Trajectory) -> Path:
    """The page of a run that was confirmed on other questions and benchmarked."""
    folder = make_run(tmp_path / "run", trajectory, groups=1)
    held = {"accuracy_low": 0.0, "accuracy_high": 1.0, "reward": 0.5, "num_questions": 1, "num_turns": 2.0}
    (folder / "confirmed.json").write_text(json.dumps({"step": 2, "accuracy": 0.625, **held}))
    tested = {"checkpoint": str(folder / "best_model"), "complete": True, "accuracy": 0.375, **held}
    (tmp_path / "benchmarks" / "one").mkdir(parents=True)
    (tmp_path / "benchmarks" / "one" / "results.json").write_text(json.dumps({"results": [{"model": "x"}, tested]}))
    return written(folder)


def text_of(markup: str, name: str) -> str:
    """The text inside the element of an id."""
    [content] = re.findall(rf'id="{name}"[^>]*>(.*?)<', markup)
    return str(content)


@needs_chromium
def test_the_overview_has_curves_failures_and_changed_questions(file: Path, tmp_path: Path) -> None:
    markup = shown(file, tmp_path / "profile", "")
    for title in ("Accuracy", "Reward", "Entropy", "Trainable share of tokens", "Seconds by phase"):
        assert (f"<strong>{title}</strong>" in markup) == (title != "Trainable share of tokens")  # not recorded
    assert "0.0% → 100.0%" in markup
    assert "validation from 0.0% at step 0 to 100.0% at step 2" in markup  # what a screen reader says of the curve
    # Rewards 0, 1, 2 of one group: no interval from a single group, so no band is drawn.
    assert 'class="band' not in markup
    assert 'Wrong before, correct after <span class="count">1</span>' in markup
    assert "1 trajectory: wrong, gold email not found, evaluation at step 0" in markup


@needs_chromium
@pytest.mark.parametrize(
    ("fragment", "counted"),
    [
        ("#view=list", "8 trajectories"),
        ("#view=list&source=step&step=2", "3 of 8 trajectories"),
        ("#view=list&verdict=correct", "3 of 8 trajectories"),
        ("#view=list&file=step-000001.jsonl&rmin=0.5&rmax=2", "2 of 8 trajectories"),
        ("#view=list&q=BOB", "1 of 8 trajectories"),
    ],
)
def test_filters_are_in_the_address(file: Path, tmp_path: Path, fragment: str, counted: str) -> None:
    assert text_of(shown(file, tmp_path / "profile", fragment), "counted") == counted


@needs_chromium
def test_a_group_and_a_question_stand_side_by_side(file: Path, tmp_path: Path) -> None:
    markup = shown(file, tmp_path / "profile", "#view=list&t=step-000001.jsonl%400&side=group")
    columns = re.findall(r'<section class="column" aria-label="([^"]*)"', markup)
    assert columns == ["Rollout 1", "Rollout 2", "Rollout 3"]
    assert "rewards from 0 to 2, mean 1" in markup.replace(".00", "")
    markup = shown(file, tmp_path / "profile", "#view=list&t=eval-000002.jsonl%400&side=question")
    columns = re.findall(r'<section class="column" aria-label="([^"]*)"', markup)
    assert columns == ["evaluation at step 0", "evaluation at step 2"]


@needs_chromium
def test_a_run_without_trajectories_shows_its_curves_and_says_so(tmp_path: Path) -> None:
    steps = [{"step": 1, "loss": 0.5, "val_loss": None}, {"step": 2, "loss": 0.25, "val_loss": 0.4}]
    write_records(tmp_path / "sft" / "metrics.jsonl", steps)
    target = written(tmp_path / "sft")
    markup = shown(target, tmp_path / "profile")
    assert "loss from 0.500 at step 1 to 0.250 at step 2; validation from 0.400 at step 2" in markup
    assert "0.500 → 0.250" in markup and "This run kept no trajectories" in markup
    assert "Click a point" not in markup and "Crashed" not in markup
    assert "No trajectories" in shown(target, tmp_path / "profile", "#view=list")


@needs_chromium
def test_two_benchmarked_policies_are_compared_by_name(tmp_path: Path, trajectory: Trajectory) -> None:
    folder = tmp_path / "bench"
    results = []
    for number, (model, right) in enumerate((("small", 1), ("large", 11))):
        file = folder / "trajectories" / f"{number:02}-{model}.jsonl"
        asked = [replace(trajectory.scenario, id=f"q{n}", question=f"Who paid bill {n}?") for n in range(12)]
        made = [
            replace(trajectory, id=f"{model}-{n}", scenario=each, rubric=trajectory.rubric if n < right else WRONG)
            for n, each in enumerate(asked)
        ]
        write_trajectories(file, made)
        numbers = {"accuracy": right / 12, "accuracy_low": 0.1, "accuracy_high": 0.9, "reward": 0.5, "num_turns": 2.0}
        results.append({"model": model, "trajectories": str(file), "num_questions": 12, **numbers})
    results[0] |= {"checkpoint": "/runs/ann/outputs/grpo/best_model", "model": "/runs/ann/outputs/grpo/best_model"}
    compared = {"num_questions": 12, "better_first": 0, "better_second": 10, "p_value": 0.00195, "unit": "inbox"}
    comparisons = [{"first": results[0]["model"], "second": "large"} | compared]
    (folder / "results.json").write_text(json.dumps({"results": results, "comparisons": comparisons}))
    target = written(folder)
    markup = shown(target, tmp_path / "profile")
    assert "<dt>Accuracy, large</dt>" in markup and "91.7%" in markup and "11 of 24" not in markup
    assert 'Correct only in the benchmark of large <span class="count">10</span>' in markup
    assert 'Correct only in the benchmark of grpo/best_model <span class="count">0</span>' in markup
    assert 'Wrong in both <span class="count">1</span>' in markup and "exact paired test by inbox" in markup
    assert re.search(r'class="change broken"><h3>Correct only in the benchmark of large', markup)  # it was there before
    assert "p = 0.00195" in markup and ">grpo/best_model against large" in markup
    assert '<th dir="auto" title="/runs/ann/outputs/grpo/best_model" scope="row">grpo/best_model</th>' in markup
    assert '<span class="who">2 more</span>' in markup  # eight are listed, the others folded
    side = shown(target, tmp_path / "profile", "#view=list&t=01-large.jsonl%400&side=question")
    assert ">cited</span>" in side
