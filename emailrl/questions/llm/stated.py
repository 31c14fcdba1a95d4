"""Checks that emails state an answer, and that it is too specific to occur by chance."""

from __future__ import annotations

import re
from typing import Final

from emailrl.facts.lexicon import STOPWORDS
from emailrl.facts.literals import Literal
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Fact, Reading, agree, read
from emailrl.facts.words import clean
from emailrl.questions.inbox.mail import Mail, spell_day

MIN_FOUND: Final = 0.5
"""Share of an answer's words that its emails must contain; they must contain all of its facts."""

_WORD: Final = re.compile(r"[^\W\d_]+")
_COMMON: Final = STOPWORDS | frozenset(
    re.findall(
        r"[\w']+",
        "after all am asap attached before best day days different else emails ever everything few first further give "
        "going good hello hi however i'm immediately know last later let like look mail mails many meeting messages "
        "more most much new next none now off ok on once one only or other out over own people person question "
        "questions re regards same see send sent several she since something soon sure thank thanks thing things this "
        "those time today together tomorrow too under until up very was way week well whether while work would year "
        "yesterday yet",
    )
)
"""Words in nearly every email, so that finding one proves nothing."""


def is_stated(answer: str, mails: list[Mail]) -> bool:
    """Whether emails contain every fact of an answer and at least half of its words; False if it has neither."""
    text = "\n".join(_text(mail) for mail in mails)
    if _WORD.search(answer) and plain(answer) in plain(text):  # also where words are not set apart by spaces
        return True
    asked = read(clean(answer))
    known = read(clean(text), literals=[fact for fact in asked.facts if isinstance(fact, Literal)])
    if not all(any(agree(fact, other) for other in known.facts) for fact in asked.facts):
        return False
    telling = {word for word in asked.stems if len(word) > 3}
    if not telling and not asked.facts:
        telling = {word for word in asked.stems if len(word) > 1}
    if not telling:
        return bool(asked.facts)
    stems = {word[:5] for word in known.stems}
    return sum(word[:5] in stems for word in telling) >= MIN_FOUND * len(telling)


def is_specific(answer: str, mails: list[Mail]) -> bool:
    """Whether an answer contains a fact, a name, or two content words.

    A single digit is not a fact, because every date has one. A name is a word that the emails never write in lower
    case, or part of one of their addresses; in a script without lower case, any word may be one.
    """
    reading = read(clean(answer))
    telling = {word for word in _words(reading) if len(word) > 1 and word not in _COMMON}
    if any(_is_telling(fact) for fact in reading.facts) or len(telling) > 1 or (telling and reading.facts):
        return True
    names = _names(mails)
    return any(word in names or word.upper() == word for word in telling)


def plain(text: str) -> str:
    """Return only a text's words and numbers, in lower case."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _is_telling(fact: Fact) -> bool:
    return not isinstance(fact, Quantity) or fact.base is not None or fact.value >= 10


def _words(reading: Reading) -> list[str]:
    return [unit.text.lower() for unit in reading.units if unit.fact is None]


def _names(mails: list[Mail]) -> set[str]:
    written = {word for mail in mails for word in _WORD.findall(f"{mail.subject}\n{mail.body}")}
    addresses = {word for mail in mails for address in mail.addresses for word in _WORD.findall(address.lower())}
    return {word.lower() for word in written if not word.islower()} - written | addresses


def _text(mail: Mail) -> str:
    """All text of an email, including its date in words."""
    day = f"{mail.day:%A}, {spell_day(mail.day)}, {mail.day.month}/{mail.day.day}, {mail.sent_at}"
    return "\n".join((mail.subject, mail.body, day, mail.sender, *mail.to, *mail.cc, *mail.bcc))
