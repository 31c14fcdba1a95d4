"""Harder questions: answered by several emails together, by counting, by a whole thread, or by no email at all."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from random import Random

from emailrl.questions.inbox import Inbox, Mail, spell_day
from emailrl.questions.load import I_DONT_KNOW
from emailrl.questions.template import usual
from emailrl.questions.template.usual import Finding, Kind, kind, refer_to

MIN_MAILS = 30  # Minimum emails in a mailbox for a question without an answer.
MAX_EARLY = 14  # Maximum days before an email's arrival for a question that it does not answer yet.
_ABSENT_FACTS = [kind for kind in usual.FACT_KINDS if kind.name in ("phone", "amount", "percentage", "time")]


@kind
def both_subjects(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """The subjects of a sender's only two emails of a day."""
    if not box.received(mail) or mail.sender not in box.unmistakable:
        return None
    both = [other for other in box.on_day(mail.day) if other.sender == mail.sender]
    if len(both) != 2 or both[-1] is not mail or both[0].topic.key == mail.topic.key:
        return None
    if not all(other.topic.is_telling and " and " not in other.topic.text for other in both):
        return None
    answer = " and ".join(other.topic.text for other in both)
    return Finding(answer, box.ask_day(mail, rng), {"date": spell_day(mail.day)}, both)


@kind
def reply_gap(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """The days between the owner's only email in a thread and the only reply."""
    finding = usual.reply_from.find(box, mail, rng)
    if finding is None:
        return None
    mine = [other for other in box.thread(mail, finding.ask_day) if other is not mail]
    days = (mail.day - mine[0].day).days
    return Finding(str(days), finding.ask_day, sources=[*mine, mail]) if len(mine) == 1 and days > 0 else None


@kind
def count_on_day(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    of_day = box.on_day(mail.day)
    got = [other for other in of_day if box.received(other)]
    to_myself = any(box.me in (*other.to, *other.cc, *other.bcc) for other in of_day if not box.received(other))
    if not 2 <= len(got) <= usual.MAX_COUNT or got[-1] is not mail or to_myself:
        return None
    return Finding(str(len(got)), box.ask_day(mail, rng), {"date": spell_day(mail.day)}, got)


@kind
def thread_count(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    thread = box.thread(mail, day) if mail.topic.is_telling else []
    is_last = 2 <= len(thread) <= usual.MAX_COUNT and thread[-1] is mail
    return Finding(str(len(thread)), day, sources=thread) if is_last else None


@kind
def last_in_thread(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    thread = box.thread(mail, day) if mail.topic.is_telling and box.received(mail) else []
    is_last = len(thread) > 2 and thread[-1] is mail and thread[-2].sent_at != mail.sent_at
    by_several = any(other.sender != mail.sender for other in thread)
    return Finding(box.called(mail.sender), day) if is_last and by_several else None


@kind
def absent_topic(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """An email asked about before it arrived: no subject has its words yet, no body its topic."""
    day = mail.day - timedelta(days=rng.randint(0, MAX_EARLY))
    if not box.received(mail) or not mail.topic.is_telling or box.before(day) < MIN_MAILS:
        return None
    earlier = box.mails[: box.before(day)]
    if any(box.matching(mail.topic, day)) or any(mail.topic.key in other.body.lower() for other in earlier):
        return None
    return _nothing(usual.sender, day, {"topic": mail.topic.text}, rng)


@kind
def absent_day(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """A day between two emails of a sender without any on that day and the days around it."""
    if not box.received(mail) or mail.sender not in box.unmistakable:
        return None
    days = [other.day for other in box.by_sender[mail.sender]]
    later = [day for day in days if day > mail.day]
    if len(days) < 3 or not later or (later[0] - mail.day).days < 4:
        return None
    asked = mail.day + timedelta(days=rng.randint(2, (later[0] - mail.day).days - 2))
    slots = {"person": box.called(mail.sender), "date": spell_day(asked)}
    return _nothing(usual.subject, asked + timedelta(days=rng.randint(1, 30)), slots, rng)


@kind
def absent_fact(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """A fact of a kind that an email does not state, nor anything similar."""
    day = box.ask_day(mail, rng)
    absent = rng.choice(_ABSENT_FACTS)
    told = f"{mail.subject}\n{mail.body}"
    if absent.fact is None or absent.fact.find(told) or (absent.fact.rivals and absent.fact.rivals.search(told)):
        return None
    if not mail.body.strip() or not box.is_told_by_topic(mail, day, with_sender=True):
        return None
    return _nothing(absent, day, {"mail": refer_to(box, mail, rng)}, rng)


def _nothing(kind: Kind, day: date, slots: dict[str, str], rng: Random) -> Finding:
    """A question in the wording of a usual kind, so that it does not reveal that there is no answer."""
    return Finding(I_DONT_KNOW, day, {"question": rng.choice(kind.wordings).format(**slots)})


HARD_KINDS: tuple[Kind, ...] = (
    *(both_subjects, reply_gap, replace(usual.count_in_month, needs_all=True)),
    *(count_on_day, thread_count, last_in_thread, absent_topic, absent_day, absent_fact),
)
