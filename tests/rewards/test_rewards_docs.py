"""``docs/rewards.md`` and ``docs/benchmark.md`` say what the code does: their numbers and rows, worked out again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from emailrl.environment.rubric import Rubric
from emailrl.evaluation import Evaluation
from emailrl.rewards.heuristic import heuristic_reward
from emailrl.settings import RewardWeightSettings
from emailrl.settings.names import by_name
from emailrl.trajectory import Message, Scenario, ToolCall, Trajectory, Turn

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_examples_of_the_heuristic_reward() -> None:
    text = (DOCS / "rewards.md").read_text(encoding="utf-8")
    [question] = re.findall(r'for the question "(.+?)":', text.replace("\n", " "))
    examples = re.findall(
        r"^- `search_emails\(keywords=\[(.+)\]\)`, (\d+) tokens: (.+) = ([\d.]+)$", text, re.MULTILINE
    )
    assert len(examples) == 2
    scenario = Scenario("q", question, "May 3", [], "a@x", "2001-01-01")
    for keywords, tokens, _, total in examples:
        call = ToolCall("search_emails", {"keywords": re.findall(r'"(\w+)"', keywords)})
        turn = Turn([0] * int(tokens), [0.0] * int(tokens), "stop")
        made = Trajectory("t", "g", scenario, messages=[Message("assistant", "", [call])], turns=[turn])
        assert sum(heuristic_reward(100)(made).values()) == pytest.approx(float(total), abs=1e-9)


def test_the_cases_of_art_e_have_the_numbers_of_their_settings() -> None:
    text = (DOCS / "rewards.md").read_text(encoding="utf-8")
    cases = re.findall(r"^\| .+? \| (-?[\d.]+) \+ .* \| `(REWARD_\w+)` \|$", text, re.MULTILINE)
    weights = RewardWeightSettings()
    assert {name.lower(): float(number) for number, name in cases} == {
        name: getattr(weights, name) for name in type(weights).model_fields if name.startswith("reward_")
    }
    assert all(name.lower() in by_name() for _, name in cases)


def test_every_row_of_a_benchmark_is_explained() -> None:
    scenario = Scenario("q", "Q?", "A", [], "a@x", "2001-01-01")
    whole = Trajectory("t", "g", scenario, rubric=dict.fromkeys(Rubric.__dataclass_fields__, 0))
    rows = Evaluation.of([whole, replace(whole, id="u")]).metrics()
    text = (DOCS / "benchmark.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", text))
    assert {name for name in rows if name != "answer_correct"} - explained == set()
