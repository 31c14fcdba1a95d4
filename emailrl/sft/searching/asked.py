"""What a template question asks for, whether an email is the one it means, and the answer in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from typing import Any

from emailrl.facts.mentions import Extractor
from emailrl.facts.reading import name_of
from emailrl.questions.inbox.mailbox import own_text, spell_day, topic_of
from emailrl.questions.template import HARD_KINDS, KINDS
from emailrl.questions.template.usual import MY_MAIL, THEIR_MAIL

_SLOTS = {
    "person": r"(?P<person>[^\"?]+?)",
    "persons": r"(?P<persons>[^\"?]+?)['’]s?",
    "topic": r"(?P<topic>.+)",
    "date": r"(?:[A-Z][a-z]+day, )?(?P<date>[A-Z][a-z]+ \d{1,2}, \d{4})",
    "month": r"(?P<month>[A-Z][a-z]+ \d{4})",
}
_BY_ME = frozenset(("date_sent", "sent_to", "my_reply_date"))
"""Kinds that ask about an email sent by the asker."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed question."""

    kind: str
    is_mine: bool
    """Whether the asker wrote the email."""
    person: str | None = None
    """The other person's name or address."""
    topic: str | None = None
    """The email's topic, as in its subject."""
    day: date | None = None
    month: date | None = None
    """The first of the month."""
    fact: Extractor | None = None
    """The extractor of the answer from an email's text, if the text holds it."""


def read_question(question: str) -> Asked | None:
    """The question's parts, or None if no template matches."""
    for kind, is_mine, fact, wording in _wordings():
        if found := wording.fullmatch(question):
            parts = found.groupdict()
            return Asked(
                kind,
                is_mine,
                parts.get("person") or parts.get("persons"),
                parts.get("topic"),
                _day(parts.get("date"), "%B %d, %Y"),
                _day(parts.get("month"), "%B %Y"),
                fact,
            )
    return None


@cache
def _wordings() -> list[tuple[str, bool, Extractor | None, re.Pattern[str]]]:
    """Kind, whether the mail is the asker's own, extractor and pattern; most fixed words first."""
    found = []
    for kind in (*KINDS, *(kind for kind in HARD_KINDS if kind.answerable)):  # the others use the words of these
        for wording in kind.wordings:
            for text, is_mine in _spelled(wording):
                found.append((kind.name, is_mine or kind.name in _BY_ME, kind.fact, text))
    found.sort(key=lambda row: -len(re.sub(r"\{\w+\}", "", row[3])))
    return [(name, is_mine, fact, _pattern(text)) for name, is_mine, fact, text in found]


def _spelled(wording: str) -> Iterator[tuple[str, bool]]:
    """A wording with every description of its email in place of ``{mail}``."""
    if "{mail}" not in wording:
        yield wording, False
        return
    for forms, is_mine in ((THEIR_MAIL, False), (MY_MAIL, True)):
        for form in forms:
            yield wording.replace("{mail}", form), is_mine


def _pattern(wording: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", wording)
    return re.compile("".join(_SLOTS[part] if at % 2 else re.escape(part) for at, part in enumerate(parts)))


def _day(text: str | None, form: str) -> date | None:
    return datetime.strptime(text, form).date() if text else None


ShownMail = dict[str, Any]
"""An email as returned by ``read_email``."""


def answer_of(asked: Asked, mail: ShownMail, me: str) -> str | None:
    """The answer in an email; None if it is not the right email or has no answer."""
    return _read_off(asked, mail, me) if fits(asked, mail, me) else None


def fits(asked: Asked, mail: ShownMail, me: str) -> bool:
    """Whether sender, recipients, subject and day match the question."""
    topic, sender = topic_of(mail["subject"]), mail["from_address"]
    if asked.topic is not None and topic.key != " ".join(asked.topic.split()).lower():
        return False
    if asked.is_mine != (sender == me):
        return False
    if asked.person is not None and not any(is_called(a, asked.person) for a in _others(asked, mail)):
        return False
    if asked.kind in ("reply_from", "reply_date", "my_reply_date", "reply_gap") and not topic.is_reply:
        return False
    if asked.kind == "thread_starter" and (topic.is_reply or topic.is_forward or _quotes(mail)):
        return False
    return asked.day is None or _is_on_the_right_side(asked, day_of(mail))


def is_called(address: str, person: str) -> bool:
    """Whether an address may belong to the person named in a question."""
    return address == person.lower() or name_of(address) == person


def day_of(mail: ShownMail) -> date | None:
    return date.fromisoformat(mail["date"][:10]) if mail["date"] else None


def people_of(mail: ShownMail) -> list[str]:
    """Everyone on a mail, the sender first."""
    return list(dict.fromkeys((mail["from_address"], *recipients_of(mail))))


def recipients_of(mail: ShownMail) -> list[str]:
    """All recipients of an email, each once: some archives repeat every cc as a bcc."""
    return list(dict.fromkeys((*mail["to_addresses"], *mail["cc_addresses"], *mail["bcc_addresses"])))


def _others(asked: Asked, mail: ShownMail) -> list[str]:
    """Candidates for the person in the question: the sender, or the recipients of the asker's own email."""
    return recipients_of(mail) if asked.is_mine else [mail["from_address"]]


def _quotes(mail: ShownMail) -> bool:
    return own_text(mail["body"]) != mail["body"]


def _is_on_the_right_side(asked: Asked, day: date | None) -> bool:
    if day is None or asked.day is None:
        return False
    if asked.kind == "last_before":
        return day < asked.day
    if asked.kind == "first_after":
        return day > asked.day
    return day == asked.day


def _read_off(asked: Asked, mail: ShownMail, me: str) -> str | None:
    if asked.fact is not None:
        found = asked.fact.only(own_text(mail["body"]), mail["body"])
        return found.text if found else None
    return _READERS[asked.kind](mail, me)


def _sender(mail: ShownMail, me: str) -> str | None:
    return _name(mail["from_address"])


def _date(mail: ShownMail, me: str) -> str | None:
    day = day_of(mail)
    return spell_day(day) if day else None


def _subject(mail: ShownMail, me: str) -> str | None:
    return topic_of(mail["subject"]).text or None


def _first_recipient(mail: ShownMail, me: str) -> str | None:
    return _name(mail["to_addresses"][0]) if mail["to_addresses"] else None


def _copied(mail: ShownMail, me: str) -> str | None:
    return _name(mail["cc_addresses"][0]) if mail["cc_addresses"] else None


def _other_recipient(mail: ShownMail, me: str) -> str | None:
    others = [address for address in recipients_of(mail) if address not in (me, mail["from_address"])]
    return _name(others[0]) if others else None


def _name(address: str) -> str:
    return name_of(address) or address


_READERS: dict[str, Callable[[ShownMail, str], str | None]] = {
    **dict.fromkeys(("sender", "only_sender_of_day", "reply_from", "thread_starter", "last_in_thread"), _sender),
    **dict.fromkeys(("date_received", "date_sent", "reply_date", "my_reply_date", "first_contact", "reply_gap"), _date),
    **dict.fromkeys(("subject", "both_subjects", "last_before", "first_after"), _subject),
    "sent_to": _first_recipient,
    "copied": _copied,
    "other_recipient": _other_recipient,
}
