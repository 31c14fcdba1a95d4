"""What a template question asks for, whether an email is the one it means, and the answer in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from typing import Any

from emailrl.facts.mentions import Extractor
from emailrl.facts.reading import name_of
from emailrl.facts.words import MONTHS, STOPWORDS, WEEKDAYS
from emailrl.questions.inbox import own_text, spell_day, topic_of
from emailrl.questions.template import HARD_KINDS, KINDS
from emailrl.questions.template.usual import MY_MAIL, THEIR_MAIL

_SLOTS = {
    "person": r"(?P<person>[^\"?]+?)",
    "persons": r"(?P<persons>[^\"?]+?)['’]s?",
    "topic": r"(?P<topic>.+)",
    "date": r"(?:[A-Z][a-z]+day, )?(?P<date>[A-Z][a-z]+ \d{1,2}, \d{4})",
    "month": r"(?P<month>[A-Z][a-z]+ \d{4})",
}
_BY_ME = frozenset(("date_sent", "sent_to", "my_reply_date"))  # Kinds that ask about an email sent by the asker
_REPLIES = frozenset(("reply_from", "reply_date", "my_reply_date", "reply_gap"))
_DATES = frozenset(("date_received", "date_sent", "reply_date", "my_reply_date", "first_contact", "reply_gap"))
_SUBJECTS = frozenset(("subject", "both_subjects", "last_before", "first_after"))
_WORD = re.compile(r"\d[\d.,:/-]*\d|[^\W_]+(?:[-&./'’][^\W_]+)*")
_DATE = re.compile(r"(?:19|20)\d\d|\d{1,2}(?:st|nd|rd|th)?")
_ACTS = re.compile("d(?:id|oe?s?)|was|were|is|are|ha[ds]|have|(?:w|c|sh)ould|will|can|to")  # A name that acts follows
ShownMail = dict[str, Any]  # An email as returned by ``read_email``


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed question."""

    kind: str
    is_mine: bool  # Whether the asker wrote the email
    person: str | None = None  # The other person's name or address
    topic: str | None = None  # The email's topic, as in its subject
    day: date | None = None
    month: date | None = None  # The first of the month
    fact: Extractor | None = None  # The extractor of the answer from an email's text, if the text holds it

    def is_about(self, subject: str) -> bool:
        """Whether a mail with this subject has the question's topic."""
        return topic_of(subject).key == " ".join((self.topic or "").split()).lower()


def read_question(question: str) -> Asked | None:
    """The question's parts, or None if no template matches."""
    for kind, is_mine, fact, wording in _wordings():
        if found := wording.fullmatch(question):
            parts, forms = found.groupdict(), (("date", "%B %d, %Y"), ("month", "%B %Y"))
            spelled = [(parts.get(name), form) for name, form in forms]
            day, month = (datetime.strptime(text, form).date() if text else None for text, form in spelled)
            person = parts.get("person") or parts.get("persons")
            return Asked(kind, is_mine, person, parts.get("topic"), day, month, fact)
    return None


@cache
def _wordings() -> list[tuple[str, bool, Extractor | None, re.Pattern[str]]]:
    """Kind, whether the mail is the asker's own, extractor and pattern; most fixed words first. Wordings with
    ``{mail}`` come with every description of the email in its place."""
    forms = [(form, False) for form in THEIR_MAIL] + [(form, True) for form in MY_MAIL]
    found = []
    for kind in (*KINDS, *(kind for kind in HARD_KINDS if kind.answerable)):  # the others use the words of these
        for wording in kind.wordings:
            for form, is_mine in forms if "{mail}" in wording else [("", False)]:
                text = wording.replace("{mail}", form)
                found.append((kind.name, is_mine or kind.name in _BY_ME, kind.fact, text))
    found.sort(key=lambda row: -len(re.sub(r"\{\w+\}", "", row[3])))
    return [(name, is_mine, fact, _pattern(text)) for name, is_mine, fact, text in found]


def _pattern(wording: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", wording)
    return re.compile("".join(_SLOTS[part] if at % 2 else re.escape(part) for at, part in enumerate(parts)))


def told_in(question: str, me: str) -> list[list[str]]:
    """What to search for in a free-form question, the likeliest to be in the email first: names and numbers; names of
    who acts, who may be its sender; other words, the longest first; dates and the asker's own name and host."""
    common = {*MONTHS, *WEEKDAYS, *re.findall(r"\w+", me.lower())}
    found: list[tuple[list[str], int]] = []
    before, end = "", -1  # the word before, and where a name ends that may go on
    for place in _WORD.finditer(question):
        word = re.sub(r"['’]s$", "", place[0])
        low, is_caps = word.lower(), len(word) > 1 and word.isupper()
        named = any(map(str.isdigit, word)) or is_caps or (word[0].isupper() and place.start() > 0)
        if low in STOPWORDS and not is_caps:
            end = -1
        else:
            rank = 3 if low in common or _DATE.fullmatch(low) else 2
            if rank == 2 and named:
                rank = 1 if _ACTS.fullmatch(before) and not is_caps else 0
            if rank < 2 and question[end : place.start()] == " ":
                found[-1][0].append(word)
            else:
                found.append(([word], rank))
            end = place.end() if rank < 2 and word == place[0] else -1
        before = low
    return [words for words, _ in sorted(found, key=lambda one: (one[1], -len(" ".join(one[0]))))]


def answer_of(asked: Asked, mail: ShownMail, me: str) -> str | None:
    """The answer in an email; None if it is not the right email or has no answer."""
    if not _fits(asked, mail, me):
        return None
    if asked.fact is not None:
        found = asked.fact.only(own_text(mail["body"]), mail["body"])
        return found.text if found else None
    if asked.kind in _DATES:
        day = day_of(mail)
        return spell_day(day) if day else None
    if asked.kind in _SUBJECTS:
        return topic_of(mail["subject"]).text or None
    sender = [mail["from_address"]]
    people = {"sent_to": mail["to_addresses"], "copied": mail["cc_addresses"]}
    people["other_recipient"] = [each for each in recipients_of(mail) if each not in (me, *sender)]
    named = people.get(asked.kind, sender)
    return (name_of(named[0]) or named[0]) if named else None


def _fits(asked: Asked, mail: ShownMail, me: str) -> bool:
    """Whether sender, recipients, subject and day match the question."""
    topic, day = topic_of(mail["subject"]), day_of(mail)
    others = recipients_of(mail) if asked.is_mine else [mail["from_address"]]
    if asked.topic is not None and not asked.is_about(mail["subject"]):
        return False
    if asked.is_mine != (mail["from_address"] == me):
        return False
    if asked.person is not None and not any(is_called(address, asked.person) for address in others):
        return False
    if asked.kind in _REPLIES and not topic.is_reply:
        return False
    quotes = own_text(mail["body"]) != mail["body"]
    if asked.kind == "thread_starter" and (topic.is_reply or topic.is_forward or quotes):
        return False
    if asked.day is None or day is None:
        return asked.day is None
    if asked.kind == "last_before":
        return day < asked.day
    return day > asked.day if asked.kind == "first_after" else day == asked.day


def is_called(address: str, person: str) -> bool:
    """Whether an address may belong to the person named in a question."""
    return address == person.lower() or name_of(address) == person


def day_of(mail: ShownMail) -> date | None:
    return date.fromisoformat(mail["date"][:10]) if mail["date"] else None


def recipients_of(mail: ShownMail) -> list[str]:
    """All recipients of an email, each once: some archives repeat every cc as a bcc."""
    return list(dict.fromkeys((*mail["to_addresses"], *mail["cc_addresses"], *mail["bcc_addresses"])))
