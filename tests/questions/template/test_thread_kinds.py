"""Thread questions: who replied, when, and who began."""

from __future__ import annotations

from random import Random

from questions.template.world import ANA, BO, CY, box, mail

from emailrl.questions.inbox.mail import Mail
from emailrl.questions.inbox.mailbox import Inbox
from emailrl.questions.template.generate import KINDS

BY_NAME = {kind.name: kind for kind in KINDS}


def answer(name: str, inbox: Inbox, about: Mail) -> str | None:
    finding = BY_NAME[name].find(inbox, about, Random(1))
    return finding.answer if finding else None


ASKED = mail(1, "05-03 09:00", ANA, BO, "Harbour lights")
REPLY = mail(2, "05-04 09:00", BO, ANA, "Re: Harbour lights")
THANKS = mail(3, "05-05 09:00", ANA, BO, "RE: Harbour lights")


def test_the_one_reply() -> None:
    inbox = box(ASKED, REPLY, THANKS)
    assert answer("reply_from", inbox, REPLY) == "Bo Lind"
    assert answer("reply_date", inbox, REPLY) == "May 4, 2001"
    assert answer("reply_from", inbox, ASKED) is None
    assert answer("reply_from", box(REPLY), REPLY) is None  # nothing of Ana's to reply to


def test_a_second_reply_leaves_no_question() -> None:
    second = mail(4, "05-04 10:00", CY, ANA, "Re: Harbour lights")
    assert answer("reply_from", box(ASKED, REPLY, second), REPLY) is None


def test_a_reply_of_someone_who_was_not_asked_is_none() -> None:
    stranger = mail(4, "05-04 10:00", CY, ANA, "Re: Harbour lights")
    assert answer("reply_from", box(ASKED, stranger), stranger) is None


def test_one_s_own_reply() -> None:
    question = mail(5, "05-06 09:00", CY, ANA, "Dredging permit")
    reply = mail(6, "05-07 09:00", ANA, CY, "Re: Dredging permit")
    assert answer("my_reply_date", box(question, reply), reply) == "May 7, 2001"
    again = mail(7, "05-07 12:00", ANA, CY, "Re: Dredging permit")
    assert answer("my_reply_date", box(question, reply, again), reply) is None


def test_who_began_a_thread() -> None:
    first = mail(8, "05-06 09:00", CY, [ANA, BO], "Dredging permit")
    second = mail(9, "05-06 10:00", BO, [ANA, CY], "Re: Dredging permit")
    assert answer("thread_starter", box(first, second), first) == "Cy Marsh"
    assert answer("thread_starter", box(first), first) is None
    assert answer("thread_starter", box(second), second) is None
    rival = mail(10, "05-06 11:00", BO, [ANA, CY], "Dredging permit")
    assert answer("thread_starter", box(first, rival), first) is None
    quoting = mail(8, "05-06 09:00", CY, [ANA, BO], "Dredging permit", "See below.\n-----Original Message-----\nHi")
    assert answer("thread_starter", box(quoting, second), quoting) is None
