"""Benchmarks and rollouts that are killed, interrupted or asked to end: nothing played is lost, or played again."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end.commands import begin, exit_code

from emailrl.questions.load import questions_file, write_demo
from emailrl.records import read_records
from emailrl.settings import StoreSettings

SETTINGS = """\
model_name = "nano"
emailrl_db = "mail.db"
questions = "mail_questions.jsonl"
max_turns = 6
max_tokens = 96
max_batch_trajectories = 2
judge = "offline"
"""
COMMANDS = {
    "benchmark": ("benchmark", "--limit", "12", "--out", "out"),
    "rollout": ("rollout", "--limit", "6", "--num-generations", "2", "--temperature", "1", "--out", "out/00.jsonl"),
}
FILES = {"benchmark": Path("out/trajectories/00-nano.jsonl"), "rollout": Path("out/00.jsonl")}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo mailbox, its questions and settings."""
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder / "mail.db", settings=StoreSettings(), seed=42, overwrite=True)
    assert questions_file(folder / "mail.db") == folder / "mail_questions.jsonl"
    (folder / "emailrl.toml").write_text(SETTINGS)
    return folder


@pytest.fixture(scope="module")
def whole(demo: Path) -> dict[str, list[Any]]:
    """What the commands write where nothing disturbs them."""
    return {name: records(play(demo, demo / name, *command), name) for name, command in COMMANDS.items()}


def settle(demo: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in demo.iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file)
    return folder


def play(demo: Path, folder: Path, *command: str) -> Path:
    assert exit_code(begin(settle(demo, folder), *command)) == 0, (folder / "output.txt").read_text()
    return folder


def records(folder: Path, name: str) -> list[Any]:
    """The trajectories without their times; log-probabilities to four digits, for who plays beside whom rounds them."""

    def comparable(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: comparable(item) for key, item in value.items() if key not in ("seconds", "tool_seconds")}
        if isinstance(value, list):
            return [comparable(item) for item in value]
        return round(value, 4) if isinstance(value, float) else value

    return [comparable(record) for record in read_records(folder / FILES[name])]


def times(folder: Path, name: str) -> dict[str, float]:
    return {record["id"]: record["seconds"] for record in read_records(folder / FILES[name])}


def ended(folder: Path, name: str) -> int:
    file = folder / FILES[name]
    return file.read_bytes().count(b"\n") if file.exists() else 0


def disturb(folder: Path, name: str, number: int, *more: str, when: Callable[[], bool]) -> int:
    """Begin the command and send it a signal once ``when`` says so; its exit code."""
    child = begin(folder, *COMMANDS[name], *more)
    while not when() and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.005)
    os.kill(child, number)
    return exit_code(child)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_what_has_ended_is_kept_and_only_the_rest_is_played(
    demo: Path, whole: dict[str, list[Any]], tmp_path: Path, name: str, number: signal.Signals
) -> None:
    folder = settle(demo, tmp_path / "disturbed")
    code = disturb(folder, name, number, when=lambda: ended(folder, name) >= 4)
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 130), (folder / "output.txt").read_text()
    kept = times(folder, name)
    assert 4 <= len(kept) < 12
    if number is not signal.SIGKILL:
        told = (folder / "output.txt").read_text()
        assert "--resume --out out" in told and told.endswith("interrupted\n")
        assert all(record["reward_terms"] for record in records(folder, name))
    assert exit_code(begin(folder, *COMMANDS[name], "--resume")) == 0, (folder / "output.txt").read_text()
    assert records(folder, name) == whole[name]
    assert kept.items() <= times(folder, name).items()  # to the microsecond: none was played again


def test_a_resumed_benchmark_reports_all_and_refuses_other_conditions(demo: Path, tmp_path: Path) -> None:
    folder = settle(demo, tmp_path / "disturbed")
    assert disturb(folder, "benchmark", signal.SIGTERM, when=lambda: ended(folder, "benchmark") >= 2) == 130
    report = json.loads((folder / "out" / "results.json").read_text())
    assert report["interrupted"] and not report["results"][0]["complete"]
    assert "the ones that finished soonest: a biased sample" in " ".join((folder / "output.txt").read_text().split())
    for change, told in (
        (("--limit", "11"), "num questions was 12, now 11"),
        (("--sequential",), "sequential was false, now true"),
    ):
        assert exit_code(begin(folder, *COMMANDS["benchmark"], "--resume", *change)) == 2
        line = (folder / "output.txt").read_text().splitlines()[-1]
        assert line.startswith("error: out/conditions.json was started under other conditions: ") and told in line
    assert exit_code(begin(folder, *COMMANDS["benchmark"])) == 2
    assert "Use --resume, another --out, or --overwrite." in (folder / "output.txt").read_text().splitlines()[-1]
    assert exit_code(begin(folder, *COMMANDS["benchmark"], "--resume")) == 0
    report = json.loads((folder / "out" / "results.json").read_text())
    assert (
        not report["interrupted"] and report["results"][0]["complete"] and report["results"][0]["num_questions"] == 12
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_sigkill_at_random_moments(demo: Path, whole: dict[str, list[Any]], tmp_path: Path, name: str) -> None:
    folder, rng = settle(demo, tmp_path / "killed"), random.Random(13)
    begun = time.monotonic()
    disturb(folder, name, signal.SIGKILL, when=lambda: ended(folder, name) >= 1)
    so_long = time.monotonic() - begun
    for _ in range(10):
        end = time.monotonic() + rng.uniform(0.3, 1.3) * so_long
        resume = ("--resume",) if list((folder / "out").glob("*conditions.json")) else ()
        if disturb(folder, name, signal.SIGKILL, *resume, when=lambda: time.monotonic() >= end) == 0:  # noqa: B023
            break
        list(read_records(folder / FILES[name]))  # no line but the last is torn
    assert exit_code(begin(folder, *COMMANDS[name], "--resume")) == 0, (folder / "output.txt").read_text()
    assert records(folder, name) == whole[name]
