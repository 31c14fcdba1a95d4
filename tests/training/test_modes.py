"""Modes as data: which tokens each trains, where its trajectories come from, what the static prompt holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from emailrl.agent.task import StaticPromptEnvironment
from emailrl.mail import Mailbox, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall
from emailrl.training.algorithms import MODES

SCENARIO = Scenario("q1", "Which room is the budget meeting in?", "B12", ["<src@x>"], "ann@x.com", "2001-05-02")


def test_what_a_mode_trains_what_bounds_it_and_whose_reward_it_takes() -> None:
    assert {name: (mode.loss_mask, mode.epochs_bound, mode.reward) for name, mode in MODES.items()} == {
        "masked": ("sampled", False, None),
        "rollout": ("after_prompt", True, None),
        "simple": ("completion", True, "heuristic"),
    }


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Mailbox]:
    sent, body = datetime(2001, 4, 1, tzinfo=UTC), "The budget meeting is in B12."
    mails = [RawEmail("<src@x>", "News", "bob@x.com", ["ann@x.com"], [], [], sent, body, "")]
    build_database(iter(mails), tmp_path / "m.db")
    with closing(open_mailbox(tmp_path / "m.db", "ann@x.com", until=SCENARIO.query_date)) as box:
        yield box


def final(**arguments: Any) -> Message:
    return Message("assistant", "", [ToolCall("return_final_answer", arguments)])


UNKNOWN, SEARCH = ToolCall("fly", {}), ToolCall("search_emails", {"keywords": ["room"]})


@pytest.mark.parametrize(
    ("message", "rubric", "answer"),
    [
        (Message("assistant", "B12"), {"bad_tool_call_args"}, None),
        (Message("assistant", "<tool_call>", parse_error="not closed"), {"cant_parse_tool_call"}, None),
        (Message("assistant", "", [UNKNOWN]), {"bad_tool_call_name"}, None),
        (final(answer=3), {"bad_tool_call_args"}, None),
        (Message("assistant", "", [SEARCH]), set(), None),
        (final(answer="B12", sources=["<src@x>"]), {"attempted_answer", "sources_correct"}, "B12"),
        (final(answer="I don't know.", sources=None), {"returned_i_dont_know"}, "I don't know."),
    ],
)
def test_a_static_prompt_is_over_after_one_completion(
    message: Message, rubric: set[str], answer: str | None, mailbox: Any
) -> None:
    environment = StaticPromptEnvironment(SCENARIO, mailbox)
    environment.start()
    result = environment.step(message)
    assert (result.done, result.stop_reason, result.messages) == (True, StopReason.COMPLETED, [])
    fields = environment.rubric
    assert {name for name in fields.__slots__ if getattr(fields, name) is True} == rubric
    assert fields.num_turns == 1 and environment.final_answer == answer
