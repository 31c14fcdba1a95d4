"""Scripted experts: what they say for given habits, and that their worlds can be solved the good way."""

from __future__ import annotations

import json
import random

import pytest

from emailrl.mail.demo import TOPICS, ProjectFact, make_world
from emailrl.records.trajectory import Message
from emailrl.sft.demo import GIVE_UP, USUAL, Habits, expert, transcripts
from emailrl.sft.examples import next_turn

QUOTE = next(topic for topic in TOPICS if topic.name == "quote")
FACT = ProjectFact("Velmora", QUOTE, "$48,210", "<000002>")
GOOD = Habits(two_keywords=1, two_keywords_usual=1, topic_only=0, open_first=0, search_again=1, try_next=0)
POOR = Habits(two_keywords=0, two_keywords_usual=0, topic_only=0, open_first=0, search_again=0, try_next=0)
START = [Message("system", ""), Message("user", "What was the quote for Velmora?")]


def call_of(text: str) -> tuple[str, dict[str, object]]:
    body = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    return body["name"], body["arguments"]


def hits(*pairs: tuple[str, str]) -> Message:
    return Message("tool", json.dumps([{"message_id": i, "snippet": s} for i, s in pairs]))


def test_the_good_way_word_for_word() -> None:
    turns = expert(FACT, random.Random(0), GOOD)
    assert next_turn(turns, START) == (
        '<tool_call>\n{"name": "search_emails", "arguments": {"keywords": ["Velmora", "quote"], "max_results": 3}}'
        "\n</tool_call>"
    )
    found = hits(("<000009>", "still waiting for the Velmora quote"), ("<000002>", "Velmora quote is $48,210"))
    assert call_of(next_turn(turns, [*START, found])) == ("read_email", {"message_id": "<000002>"})
    mail = Message("tool", json.dumps({"message_id": "<000002>", "body": "…"}))
    assert call_of(next_turn(turns, [*START, found, mail])) == (
        "return_final_answer",
        {"answer": "$48,210", "sources": ["<000002>"]},
    )


def test_the_poor_way_searches_one_keyword_and_gives_up() -> None:
    turns = expert(FACT, random.Random(0), POOR)
    assert call_of(next_turn(turns, START))[1]["keywords"] == ["Velmora"]
    nothing_right = hits(("<000001>", "the Velmora room is B101"))
    assert call_of(next_turn(turns, [*START, nothing_right])) == (
        "return_final_answer",
        {"answer": GIVE_UP, "sources": []},
    )


def test_a_mail_about_the_topic_is_opened_where_the_right_one_is_hidden() -> None:
    turns = expert(FACT, random.Random(0), POOR)
    next_turn(turns, START)
    other = hits(("<000001>", "the Velmora room is B101"), ("<000007>", "the old QUOTE for Velmora"))
    assert call_of(next_turn(turns, [*START, other])) == ("read_email", {"message_id": "<000007>"})
    wrong = Message("tool", json.dumps({"message_id": "<000007>", "body": "…"}))
    assert call_of(next_turn(turns, [*START, other, wrong]))[1] == {"answer": GIVE_UP, "sources": []}


def test_habits_decide_how_often_both_keywords_are_searched() -> None:
    world = make_world(1, "train", 2000)
    usual = next(f for f in world.facts if f.topic.name in USUAL)
    rare = next(f for f in world.facts if f.topic.name not in USUAL)

    def share(fact: ProjectFact) -> float:
        first = [next_turn(expert(fact, random.Random(i), Habits()), START) for i in range(400)]
        return sum(len(call_of(text)[1]["keywords"]) == 2 for text in first) / 400  # type: ignore[arg-type]

    assert share(usual) == pytest.approx(0.8, abs=0.06)
    assert share(rare) == pytest.approx(0.15, abs=0.06)


@pytest.mark.parametrize(("habits", "low", "high"), [(GOOD, 0.98, 1.0), (POOR, 0.25, 0.6)])
def test_good_habits_solve_the_worlds_and_poor_ones_do_not(habits: Habits, low: float, high: float) -> None:
    played = [messages for number in range(3) for messages in transcripts(number, seed=7, times=1, habits=habits)]
    answered = [call_of(messages[-1].content)[1] for messages in played]
    right = sum(bool(arguments.get("sources")) for arguments in answered)
    assert low <= right / len(played) <= high
