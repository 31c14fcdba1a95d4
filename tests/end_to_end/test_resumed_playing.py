"""Benchmarks and rollouts that are killed, interrupted or asked to end: nothing played is lost, or played again."""

from __future__ import annotations

import json
import os
import signal
import time
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
    "benchmark": ("benchmark", "--limit", "8", "--out", "out"),
    "rollout": ("rollout", "--limit", "4", "--num-generations", "2", "--temperature", "1", "--out", "out/00.jsonl"),
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


@pytest.mark.parametrize(
    ("name", "sent"),
    [("benchmark", "SIGKILL"), ("rollout", "SIGKILL"), ("rollout", "SIGTERM"), ("benchmark", "SIGINT")],
)
def test_what_has_ended_is_kept_and_only_the_rest_is_played(
    demo: Path, whole: dict[str, list[Any]], tmp_path: Path, name: str, sent: str
) -> None:
    folder, number = settle(demo, tmp_path / "disturbed"), signal.Signals[sent]
    child = begin(folder, *COMMANDS[name])
    while not ended(folder, name) >= 4 and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.005)
    os.kill(child, number)
    code, output, results = exit_code(child), folder / "output.txt", folder / "out" / "results.json"
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 130), output.read_text()
    kept = times(folder, name)
    assert 3 <= len(kept) < 8
    if number is not signal.SIGKILL:
        told = output.read_text()
        assert "with --resume\n" in told and told.endswith("interrupted\n")
        assert all(record["reward_terms"] for record in records(folder, name))
        if name == "benchmark":
            assert "the ones that finished soonest: a biased sample" in " ".join(told.split())
            assert json.loads(results.read_text())["interrupted"]
    assert exit_code(begin(folder, *COMMANDS[name], "--resume")) == 0, output.read_text()
    assert records(folder, name) == whole[name]
    assert kept.items() <= times(folder, name).items()  # to the microsecond: none was played again
    if name == "benchmark":
        [result] = (report := json.loads(results.read_text()))["results"]
        assert not report["interrupted"] and result["complete"] and result["num_questions"] == 8
