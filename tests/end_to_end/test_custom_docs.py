"""docs/guides/custom.md as a reader follows it: its files are written, its commands are run, on demo mail with nano."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from emailrl.cli.app import main
from emailrl.questions.load import write_demo
from emailrl.records import read_records, read_trajectories
from emailrl.records.trajectory import Trajectory
from emailrl.settings import StoreSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "guides/custom.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w.]+)`:\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]
SETTINGS = """
model_name = "nano"
db = "mail.db"
questions = "mail_questions.jsonl"
max_turns = 3
max_tokens = 96
judge = "offline"
max_steps = 1
per_device_train_batch_size = 2
num_generations = 2
temperature = 1.0
min_group_std = 0.0
eval_dataset_size = 4
test_set_size = 4
wandb_mode = "disabled"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files, a demo mailbox and settings for runs of a few seconds."""
    folder = tmp_path_factory.mktemp("custom")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "emailrl.toml").write_text(SETTINGS)
    write_demo(folder / "mail.db", seed=42, settings=StoreSettings())
    return folder


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run one line of the page in the folder; returns what it said on stderr."""
    monkeypatch.chdir(place)

    def run(line: str, *more: str) -> str:
        monkeypatch.setattr(sys, "argv", [*shlex.split(line), *more])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr().err
        assert caught.value.code == 0, said
        return said

    return run


def command(*words: str) -> str:
    """The page's only command with all of these words."""
    [line] = [line for line in COMMANDS if all(word in line for word in words)]
    return line


def played(path: Path) -> list[Trajectory]:
    trajectories = list(read_trajectories(path))
    assert [trajectory.exception for trajectory in trajectories] == [None] * len(trajectories)
    return trajectories


def test_the_page_has_the_files_and_commands_that_are_run_here() -> None:
    assert FILES.keys() == {"my_rewards.py", "reward_func.py", "reward_server.py", "my_environment.py"}
    assert len([line for line in COMMANDS if line.startswith("emailrl ")]) == 7


def test_a_reward_in_python(run: Any, place: Path) -> None:
    run(command("rollout", "right_and_brief"), "--limit", "4", "--out", "python.jsonl")
    for trajectory in played(place / "python.jsonl"):
        rubric = trajectory.rubric
        assert trajectory.reward_terms == {
            "right": float(rubric["answer_correct"]),
            "cited": 0.5 * rubric["sources_correct"],
            "turns": -0.05 * rubric["num_turns"],
        }
        assert trajectory.reward == sum(trajectory.reward_terms.values()) != 0


def test_a_reward_function_of_openrlhf(run: Any, place: Path) -> None:
    run(command("reward_func"), "--limit", "4", "--out", "openrlhf.jsonl")
    trajectories = played(place / "openrlhf.jsonl")
    for trajectory in trajectories:
        said = [message.content for message in trajectory.messages if message.role == "assistant"][-1]
        assert trajectory.reward == float(trajectory.scenario.answer.lower() in said.lower())
        assert trajectory.rubric["remote_score"] == trajectory.reward
        assert trajectory.rubric["remote_characters"] >= len(said)
    assert 0.0 < sum(trajectory.reward for trajectory in trajectories) <= 4.0


def test_a_reward_by_http(run: Any, place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    start, _, ampersand = command("reward_server.py").replace("8601", str(port)).rpartition(" ")
    assert ampersand == "&" and start.startswith("python ")
    server = subprocess.Popen([sys.executable, *shlex.split(start)[1:]], cwd=place, stderr=subprocess.DEVNULL)
    try:
        line = command("rollout", "http://").replace("8601", str(port))
        run(line, "--limit", "4", "--out", "http.jsonl")
    finally:
        server.kill()
        server.wait()
    trajectories = played(place / "http.jsonl")
    for trajectory in trajectories:
        right, cited = trajectory.rubric["answer_correct"], len(trajectory.final_sources)
        assert trajectory.reward_terms == {"right": float(right), "sources": -0.1 * cited}
    assert any(trajectory.final_sources for trajectory in trajectories)


def test_an_environment_in_rollout(run: Any, place: Path) -> None:
    run(command("rollout", "FullText"), "--limit", "4", "--out", "environment.jsonl")
    trajectories = played(place / "environment.jsonl")
    tools = [turn for trajectory in trajectories for turn in trajectory.turns if turn.tool_name == "search_emails"]
    assert any('"body": ' in (turn.tool_result or "") for turn in tools)  # whole mails, not snippets
    for trajectory in trajectories:
        searched = [turn for turn in trajectory.turns if turn.tool_name == "search_emails"]
        assert trajectory.rubric["searches"] == len(searched)
        assert len(trajectory.turns) <= 3


def test_an_environment_in_training_and_benchmark(run: Any, place: Path) -> None:
    run(command("train", "FullText"))
    [step] = read_records(place / "outputs/grpo_masked/metrics.jsonl")
    assert step["exceptions"] == step["eval_exceptions"] == 0 and step["trainable_tokens"] > 0
    assert step["eval_searches"] > 0  # evaluations play it too
    [trajectory, *_] = played(place / "outputs/grpo_masked/trajectories/step-000001.jsonl")
    assert trajectory.messages[0].content == "Answer from the mailbox."
    assert trajectory.reward_terms.keys() == {"right", "cited", "turns"}
    run(command("benchmark", "FullText"), "--out", "measured")
    [file] = (place / "measured/trajectories").glob("*.jsonl")
    assert all("searches" in trajectory.rubric for trajectory in played(file))
