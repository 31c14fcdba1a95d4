"""Rewards of the user's own, by Python path."""

from __future__ import annotations

import py_compile
from dataclasses import replace
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from emailrl.base.custom import load_part
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.records.trajectory import Message, Scenario, Trajectory
from emailrl.rewards.custom import load_reward
from emailrl.rewards.scorer import build_scorer
from emailrl.settings import AgentSettings, RewardSettings, RewardWeightSettings

TRAJECTORY = Trajectory("t", "g", Scenario("1", "Q?", "A", [], "a@b", "2002-01-01"), final_answer="four")

REWARDS = """
def length(trajectory): return len(trajectory.final_answer)
def terms(trajectory): return {"a": 1, "b": -0.5}
def text(trajectory): return "much"
def endless(trajectory): return float("inf")
def breaks(trajectory): return 1 / 0
def leaves(trajectory): raise SystemExit(3)
def closes(trajectory): raise GeneratorExit
def vast(trajectory): return -1e10
number = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "my_rewards.py"
    file.write_text(REWARDS)
    return file


def test_a_number_and_a_dict_by_path_and_by_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_reward(f"{path}:length")(TRAJECTORY) == {"length": 4.0}
    assert load_reward(f"{path}:terms")(TRAJECTORY) == {"a": 1.0, "b": -0.5}
    monkeypatch.chdir(path.parent)
    assert load_reward("my_rewards:length")(TRAJECTORY) == {"length": 4.0}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("art_f", UsageError, "Unknown reward: 'art_f'"),
        ("{path}:missing", UsageError, "has no function or class 'missing'"),
        ("{path}:number", UsageError, "has no function or class 'number'"),
        ("{path}x.py:length", UsageError, "No such file"),
        ("no_such_module_here:length", UsageError, "ModuleNotFoundError"),
        ("{path}:text", EmailRLError, "returned 'much'"),
        ("{path}:endless", EmailRLError, "must be finite"),
        ("{path}:leaves", EmailRLError, r"raised: .*my_rewards.py, line 7: SystemExit: 3"),
        ("{path}:closes", EmailRLError, r"raised: .*my_rewards.py, line 8: GeneratorExit"),
        ("{path}:vast", EmailRLError, "must lie within ±1e\\+09"),
        ("{path}:breaks", EmailRLError, r"raised: .*my_rewards.py, line 6: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_not_there_and_what_a_reward_must_not_do(
    path: Path, name: str, error: type[EmailRLError], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_reward(name.format(path=path))(TRAJECTORY)


def test_a_file_may_hold_dataclasses_import_its_neighbours_and_is_loaded_once(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("WORTH = 2.5\n")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour_of_mine import WORTH\n"
        "@dataclass\nclass Table:\n    worth: float = WORTH\nseen = []\n"
        "def first(trajectory):\n    seen.append(1)\n    return Table().worth\n"
        "def second(trajectory): return len(seen)\n"
    )
    first, second = (load_reward(f"{tmp_path / 'mine.py'}:{name}") for name in ("first", "second"))
    assert first(TRAJECTORY) == {"first": 2.5}  # type: ignore[operator]
    assert second(TRAJECTORY) == {"second": 1.0}  # type: ignore[operator]
    (tmp_path / "mine.py").write_text("def first(trajectory): return 7\n")
    assert load_reward(f"{tmp_path / 'mine.py'}:first")(TRAJECTORY) == {"first": 7.0}  # type: ignore[operator]


@pytest.mark.parametrize("name", ["beside_pyc.py:f", "beside_pyc_named:f", "pyc_package.inner:f", "pyc_importer.py:f"])
def test_bytecode_of_other_source_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An unchecked ``.pyc`` is run by Python itself whatever the source says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyc_package").mkdir()
    trusted, other = "def f(trajectory): return 1\n", "def f(trajectory): return 2\n"
    (tmp_path / "pyc_importer.py").write_text("from pyc_neighbour import f\n")
    (tmp_path / "other.py").write_text(other)
    for file in ("beside_pyc.py", "beside_pyc_named.py", "pyc_package/inner.py", "pyc_neighbour.py"):
        (tmp_path / file).write_text(trusted)
        compiled = cache_from_source(str(tmp_path / file))
        py_compile.compile("other.py", compiled, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH)
    assert load_reward(name)(TRAJECTORY) == {"f": 1.0}  # type: ignore[operator]


def test_what_is_installed_below_the_working_directory_keeps_its_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (tmp_path / "compiled.py").write_text("number = 5\n")
    py_compile.compile(str(tmp_path / "compiled.py"), str(installed / "only_compiled_here.pyc"))
    (tmp_path / "uses_installed.py").write_text(
        "import only_compiled_here\ndef f(t): return only_compiled_here.number\n"
    )
    monkeypatch.syspath_prepend(str(installed))
    assert load_reward(f"{tmp_path / 'uses_installed.py'}:f")(TRAJECTORY) == {"f": 5.0}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = [\n", r"bad.py, line 2: SyntaxError: '\[' was never closed"),
        ("import json\njson.loads('{')\n", r"bad.py, line 2: JSONDecodeError: Expecting property name"),
        ("import sys\nsys.exit(3)\n", r"bad.py, line 2: SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_load_is_told_with_its_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(UsageError, match=message):
        load_reward(f"{tmp_path / 'bad.py'}:reward")


OPENRLHF = """
import torch
calls = []
def reward_func(queries, prompts, labels, **kwargs):
    calls.append((queries, prompts, labels))
    count = torch.tensor([float(len(label)) for label in labels])
    return {"rewards": count, "scores": count / 10, "extra_logs": {"half": count / 2}}
def too_few(queries, prompts, labels): return {"rewards": [1.0]}
def breaks(queries, prompts, labels): return {"rewards": [1 / 0]}
"""


def openrlhf(tmp_path: Path, name: str) -> list[Trajectory]:
    """Two trajectories, scored by a function of that signature."""
    (tmp_path / "rlhf.py").write_text(OPENRLHF)
    messages = [Message("user", "Q?"), Message("assistant", "four")]
    scenarios = [replace(TRAJECTORY.scenario, answer=answer) for answer in ("abcd", "ab")]
    played = [Trajectory(f"t{n}", "g", scenario, messages=messages) for n, scenario in enumerate(scenarios)]
    own = RewardSettings(reward=f"{tmp_path / 'rlhf.py'}:{name}", judge="offline")
    build_scorer(own, RewardWeightSettings(), AgentSettings()).score(played)
    return played


def test_a_reward_function_of_openrlhf_is_called_once_for_all(tmp_path: Path) -> None:
    played = openrlhf(tmp_path, "reward_func")
    assert [t.reward_terms for t in played] == [{"remote": 4.0}, {"remote": 2.0}]
    assert [t.rubric["remote_score"] for t in played] == pytest.approx([0.4, 0.2])
    assert [t.rubric["remote_half"] for t in played] == [2.0, 1.0]
    [call] = load_part(f"{tmp_path / 'rlhf.py'}:reward_func", "reward").call.__globals__["calls"]
    assert call == (["user: Q?\n\nassistant: four"] * 2, ["user: Q?"] * 2, ["abcd", "ab"])


@pytest.mark.parametrize(
    ("name", "message"),
    [("too_few", "replied with 1 rewards for 2 trajectories"), ("breaks", "rlhf.py, line 9: ZeroDivisionError")],
)
def test_a_reward_function_of_openrlhf_that_fails(tmp_path: Path, name: str, message: str) -> None:
    for each in openrlhf(tmp_path, name):
        assert message in (each.exception or "") and each.reward == 0 and not each.reward_terms
