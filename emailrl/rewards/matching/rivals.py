"""What stands against an answer that holds the right thing: rival candidates, opposites, hedges, floods of text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from emailrl.rewards.matching.dates import Date, Time
from emailrl.rewards.matching.language import OPPOSITES
from emailrl.rewards.matching.names import Name, rival_items, rival_names
from emailrl.rewards.matching.quantities import Quantity
from emailrl.rewards.matching.question import Question
from emailrl.rewards.matching.statement import Literal, Statement, same_kind

_NO_ANSWER = re.compile(
    r"\b(?:do not|don't|did not|didn't|cannot|can't|could not|couldn't|unable to|was not able to)\s"
    r"(?:know|find|tell|determine|say|confirm|locate|answer)\b|\bunknown\b"
    r"|\bnot (?:mentioned|specified|stated|found|available|provided|clear|sure)\b"
    r"|\bno (?:mention|information|emails?|answer|record)\b",
    re.IGNORECASE,
)
_OR = re.compile(r"\bor\b(?!\s(?:so|more|less|later|earlier|after|before|not|higher|lower)\b)", re.IGNORECASE)
_LONG = 40
"""From so many words on, an "or" need not offer a choice of answers."""


def evades(expected: Statement, given: Statement) -> bool:
    """The answer gives up, offers a choice where the reference has none, or is so long that it would hold anything."""
    if _NO_ANSWER.search(given.text) and not _NO_ANSWER.search(expected.text):
        return True
    if _OR.search(given.text) and not _OR.search(expected.text) and len(given.text.split()) <= _LONG:
        return True
    return len(given.text.split()) > 60 + 6 * len(expected.text.split())


def conflicts(
    asked: Question, expected: Statement, given: Statement, names: Sequence[Name], kinds: tuple[type, ...] = ()
) -> bool:
    """A rival of the asked ``kinds`` of fact, of the wanted ``names``, of anything literal; or an opposite."""
    brief = len(expected.stems) + len(expected.facts) <= 4
    if rival_facts(asked, expected, given, (*(kinds or ((Date, Time, Quantity) if brief else ())), Literal)):
        return True
    a_name_alone = len(names) == 1 and len(expected.stems) <= len(names[0].tokens) + 1 and not expected.facts
    if names and not kinds and (asked.person or a_name_alone):
        stems = expected.all_stems() | asked.stems
        if rival_names(given.names, [*expected.names, *asked.statement.names], stems) or rival_items(given.text, stems):
            return True
    return _opposed(asked, expected, given)


def rival_facts(asked: Question, expected: Statement, given: Statement, kinds: tuple[type, ...]) -> bool:
    """A fact in the answer that contradicts every fact of its kind in the reference and the question."""
    said = expected.all_facts() + asked.statement.all_facts()
    for fact in given.facts + given.trailing_facts:
        if not isinstance(fact, kinds) or (isinstance(fact, Quantity) and fact.weak):
            continue
        in_reference = any(same_kind(other, fact) for other in expected.all_facts())
        if in_reference and all(other.contradicts(fact) for other in said if same_kind(other, fact)):  # type: ignore[arg-type]
            return True
    return False


def _opposed(asked: Question, expected: Statement, given: Statement) -> bool:
    """A word of the reference, or of the question, is answered by its opposite."""
    said = set(expected.stems) | expected.trailing_stems | asked.stems
    return any(OPPOSITES.get(word, set()) & said - set(given.stems) for word in given.stems if word not in said)
