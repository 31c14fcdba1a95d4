"""Harder questions: several mails, counts, whole threads, and what no mail says."""

from __future__ import annotations

from random import Random

import pytest
from questions.template.world import ANA, BO, CY, box, mail

from emailrl.questions.inbox.mail import Mail
from emailrl.questions.inbox.mailbox import Inbox
from emailrl.questions.template import HARD_KINDS
from emailrl.questions.template.kinds import Finding

BY_NAME = {kind.name: kind for kind in HARD_KINDS}


def find(name: str, inbox: Inbox, about: Mail, seed: int = 1) -> Finding | None:
    return BY_NAME[name].find(inbox, about, Random(seed))


def told(finding: Finding | None) -> tuple[str, list[str]] | None:
    return finding and (finding.answer, [source.message_id for source in finding.sources])


FIRST = mail(1, "05-03 09:00", BO, ANA, "Harbour lights")
SECOND = mail(2, "05-03 12:00", BO, ANA, "Dredging permit")


def test_both_subjects_of_a_day() -> None:
    inbox = box(FIRST, SECOND)
    assert told(find("both_subjects", inbox, SECOND)) == ("Harbour lights and Dredging permit", ["<1@x>", "<2@x>"])
    assert find("both_subjects", inbox, FIRST) is None  # once a day, by the later of the two
    third = mail(3, "05-03 15:00", BO, ANA, "Quay repairs")
    assert find("both_subjects", box(FIRST, SECOND, third), third) is None
    assert find("both_subjects", box(FIRST, mail(2, "05-03 12:00", BO, ANA, "Re: Harbour lights")), SECOND) is None


def test_days_until_the_reply() -> None:
    asked, reply = (
        mail(1, "05-03 23:00", ANA, BO, "Harbour lights"),
        mail(2, "05-07 01:00", BO, ANA, "Re: Harbour lights"),
    )
    assert told(find("reply_gap", box(asked, reply), reply)) == ("4", ["<1@x>", "<2@x>"])
    again = mail(3, "05-05 09:00", ANA, BO, "Re: Harbour lights")
    assert find("reply_gap", box(asked, again, reply), reply) is None
    same_day = mail(2, "05-03 23:30", BO, ANA, "Re: Harbour lights")
    assert find("reply_gap", box(asked, same_day), same_day) is None


def test_mails_of_a_day_are_counted() -> None:
    mine = mail(3, "05-03 13:00", ANA, BO, "Quay repairs")
    assert told(find("count_on_day", box(FIRST, mine, SECOND), SECOND)) == ("2", ["<1@x>", "<2@x>"])
    assert find("count_on_day", box(FIRST, mine), FIRST) is None  # one is no count
    to_myself = mail(3, "05-03 13:00", ANA, [ANA, BO], "Quay repairs")
    assert find("count_on_day", box(FIRST, to_myself, SECOND), SECOND) is None


def test_the_whole_thread() -> None:
    thread = [
        mail(1, "05-03 09:00", BO, [ANA, CY], "Harbour lights"),
        mail(2, "05-04 09:00", ANA, [BO, CY], "Re: Harbour lights"),
        mail(3, "05-05 09:00", CY, [ANA, BO], "Re: Harbour lights"),
    ]
    assert told(find("thread_count", box(*thread), thread[-1])) == ("3", ["<1@x>", "<2@x>", "<3@x>"])
    assert told(find("last_in_thread", box(*thread), thread[-1])) == ("Cy Marsh", [])
    assert find("thread_count", box(*thread), thread[0]) is None
    assert find("last_in_thread", box(*thread[:2]), thread[1]) is None
    elsewhere = mail(4, "05-05 10:00", CY, ANA, "Harbour lights of the north")
    assert find("thread_count", box(*thread, elsewhere), thread[-1]) is None  # its subject has the words too


MANY = [
    mail(number, f"04-{number:02} 09:00", CY, ANA, f"Tide table {number}", "High at noon.") for number in range(1, 31)
]
MANY += [mail(31, "05-01 09:00", CY, ANA, "Tide gauge", "It is 4 m.")]


def test_a_topic_asked_for_before_it_came() -> None:
    late = mail(40, "05-20 09:00", BO, ANA, "Harbour lights")
    finding = find("absent_topic", box(*MANY, late), late)
    assert finding is not None and finding.answer == "I don't know" and finding.ask_day <= late.day
    assert "Harbour lights" in finding.slots["question"]
    spoken_of = mail(39, "05-02 09:00", CY, ANA, "Tonight", "Look at the harbour lights!")
    assert find("absent_topic", box(*MANY, spoken_of, late), late) is None
    assert find("absent_topic", box(*MANY, mail(39, "05-02 09:00", CY, ANA, "Re: Harbour lights"), late), late) is None
    assert find("absent_topic", box(FIRST, late), late) is None  # hardly a mailbox


@pytest.mark.parametrize("seed", range(20))
def test_a_day_without_a_mail_from_the_person(seed: int) -> None:
    sent = [mail(day, f"05-{day:02} 09:00", BO, ANA, "Harbour lights") for day in (1, 2, 9)]
    finding = find("absent_day", box(*sent), sent[1], seed)
    assert finding is not None and any(f"May {day}, 2001" in finding.slots["question"] for day in range(4, 8))
    assert find("absent_day", box(*sent), sent[0], seed) is None  # the next is a day later
    assert find("absent_day", box(*sent), sent[2], seed) is None


@pytest.mark.parametrize("seed", range(12))
def test_a_fact_that_the_mail_does_not_state(seed: int) -> None:
    silent = mail(1, "05-03 09:00", BO, ANA, "Harbour lights", "They are out again.")
    finding = find("absent_fact", box(silent), silent, seed)
    assert finding is not None and finding.answer == "I don't know"
    full = mail(1, "05-03 09:00", BO, ANA, "Harbour lights", "Call 713-555-0100 at 9:00 am about the $40, or 5 %.")
    assert find("absent_fact", box(full), full, seed) is None


def test_kinds_say_what_they_need() -> None:
    needs_all = {name for name, kind in BY_NAME.items() if kind.needs_all}
    assert needs_all == {"both_subjects", "reply_gap", "count_in_month", "count_on_day", "thread_count"}
    absent = {name for name, kind in BY_NAME.items() if not kind.answerable}
    assert absent == {"absent_topic", "absent_day", "absent_fact"}
