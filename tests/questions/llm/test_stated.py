"""What counts as stated by a mail, and what any mail may state."""

from __future__ import annotations

import pytest

from emailrl.questions.inbox.mail import Mail
from emailrl.questions.llm.harvest import is_specific, is_stated


def mail(number: int, body: str) -> Mail:
    return Mail(f"<{number}@x>", "Pier works", "bo.lind@x.org", "2001-05-03 21:15:00", body, ["ana.roe@x.org"], [], [])


@pytest.mark.parametrize(
    ("answer", "body", "stated"),
    [
        ("$1,200", "about 1200 dollars", True),
        ("1200", "about 12,000 dollars", False),
        ("3:00 PM", "at 3pm sharp", True),
        ("3:30 PM", "at 3pm sharp", False),
        ("May 3, 2001", "no word on it", True),  # the mail's own date
        ("May 4, 2001", "no word on it", False),
        ("Bo Lind", "no word on it", True),  # its sender
        ("three cranes", "3 cranes", True),
        ("3 cranes", "three cranes came", True),
        ("four cranes", "three cranes came", False),
        ("the harbour master and his deputy", "ask the harbour master", True),
        ("the mayor and his deputy", "ask the harbour master", False),
        ("inspections on the quay", "an inspection of the quay", True),
        ("Jo", "Jo did it", True),
        ("Jo", "Bo did it", False),
        ("北埠头", "会议在北埠头举行", True),
        ("南埠头", "会议在北埠头举行", False),
        ("07", "gate 7", True),
        ("8:30 - 9:30 AM.", "from 8:30 to 9:30", True),
        ("November 10", "on Nov. 10 at noon", True),
        ("Sept 10", "on September 10 at noon", True),
        ("Sept 10", "on October 10 at noon", False),
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
