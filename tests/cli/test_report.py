"""``emailrl report`` and ``inspect-trajectory --html``: which page is written, where, and what is said of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from emailrl.records import write_records, write_trajectories
from emailrl.records.trajectory import Trajectory


@pytest.fixture
def run_dir(tmp_path: Path, trajectory: Trajectory) -> Path:
    folder = tmp_path / "outputs" / "grpo_masked"
    for name, count in (("eval-000000", 2), ("step-000001", 3)):
        made = [replace(trajectory, id=f"{name}-{number}") for number in range(count)]
        write_trajectories(folder / "trajectories" / f"{name}.jsonl", made)
    return folder


def test_report_writes_the_newest_run_into_this_folder(emailrl, run_dir: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "grpo_masked.html")  # it was not named
    code, _, error = emailrl("report", "--overwrite")
    assert code == 2 and "pipe" in error
    (tmp_path / "grpo_masked.html").unlink()
    code, out, said = emailrl("report", "--json")
    target = tmp_path / "grpo_masked.html"
    assert code == 0 and json.loads(out)["html"] == str(target) and json.loads(out)["num_trajectories"] == 5
    assert "5 trajectories" in said and "with email text" in said
    assert "<title>grpo_masked · emailrl</title>" in target.read_text(encoding="utf-8")


def test_a_page_is_overwritten_only_when_asked(emailrl, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run.html").write_text("mine")
    code, _, error = emailrl("report", run_dir, "--html", "run.html")
    assert code == 2 and "run.html already exists" in error and (tmp_path / "run.html").read_text() == "mine"
    code, _, said = emailrl("report", "outputs", "--html", "run.html", "--overwrite")
    assert code == 0 and "Newest in outputs: outputs/grpo_masked\n" in said
    assert (tmp_path / "run.html").stat().st_size > 10_000


def test_numbers_alone_or_else_the_newest_benchmark_are_reported(
    emailrl, tmp_path: Path, trajectory: Trajectory
) -> None:
    write_records(tmp_path / "numbers" / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    code, said, _ = emailrl("report", "numbers")
    assert code == 0 and "0 trajectories" in said and "numbers only" in said
    code, _, error = emailrl("report")
    assert code == 2 and "Make one (emailrl quickstart, train, benchmark or rollout)" in error
    folder = tmp_path / "outputs" / "benchmarks" / "20260101-000000"
    write_trajectories(folder / "trajectories" / "nano.jsonl", [trajectory])
    code, out, said = emailrl("report")
    assert code == 0 and f"Newest: {folder.relative_to(tmp_path)}\n" in said and "1 trajectory" in out
    assert (tmp_path / "20260101-000000.html").is_file()


def test_inspect_writes_a_run_a_file_or_one_trajectory_redacted_if_asked(emailrl, run_dir: Path) -> None:
    file = run_dir / "trajectories" / "eval-000000.jsonl"
    for target, arguments, count in (
        ("run.html", (run_dir,), "5 trajectories"),
        ("file.html", (file,), "2 trajectories"),
        ("one.html", (file, "--index", "0"), "1 trajectory"),
    ):
        code, out, said = emailrl("inspect-trajectory", *arguments, "--html", target)
        assert code == 0 and count in out and count not in said
    assert "Left out: 1 of the 2 trajectories in eval-000000.jsonl" in said
    assert "redacted" in emailrl("report", run_dir, "--html", "a.html", "--redact")[1]
    assert "redacted" not in emailrl("report", run_dir, "--html", "b.html")[1]
