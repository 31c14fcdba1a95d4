"""Questions about one correspondent over time: the first email, the last before a date, the count in a month."""

from __future__ import annotations

from datetime import date, timedelta
from random import Random

from emailrl.questions.inbox.mailbox import Inbox, Mail, spell_day
from emailrl.questions.template.kinds import Finding, Kind

MAX_COUNT = 9
"""A search shows at most ten emails, so ten or more cannot be counted with one."""


def _from_one_person(box: Inbox, mail: Mail) -> list[Mail]:
    """The emails of a received email's sender, oldest first; empty if the person may have another address."""
    if not box.received(mail) or not box.people.is_unmistakable(mail.sender):
        return []
    return list(box.sent_by(mail.sender))


def _last_before(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    sent = _from_one_person(box, mail)
    if len(sent) < 3 or not mail.topic.is_telling:
        return None
    at = sent.index(mail)
    if at + 1 == len(sent) or (at and sent[at - 1].day == mail.day):
        return None
    gap = (sent[at + 1].day - mail.day).days
    if gap < 2:
        return None
    limit = mail.day + timedelta(days=rng.randint(1, min(gap, 14)))
    day = limit + timedelta(days=rng.randint(0, 14))
    return Finding(mail.topic.text, day, {"person": box.people.called(mail.sender), "date": spell_day(limit)})


def _first_after(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    sent = _from_one_person(box, mail)
    if len(sent) < 3 or not mail.topic.is_telling:
        return None
    at = sent.index(mail)
    if at == 0 or (at + 1 < len(sent) and sent[at + 1].day == mail.day):
        return None
    gap = (mail.day - sent[at - 1].day).days
    if gap < 2:
        return None
    limit = mail.day - timedelta(days=rng.randint(1, min(gap, 14)))
    slots = {"person": box.people.called(mail.sender), "date": spell_day(limit)}
    return Finding(mail.topic.text, box.ask_day(mail, rng), slots)


def _first_contact(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    sent = _from_one_person(box, mail)
    if len(sent) < 3 or sent[0] is not mail:
        return None
    day = max(box.ask_day(mail, rng), sent[1].day + timedelta(days=1))
    return Finding(spell_day(mail.day), day, {"person": box.people.called(mail.sender)})


def _count_in_month(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    month = mail.day.replace(day=1)
    in_month = mail.sent_at[: len("2001-05")]
    sent = [other for other in _from_one_person(box, mail) if other.sent_at.startswith(in_month)]
    if not 2 <= len(sent) <= MAX_COUNT or sent[-1] is not mail:
        return None
    next_month = date(month.year + month.month // 12, month.month % 12 + 1, 1)
    day = next_month + timedelta(days=rng.randint(0, 20))
    slots = {"person": box.people.called(mail.sender), "month": f"{month:%B} {month.year}"}
    return Finding(str(len(sent)), day, slots, sources=sent)


TIMELINE_KINDS = (
    Kind(
        "last_before",
        0.5,
        (
            "What was the subject of the last mail {person} sent me before {date}?",
            "What was {person} writing about in the last message I got from them before {date}?",
            "Before {date}, what was the subject of the latest mail from {person}?",
        ),
        _last_before,
    ),
    Kind(
        "first_after",
        0.5,
        (
            "What was the subject of the first mail {person} sent me after {date}?",
            "What was the first message from {person} after {date} about?",
            "After {date}, under what subject did {person} next write to me?",
        ),
        _first_after,
    ),
    Kind(
        "first_contact",
        0.5,
        (
            "When did {person} first write to me?",
            "What is the date of the first mail I have from {person}?",
            "On what day did I get my first message from {person}?",
        ),
        _first_contact,
    ),
    Kind(
        "count_in_month",
        0.5,
        (
            "How many mails did {person} send me in {month}?",
            "How many messages did I get from {person} in {month}?",
            "In {month}, how often did {person} write to me?",
        ),
        _count_in_month,
    ),
)
