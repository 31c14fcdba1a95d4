"""Rewards of the user's own, by Python path."""

from __future__ import annotations

from pathlib import Path

import pytest

from emailrl.errors import EmailRLError, UsageError
from emailrl.rewards.custom import load_reward
from emailrl.trajectory import Scenario, Trajectory

TRAJECTORY = Trajectory("t", "g", Scenario("1", "Q?", "A", [], "a@b", "2002-01-01"), final_answer="four")

REWARDS = """
def length(trajectory): return len(trajectory.final_answer)
def terms(trajectory): return {"a": 1, "b": -0.5}
def text(trajectory): return "much"
def endless(trajectory): return float("inf")
def breaks(trajectory): return 1 / 0
number = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)
    return file


def test_a_number_and_a_dict(path: Path) -> None:
    assert load_reward(f"{path}:length")(TRAJECTORY) == {"length": 4.0}
    assert load_reward(f"{path}:terms")(TRAJECTORY) == {"a": 1.0, "b": -0.5}


def test_by_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(path.parent))
    assert load_reward("my_rewards:length")(TRAJECTORY) == {"length": 4.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("art_f", "Unknown reward: 'art_f'"),
        ("{path}:missing", "has no function or class 'missing'"),
        ("{path}:number", "has no function or class 'number'"),
        ("{path}x.py:length", "There is no file"),
        ("no_such_module_here:length", "ModuleNotFoundError"),
    ],
)
def test_what_is_not_there(path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_reward(name.format(path=path))


def test_a_file_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def reward(:")
    with pytest.raises(UsageError, match="SyntaxError"):
        load_reward(f"{tmp_path / 'bad.py'}:reward")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "returned 'much'"),
        ("endless", "must be finite"),
        ("breaks", r"raised: .*my_rewards.py, line 6: ZeroDivisionError: division by zero"),
    ],
)
def test_what_a_reward_must_not_do(path: Path, name: str, message: str) -> None:
    with pytest.raises(EmailRLError, match=message):
        load_reward(f"{path}:{name}")(TRAJECTORY)
