"""The pages on rewards and on the benchmark say what the code does: their numbers and rows, worked out again."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from emailrl.agent.task import Rubric
from emailrl.measure.evaluation import Evaluation
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall, Trajectory, Turn
from emailrl.rewards.rubric import art_e_reward, heuristic_reward
from emailrl.settings import RewardWeightSettings
from emailrl.settings.names import by_name

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_examples_of_the_heuristic_reward() -> None:
    text = (DOCS / "reference/rewards.md").read_text(encoding="utf-8")
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
    text = (DOCS / "reference/rewards.md").read_text(encoding="utf-8")
    cases = re.findall(r"^\| .+? \| (-?[\d.]+) \+ .* \| `(REWARD_\w+)` \|$", text, re.MULTILINE)
    weights = RewardWeightSettings()
    assert {name.lower(): float(number) for number, name in cases} == {
        name: getattr(weights, name) for name in type(weights).model_fields if name.startswith("reward_")
    }
    assert all(name.lower() in by_name() for _, name in cases)


def worth(
    stop: StopReason = StopReason.ANSWERED, *, weights: dict[str, float] | None = None, **rubric: object
) -> float:
    """What ART-E's reward pays for a rollout of at most ten turns."""
    made = Trajectory("t", "g", Scenario("q", "?", "!", [], "a@x", "2001-01-01"), rubric=asdict(Rubric(**rubric)))  # type: ignore[arg-type]
    made.stop_reason = stop
    return sum(art_e_reward(RewardWeightSettings(**(weights or {})), 10)(made).values())


def break_even(
    searched: dict[str, bool], *, afterwards: bool = False, weights: dict[str, float] | None = None
) -> float:
    """The accuracy above which answering earns more than "I don't know", at once or after the same search, in %."""
    cited = {"sources_correct": True, "num_sources": 1}
    right = worth(weights=weights, attempted_answer=True, answer_correct=True, num_turns=3, **cited)
    wrong = worth(weights=weights, attempted_answer=True, num_turns=3, num_sources=1, **searched)
    found = {name: value for name, value in searched.items() if name.startswith("ever_")} if afterwards else {}
    unknown = worth(weights=weights, returned_i_dont_know=True, num_turns=1, **found)
    return 100 * (unknown - wrong) / (right - wrong)


def test_when_answering_pays_is_worked_out_from_the_reward_itself() -> None:
    text = (DOCS / "reference/rewards.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (found.*?) \| (-[\d.]+) \| .* = ([\d.]+)% \| ([\d.]+) \| ([\d.]+)% \|$", text, re.MULTILINE)
    read = {"ever_found_right_email": True, "ever_read_right_email": True}
    searches = [read, read | {"sources_correct": True}, {}]
    assert len(rows) == len(searches)
    for (_, wrong, at_once, unknown, afterwards), searched in zip(rows, searches, strict=True):
        found = {name: value for name, value in searched.items() if name.startswith("ever_")}
        assert worth(attempted_answer=True, num_turns=3, **searched) == pytest.approx(float(wrong))
        assert worth(returned_i_dont_know=True, **found) == pytest.approx(float(unknown))
        assert break_even(searched) == pytest.approx(float(at_once), abs=0.05)
        assert break_even(searched, afterwards=True) == pytest.approx(float(afterwards), abs=0.05)
    moved = re.findall(r"`(REWARD_\w+)=(-?[\d.]+)`(?: makes it)? ([\d.]+)%", text)
    assert len(moved) == 2
    for name, value, share in moved:
        assert break_even(read, weights={name.lower(): float(value)}) == pytest.approx(float(share), abs=0.05)


def test_the_settings_that_are_said_to_lower_the_bar_do() -> None:
    read = {"ever_found_right_email": True, "ever_read_right_email": True}
    steps = {"reward_no_answer": -0.1, "bonus_no_invalid_id": -0.05, "reward_wrong": 0.1, "reward_correct": 0.1}
    steps |= {f"bonus_{name}": 0.1 for name in ("cited", "few_sources", "few_turns", "found", "read")}
    for setting, step in steps.items():
        moved = break_even(read, weights={setting: getattr(RewardWeightSettings(), setting) + step})
        assert moved < break_even(read) - 0.1, setting


def test_every_row_of_a_benchmark_is_explained() -> None:
    scenario = Scenario("q", "Q?", "A", [], "a@x", "2001-01-01")
    whole = Trajectory("t", "g", scenario, rubric=dict.fromkeys(Rubric.__dataclass_fields__, 0))
    rows = Evaluation([whole, replace(whole, id="u")]).metrics()
    text = (DOCS / "guides/benchmark.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`(\w+)`", text))
    assert {name for name in rows if name != "answer_correct"} - explained == set()
