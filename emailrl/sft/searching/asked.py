"""Parses what a template question asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache

from emailrl.facts.mentions import Extractor
from emailrl.questions.template import HARD_KINDS, KINDS
from emailrl.questions.template.kinds import MY_MAIL, THEIR_MAIL

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
