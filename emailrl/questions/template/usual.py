"""Kinds of questions, and the usual ones: one email's header, a thread, a correspondent over time, one fact in a text.

A kind has a name, wordings (``kinds.toml``), and a function from an email to its question's answer, if the mailbox
proves that there is exactly one."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from pathlib import Path
from random import Random

from emailrl.facts import mentions
from emailrl.facts.mentions import DATE, Extractor
from emailrl.questions.inbox import Inbox, Mail, spell_day

_TEXTS = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8"))
THEIR_MAIL: list[str] = _TEXTS["their_mail"]
MY_MAIL: list[str] = _TEXTS["my_mail"]


@dataclass(slots=True)
class Finding:
    """An answer from one email, verified against its mailbox before ``ask_day``."""

    answer: str
    ask_day: date
    slots: dict[str, str] = field(default_factory=dict)
    """Values for the ``{names}`` in the wordings, besides the email's ``topic`` and its sender as ``person``."""
    sources: list[Mail] = field(default_factory=list)
    """The emails that hold the answer, if it is not only the one email."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of question; ``find`` returns None if the email does not have exactly one answer."""

    name: str
    find: Callable[[Inbox, Mail, Random], Finding | None]
    realism: float  # How likely a person is to ask this, 0 to 1, before the email itself is considered.
    wordings: list[str]
    needs_all: bool = False  # Whether the answer needs all sources; such a question is kept however many there are.
    answerable: bool = True  # False for a kind whose questions provably have no answer in the mailbox.
    fact: Extractor | None = None  # Extracts the answer if it is a fact in the email's text.


def kind(find: Callable[[Inbox, Mail, Random], Finding | None]) -> Kind:
    """Make a function that searches an email the kind of question with its name in ``kinds.toml``."""
    return Kind(find.__name__, find, **_TEXTS["kinds"][find.__name__])


def refer_to(box: Inbox, mail: Mail, rng: Random) -> str:
    """Return a phrase for one email by its sender and topic, as the mailbox's owner would say it."""
    if mail.sender == box.me:
        return rng.choice(MY_MAIL).format(topic=mail.topic.text)
    person = box.called(mail.sender)
    return rng.choice(THEIR_MAIL).format(persons=possessive(person), person=person, topic=mail.topic.text)


def possessive(name: str) -> str:
    """Return the possessive of a name: ``Lynn Blair's``, ``Chris Williams'``."""
    return f"{name}'" if name.endswith("s") else f"{name}'s"


MAX_COUNT = 9  # A search shows at most ten emails, so ten or more cannot be counted with one.

# -- one email's header: sender, date, recipients, subject ------------------------------------------------------------


@kind
def sender(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    is_told = box.received(mail) and box.is_told_by_topic(mail, day, with_sender=False)
    return Finding(box.called(mail.sender), day) if is_told else None


@kind
def date_received(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    return _own_day(box, mail, rng, applies=box.received(mail))


@kind
def date_sent(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    return _own_day(box, mail, rng, applies=mail.sender == box.me)


def _own_day(box: Inbox, mail: Mail, rng: Random, *, applies: bool) -> Finding | None:
    day = box.ask_day(mail, rng)
    if not applies or DATE.find(mail.topic.text) or not box.is_told_by_topic(mail, day, with_sender=True):
        return None
    return Finding(spell_day(mail.day), day)


@kind
def subject(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    if not box.received(mail) or not mail.topic.is_telling or mail.sender not in box.unmistakable:
        return None
    if sum(other.sender == mail.sender for other in box.on_day(mail.day)) != 1:
        return None
    return Finding(mail.topic.text, day, {"date": spell_day(mail.day)})


@kind
def only_sender_of_day(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    if not box.received(mail) or sum(other.sender != box.me for other in box.on_day(mail.day)) != 1:
        return None
    return Finding(box.called(mail.sender), day, {"date": f"{mail.day:%A}, {spell_day(mail.day)}"})


@kind
def other_recipient(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    day = box.ask_day(mail, rng)
    others = {*mail.to, *mail.cc, *mail.bcc} - {box.me, mail.sender}
    is_told = box.received(mail) and not mail.cc and box.is_told_by_topic(mail, day, with_sender=True)
    return _about_person(box, mail, others.pop(), rng) if is_told and len(others) == 1 else None


@kind
def copied(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    is_only = len(mail.cc) == 1 and mail.cc[0] not in (box.me, mail.sender, *mail.to) and not mail.bcc
    return _about_person(box, mail, mail.cc[0], rng) if is_only else None


@kind
def sent_to(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    is_only = mail.sender == box.me and len(mail.to) == 1 and not mail.cc and not mail.bcc
    return _about_person(box, mail, mail.to[0], rng) if is_only else None


def _about_person(box: Inbox, mail: Mail, address: str, rng: Random) -> Finding | None:
    """Ask for one recipient of an email that its sender and topic identify."""
    day = box.ask_day(mail, rng)
    if box.is_me(address) or not box.is_told_by_topic(mail, day, with_sender=True):
        return None
    return Finding(box.called(address), day, {"mail": refer_to(box, mail, rng)})


# -- threads: who replied, when, and who started them -----------------------------------------------------------------


@kind
def reply_from(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """The only reply to an email of the owner; nobody else writes in the thread."""
    day = box.ask_day(mail, rng)
    if not mail.topic.is_telling or not mail.topic.is_reply or not box.received(mail):
        return None
    thread = box.thread(mail, day)
    mine = [other for other in thread if other.sender == box.me and other.sent_at < mail.sent_at]
    others = [other for other in thread if other.sender != box.me]
    if not mine or others != [mail] or mail.sender not in mine[-1].addresses:
        return None
    return Finding(box.called(mail.sender), day)


@kind
def reply_date(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    finding = reply_from.find(box, mail, rng)
    is_dated = DATE.find(mail.topic.text)
    return replace(finding, answer=spell_day(mail.day)) if finding and not is_dated else None


@kind
def my_reply_date(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    """The owner's only reply in a thread started by one other person."""
    day = box.ask_day(mail, rng)
    if not mail.topic.is_telling or not mail.topic.is_reply or mail.sender != box.me or DATE.find(mail.topic.text):
        return None
    thread = box.thread(mail, day)
    theirs = {other.sender for other in thread if other.sender != box.me and other.sent_at < mail.sent_at}
    if len(theirs) != 1 or [other for other in thread if other.sender == box.me] != [mail]:
        return None
    [person] = theirs
    return Finding(spell_day(mail.day), day, {"person": box.called(person)}) if person in mail.addresses else None


@kind
def thread_starter(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
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
    return Finding(box.called(mail.sender), day)


# -- one correspondent over time: the first email, the last before a date, the count in a month -----------------------


def _from_one_person(box: Inbox, mail: Mail) -> list[Mail]:
    """The emails of a received email's sender, oldest first; empty if the person may have another address."""
    return list(box.by_sender[mail.sender]) if box.received(mail) and mail.sender in box.unmistakable else []


def _day_between(box: Inbox, mail: Mail, rng: Random, *, later: bool) -> date | None:
    """A day between an email and its sender's next one (``later``) or the previous one; None without such a day. The
    email must be the sender's only one on its day, as far as the other side is concerned."""
    sent = _from_one_person(box, mail)
    if len(sent) < 3 or not mail.topic.is_telling:
        return None
    at = sent.index(mail)
    before, after = sent[at - 1] if at else None, sent[at + 1] if at + 1 < len(sent) else None
    near, far = (after, before) if later else (before, after)
    if near is None or (far is not None and far.day == mail.day):
        return None
    gap = abs(near.day - mail.day).days
    if gap < 2:
        return None
    days = timedelta(days=rng.randint(1, min(gap, 14)))
    return mail.day + days if later else mail.day - days


@kind
def last_before(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    if (limit := _day_between(box, mail, rng, later=True)) is None:
        return None
    return Finding(mail.topic.text, limit + timedelta(days=rng.randint(0, 14)), {"date": spell_day(limit)})


@kind
def first_after(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    limit = _day_between(box, mail, rng, later=False)
    return Finding(mail.topic.text, box.ask_day(mail, rng), {"date": spell_day(limit)}) if limit else None


@kind
def first_contact(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    sent = _from_one_person(box, mail)
    if len(sent) < 3 or sent[0] is not mail:
        return None
    return Finding(spell_day(mail.day), max(box.ask_day(mail, rng), sent[1].day + timedelta(days=1)))


@kind
def count_in_month(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
    month = mail.day.replace(day=1)
    in_month = mail.sent_at[: len("2001-05")]
    sent = [other for other in _from_one_person(box, mail) if other.sent_at.startswith(in_month)]
    if not 2 <= len(sent) <= MAX_COUNT or sent[-1] is not mail:
        return None
    next_month = date(month.year + month.month // 12, month.month % 12 + 1, 1)
    day = next_month + timedelta(days=rng.randint(0, 20))
    return Finding(str(len(sent)), day, {"month": f"{month:%B} {month.year}"}, sent)


# -- one fact in one email's text: a phone number, an amount, a time, a place -----------------------------------------


def _fact_kind(name: str, extractor: Extractor, *, realism: float, wordings: list[str]) -> Kind:
    def find(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
        if not mail.topic.is_telling or not (fact := mail.only_fact(extractor)):
            return None
        in_header = fact.text.lower() in mail.addresses
        is_figure_of_speech = fact.text.startswith("100") and extractor is mentions.PERCENT
        mails = box.mails if extractor is mentions.URL else ()
        others = (other for other in mails if other.topic.key != mail.topic.key)
        if in_header or is_figure_of_speech or any(fact.text in other.body for other in others):
            return None  # what programs add to mails of other threads too is no fact
        day = box.ask_day(mail, rng)
        if extractor.find(mail.topic.text) or not box.is_told_by_topic(mail, day, with_sender=True):
            return None
        return Finding(fact.text, day, {"mail": refer_to(box, mail, rng)})

    return Kind(name, find, realism, wordings, fact=extractor)


_FACTS = {
    "phone": mentions.PHONE,
    "amount": mentions.AMOUNT,
    "percentage": mentions.PERCENT,
    "time": mentions.TIME,
    "date_stated": mentions.DATE,
    "deadline": mentions.DEADLINE,
    "room": mentions.ROOM,
    "venue": mentions.VENUE,
    "url": mentions.URL,
    "email_address": mentions.EMAIL_ADDRESS,
    "attachment": mentions.ATTACHMENT,
    "quantity": mentions.QUANTITY,
    "flight": mentions.FLIGHT,
}
FACT_KINDS = [_fact_kind(name, extractor, **_TEXTS["kinds"][name]) for name, extractor in _FACTS.items()]
for _noun in ("deal", "ticket", "meter", "contract", "invoice"):
    _worded = [wording.replace("{noun}", _noun) for wording in _TEXTS["kinds"]["numbered"]["wordings"]]
    _numbered = _TEXTS["kinds"]["numbered"] | {"wordings": _worded}
    FACT_KINDS.append(_fact_kind(f"{_noun}_number", mentions.numbered(_noun), **_numbered))
KINDS: tuple[Kind, ...] = (
    *(sender, date_received, date_sent, subject, only_sender_of_day, other_recipient, copied, sent_to),
    *(reply_from, reply_date, my_reply_date, thread_starter),
    *(last_before, first_after, first_contact, count_in_month),
    *FACT_KINDS,
)
