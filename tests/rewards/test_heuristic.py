"""The reward of mode simple, term by term."""

from __future__ import annotations

import pytest

from emailrl.records.trajectory import Message, Scenario, ToolCall, Trajectory, Turn
from emailrl.rewards.heuristic import heuristic_reward

SCENARIO = Scenario("1", "When is the pump order due?", "May 20", ["<1@x>"], "ida@corvane.test", "2002-05-10")


def completed(message: Message, tokens: int = 25) -> Trajectory:
    turn = Turn(list(range(tokens)), [0.0] * tokens, "stop")
    messages = [Message("system", "s"), Message("user", SCENARIO.question), message]
    return Trajectory("t", "g", SCENARIO, mode="simple", messages=messages, turns=[turn])


def calls(name: str, /, **arguments: object) -> Message:
    return Message("assistant", "", [ToolCall(name, arguments)])


@pytest.mark.parametrize(
    ("message", "readable", "valid", "useful"),
    [
        (Message("assistant", "<tool_call>{", parse_error="cut off"), -0.25, 0, 0),
        (Message("assistant", "It is due on May 20."), 0, 0, 0),
        (calls("find_mail", keywords=["pump"]), 0.25, 0, 0),
        (calls("search_emails", keywords="pump"), 0.25, 0, 0),
        (calls("search_emails", keywords=[]), 0.25, 0.25, 0),
        (calls("search_emails", keywords=["Pump", "order"]), 0.25, 0.25, 0.5),
        (calls("search_emails", keywords=["pump order"]), 0.25, 0.25, 0.5),
        (calls("search_emails", keywords=["pump", "valve"]), 0.25, 0.25, 0.25),
        (calls("search_emails", keywords=["valve"]), 0.25, 0.25, 0),
        # six words of the question: 0.5 * 6/6 * 3/6
        (calls("search_emails", keywords=["when is the pump order due"]), 0.25, 0.25, 0.25),
        (calls("read_email", message_id="<1@x>"), 0.25, 0.25, 0),
        (calls("return_final_answer", answer="May 20", sources=[]), 0.25, 0.25, 0.5),
        (calls("return_final_answer", answer="May 21", sources=None), 0.25, 0.25, 0),
    ],
)
def test_terms(message: Message, readable: float, valid: float, useful: float) -> None:
    terms = heuristic_reward(max_tokens=100)(completed(message))
    assert terms == pytest.approx({"readable": readable, "valid": valid, "useful": useful, "brevity": 0.075})


def test_brevity_never_punishes() -> None:
    terms = heuristic_reward(max_tokens=100)(completed(Message("assistant", ""), tokens=120))
    assert terms["brevity"] == 0
