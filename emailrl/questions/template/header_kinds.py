"""Questions answered by one email's header: sender, date, recipients, subject."""

from __future__ import annotations

from random import Random

from emailrl.facts.mentions import DATE
from emailrl.questions.inbox.mailbox import Inbox, Mail, spell_day
from emailrl.questions.template.kinds import Finding, Kind, refer_to


def _sender(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    if not box.received(mail) or not box.is_told_by_topic(mail, day, with_sender=False):
        return None
    return Finding(box.people.called(mail.sender), day, {"topic": mail.topic.text})


def _date_received(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    if not box.received(mail) or DATE.find(mail.topic.text) or not box.is_told_by_topic(mail, day, with_sender=True):
        return None
    person = box.people.called(mail.sender)
    return Finding(spell_day(mail.day), day, {"topic": mail.topic.text, "person": person})


def _date_sent(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    if mail.sender != box.me or DATE.find(mail.topic.text) or not box.is_told_by_topic(mail, day, with_sender=True):
        return None
    return Finding(spell_day(mail.day), day, {"topic": mail.topic.text})


def _subject(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    if not box.received(mail) or not mail.topic.is_telling or not box.people.is_unmistakable(mail.sender):
        return None
    if sum(other.sender == mail.sender for other in box.on_day(mail.day)) != 1:
        return None
    person = box.people.called(mail.sender)
    return Finding(mail.topic.text, day, {"person": person, "date": spell_day(mail.day)})


def _only_sender_of_day(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    if not box.received(mail) or sum(other.sender != box.me for other in box.on_day(mail.day)) != 1:
        return None
    return Finding(box.people.called(mail.sender), day, {"date": f"{mail.day:%A}, {spell_day(mail.day)}"})


def _other_recipient(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    others = {*mail.to, *mail.cc, *mail.bcc} - {box.me, mail.sender}
    if not box.received(mail) or mail.cc or len(others) != 1:
        return None
    return _about_person(box, mail, others.pop(), rng) if box.is_told_by_topic(mail, day, with_sender=True) else None


def _copied(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    if len(mail.cc) != 1 or mail.cc[0] in (box.me, mail.sender, *mail.to) or mail.bcc:
        return None
    return _about_person(box, mail, mail.cc[0], rng)


def _sent_to(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    if mail.sender != box.me or len(mail.to) != 1 or mail.cc or mail.bcc:
        return None
    return _about_person(box, mail, mail.to[0], rng)


def _about_person(box: Inbox, mail: Mail, address: str, rng: Random) -> Finding | None:
    """Ask for one recipient of an email that its sender and topic identify."""
    day = box.ask_day(mail, rng)
    if box.people.is_me(address) or not box.is_told_by_topic(mail, day, with_sender=True):
        return None
    slots = {"topic": mail.topic.text, "mail": refer_to(box, mail, rng)}
    return Finding(box.people.called(address), day, slots)


HEADER_KINDS = (
    Kind(
        "sender",
        0.7,
        (
            'Who sent me the mail with the subject "{topic}"?',
            'Who wrote to me about "{topic}"?',
            'From whom did I get the message "{topic}"?',
            "I remember a mail called {topic}. Who was it from?",
        ),
        _sender,
    ),
    Kind(
        "date_received",
        0.6,
        (
            'When did {person} write to me about "{topic}"?',
            'On what date did I get the mail "{topic}" from {person}?',
            "What day did {person} send the message on {topic}?",
            'On which day did {person} mail me "{topic}"?',
        ),
        _date_received,
    ),
    Kind(
        "date_sent",
        0.6,
        (
            'When did I send the mail about "{topic}"?',
            "On what date did I write about {topic}?",
            'What day did my message "{topic}" go out?',
        ),
        _date_sent,
    ),
    Kind(
        "subject",
        0.5,
        (
            "What was the subject of the mail {person} sent me on {date}?",
            "What did {person} write to me about on {date}?",
            "{person} mailed me on {date}. What was the subject?",
        ),
        _subject,
    ),
    Kind(
        "only_sender_of_day",
        0.4,
        (
            "Who sent me a mail on {date}?",
            "I got just one mail on {date}. Who was it from?",
            "Who wrote to me on {date}?",
        ),
        _only_sender_of_day,
    ),
    Kind(
        "other_recipient",
        0.6,
        (
            "Who else received {mail}?",
            "Besides me, who was {mail} sent to?",
            "To whom other than me was {mail} addressed?",
        ),
        _other_recipient,
    ),
    Kind(
        "copied",
        0.6,
        ("Who was copied on {mail}?", "Who was on cc of {mail}?", "Who got a copy of {mail}?"),
        _copied,
    ),
    Kind(
        "sent_to",
        0.7,
        (
            'Who did I send the mail "{topic}" to?',
            "To whom did I write about {topic}?",
            'Who got my message about "{topic}"?',
        ),
        _sent_to,
    ),
)
