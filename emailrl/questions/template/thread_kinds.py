"""Questions about threads: who replied, when, and who started them."""

from __future__ import annotations

from random import Random

from emailrl.facts.mentions import DATE
from emailrl.questions.inbox.mailbox import Inbox, Mail, spell_day
from emailrl.questions.template.kinds import Finding, Kind


def reply_to_me(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """Find the only reply to an email of the owner; nobody else writes in the thread."""
    day = box.ask_day(mail, rng)
    if not mail.topic.is_telling or not mail.topic.is_reply or not box.received(mail):
        return None
    thread = box.thread(mail, day)
    mine = [other for other in thread if other.sender == box.me and other.sent_at < mail.sent_at]
    others = [other for other in thread if other.sender != box.me]
    if not mine or others != [mail] or mail.sender not in mine[-1].addresses:
        return None
    return Finding(
        box.people.called(mail.sender), day, {"topic": mail.topic.text, "person": box.people.called(mail.sender)}
    )


def _reply_date(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    finding = reply_to_me(box, mail, rng)
    if finding is None or DATE.find(mail.topic.text):
        return None
    finding.answer = spell_day(mail.day)
    return finding


def _my_reply_date(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """The owner's only reply in a thread started by one other person."""
    day = box.ask_day(mail, rng)
    if not mail.topic.is_telling or not mail.topic.is_reply or mail.sender != box.me or DATE.find(mail.topic.text):
        return None
    thread = box.thread(mail, day)
    theirs = {other.sender for other in thread if other.sender != box.me and other.sent_at < mail.sent_at}
    if len(theirs) != 1 or [other for other in thread if other.sender == box.me] != [mail]:
        return None
    person = theirs.pop()
    if person not in mail.addresses:
        return None
    return Finding(spell_day(mail.day), day, {"topic": mail.topic.text, "person": box.people.called(person)})


def _thread_starter(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """The author of a thread's first email, if every later one replies to it or forwards it."""
    if not mail.topic.is_telling or mail.topic.is_reply or mail.topic.is_forward or not box.received(mail):
        return None
    if mail.own != mail.body:  # it quotes or forwards an email that may have started the thread
        return None
    day = box.ask_day(mail, rng)
    thread = box.thread(mail, day)
    later = thread[1:]
    if not later or thread[0] is not mail or not all(other.topic.is_reply or other.topic.is_forward for other in later):
        return None
    if not any(other.sender != mail.sender for other in later) or later[0].sent_at == mail.sent_at:
        return None
    return Finding(box.people.called(mail.sender), day, {"topic": mail.topic.text})


THREAD_KINDS = (
    Kind(
        "reply_from",
        0.8,
        (
            'Who replied to my mail about "{topic}"?',
            "Who answered me on {topic}?",
            'Who got back to me on "{topic}"?',
        ),
        reply_to_me,
    ),
    Kind(
        "reply_date",
        0.6,
        (
            'When did {person} reply to my mail about "{topic}"?',
            "On what date did {person} answer me on {topic}?",
            'What day did {person} get back to me on "{topic}"?',
        ),
        _reply_date,
    ),
    Kind(
        "my_reply_date",
        0.6,
        (
            'When did I reply to {person} on "{topic}"?',
            "On what date did I answer {person} about {topic}?",
            'What day did I get back to {person} on "{topic}"?',
        ),
        _my_reply_date,
    ),
    Kind(
        "thread_starter",
        0.6,
        (
            'Who started the thread "{topic}"?',
            "Who sent the first mail on {topic}?",
            'Who began the discussion about "{topic}"?',
        ),
        _thread_starter,
    ),
)
