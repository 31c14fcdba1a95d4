"""Replies are read however they come, and believed only where the mails bear them out: what counts as stated there."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from emailrl.questions.inbox import Mail
from emailrl.questions.llm.plan import Batch
from emailrl.questions.llm.replies import check_item, is_specific, is_stated, read_reply

ITEM = {"question": "What does the pier cost?", "answer": "$1,200", "message_ids": ["<2@x>"], "how_realistic": 0.8}


def mail(number: int, body: str, day: str = "2001-05-03") -> Mail:
    return Mail(f"<{number}@x>", "Pier works", "bo.lind@x.org", f"{day} 21:15:00", body, ["ana.roe@x.org"], [], [])


BATCH = Batch(
    "ana.roe@x.org",
    "val",
    (mail(1, "Nothing much."), mail(2, "The pier costs $1,200.00, so Gil says."), mail(3, "Bye.", "2001-05-28")),
)
ELSEWHERE = {"<9@x>"}


def check(item: Any = None, **changes: Any) -> tuple[Any, dict[str, int]]:
    dropped: Counter[str] = Counter()
    item = ITEM | changes if item is None else item
    found = check_item(item, BATCH, is_stored=ELSEWHERE.__contains__, seed=1, dropped=dropped)
    return found, dict(dropped)


def test_a_good_item_becomes_a_question() -> None:
    found, dropped = check()
    assert dropped == {}
    assert (found.question, found.answer, found.message_ids) == (ITEM["question"], "$1,200", ["<2@x>"])
    assert (found.inbox_address, found.split, found.kind, found.how_realistic) == ("ana.roe@x.org", "val", "llm", 0.8)
    assert "2001-05-29" <= found.query_date <= "2001-06-27", "1 to 30 days after the newest mail shown"
    assert found.id.startswith("llm-") and len(found.id) == 16


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"message_ids": ["<404@x>"]}, {"confabulated_id": 1, "no_source": 1}),
        ({"message_ids": ["<404@x>", "<405@x>", "<404@x>"]}, {"confabulated_id": 2, "no_source": 1}),
        ({"message_ids": ["<2@x>", "<9@x>"]}, {"outside_prompt": 1}),
        ({"message_ids": ["'; DROP TABLE emails; --"]}, {"confabulated_id": 1, "no_source": 1}),
        ({"answer": "$1,300"}, {"answer_not_found": 1}),
        ({"answer": "at the northern lighthouse"}, {"answer_not_found": 1}),
        ({"answer": "$1,200", "message_ids": ["<1@x>"]}, {"answer_not_found": 1}),
        ({"answer": "Yes, it does"}, {"yes_or_no": 1}),
        ({"answer": "the PIER"}, {"answer_in_question": 1}),
        ({"answer": "?!"}, {"answer_not_found": 1}),
        ({"answer": "so"}, {"answer_too_common": 1}),
        *(({"question": bad}, {"malformed": 1}) for bad in (None, "", " \n", 3, ["a"], "a" * 401, "\x1b[2J", "\ud800")),
        *(({"answer": bad}, {"malformed": 1}) for bad in (None, "", 1200, {"a": 1}, "a" * 301, "$1,200\x00")),
        *(({"message_ids": bad}, {"malformed": 1}) for bad in (None, [], {}, 2, [2], ["<2@x>", None], ["\x1b<2@x>"])),
        *(({"how_realistic": bad}, {"malformed": 1}) for bad in (None, "high", True, -0.1, 1.1, 8, float("nan"))),
    ],
)  # fmt: skip
def test_what_is_dropped_and_why(changes: dict[str, Any], reason: dict[str, int]) -> None:
    assert check(**changes) == (None, reason)
    assert check([ITEM]) == (None, {"malformed": 1})


def test_a_confabulated_id_beside_a_real_one_is_left_out_alone() -> None:
    found, dropped = check(message_ids=["<404@x>", "<2@x>"])
    assert (found.message_ids, dropped) == (["<2@x>"], {"confabulated_id": 1})


@pytest.mark.parametrize("written", ["2@x", " <2@x> ", "<2@x"])
def test_ids_are_known_without_their_brackets(written: str) -> None:
    assert check(message_ids=[written])[0].message_ids == ["<2@x>"]
    assert check(message_ids=written)[0].message_ids == ["<2@x>"]


GOOD = json.dumps([ITEM, ITEM])


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (GOOD, [ITEM, ITEM]),
        (f"```json\n{GOOD}\n```", [ITEM, ITEM]),
        (f"Here you are [two questions]:\n{GOOD}\nI hope they help {{really}}.", [ITEM, ITEM]),
        (f"<think>[{{}}] maybe {json.dumps(ITEM)}</think>{GOOD}", [ITEM, ITEM]),
        (json.dumps({"note": [1], "questions": [ITEM]}), [ITEM]),
        (json.dumps(ITEM) + "\n" + json.dumps(ITEM), [ITEM, ITEM]),
        (GOOD[:-20], [ITEM]),
        (GOOD[:30] + "\x00" + GOOD, [ITEM, ITEM]),
        ("[]", []),
        ('{"questions": []}', []),
        ("", None),
        ("{question: 'What?'}", None),
        ('[{"a":' * 20_000, None),
        ("[[" * 50_000, None),
    ],
)
def test_replies_are_read_however_they_come(text: str, items: list[Any] | None) -> None:
    assert read_reply(text) == items


def test_a_flood_is_read_up_to_a_bound() -> None:
    assert len(read_reply(json.dumps([ITEM] * 500)) or []) == 100
    assert read_reply("x" * 200_000 + GOOD) is None


@pytest.mark.parametrize(
    ("answer", "body", "stated"),
    [
        ("$1,200", "about 1200 dollars", True),
        ("1200", "about 12,000 dollars", False),
        ("3:30 PM", "at 3pm sharp", False),
        ("May 3, 2001", "no word on it", True),  # the mail's own date
        ("May 4, 2001", "no word on it", False),
        ("Bo Lind", "no word on it", True),  # its sender
        ("three cranes", "3 cranes", True),
        ("the harbour master and his deputy", "ask the harbour master", True),
        ("Jo", "Bo did it", False),
        ("北埠头", "会议在北埠头举行", True),
        ("南埠头", "会议在北埠头举行", False),
        ("07", "gate 7", True),
        ("8:30 - 9:30 AM.", "from 8:30 to 9:30", True),
        ("", "anything", False),
    ],
)
def test_an_answer_stands_in_its_mail_or_does_not(answer: str, body: str, stated: bool) -> None:
    assert is_stated(answer, [mail(1, body)]) == stated


TALK = "Thanks, the gas report of Gil about the meeting is attached. Approve it on friday, all 3 of you, says KLM."


@pytest.mark.parametrize(
    "answer",
    [
        "the", "it", "Thanks", "you", "3", "three", "5", "the meeting", "The report.", "attached", "gas", "Gas!",
        "all of it", "I", "a", "this week", "?", "",
    ],
)  # fmt: skip
def test_an_answer_that_any_mail_may_hold_is_not_specific(answer: str) -> None:
    assert not is_specific(answer, [mail(1, TALK)])


@pytest.mark.parametrize(
    "answer",
    [
        "Gil", "gil.", "KLM", "Bo", "ana", "Friday", "fri", "May 1.", "May", "12", "$5.50", "3 reports",
        "three reports", "the gas report", "EB2868", "9:30", "北埠头", "2001", "Marsh",
    ],
)  # fmt: skip
def test_a_number_a_date_a_name_or_two_words_of_meaning_are_specific(answer: str) -> None:
    assert is_specific(answer, [mail(1, TALK), mail(2, "Cy Marsh knows.")])


def test_a_name_is_what_no_mail_writes_in_lower_case() -> None:
    assert is_specific("Bandit", [mail(1, "The horse is called Bandit.")])
    assert not is_specific("Bandit", [mail(1, "The horse is called Bandit."), mail(2, "What a bandit!")])
