"""What a question asks for, and its reference answer read in that light."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from emailrl.facts.dates import Date, Time
from emailrl.facts.lexicon import STOPWORDS
from emailrl.facts.names import Name, find_names
from emailrl.facts.quantities import UNITS, Quantity
from emailrl.facts.reading import Fact, Reading, agree, read
from emailrl.rewards.matching.clauses import Clause, clauses
from emailrl.rewards.matching.markers import REFUSAL

_TEMPORAL = re.compile(
    r"\bwhen\b|\b(?:what|which)\s(?:(?:is|was|are|will be)\s)?(?:the\s)?(?:\w+\s)?"
    r"(?:time|date|day|weekday|month|year|deadline)s?\b",
    re.IGNORECASE,
)
_QUANTITY = re.compile(
    r"\bhow\s(?:many|much|long|large|big|far|old|tall|high|wide|fast|often)\b|\b(?:price|costs?|fee|budget|rate|amount"
    r"|salary|share|percentage|percent|discount|rent|strike|size|total|value|volume|number of|balance|limit|threshold"
    r"|minimum|maximum)\b",
    re.IGNORECASE,
)
_PERSON = re.compile(
    r"^(?:and\s|so\s)?(?:to\s|from\s|with\s|by\s|for\s)?(?:who|whom|whose)\b|\b(?:which|what)\s(?:\w+\s)?"
    r"(?:person|people|colleague|employee|candidate|name|member|manager|analyst|trader|lawyer|actor|actress|singer)s?\b",
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    r"(?:\band|,)\s(?:by\s|to\s|at\s|for\s)?(?:who|whom|what|when|where|why|how|which)\b", re.IGNORECASE
)
_POLAR = re.compile(
    r"^(?:and\s|so\s)?(?:is|are|was|were|am|do|does|did|can|could|will|would|should|shall|has|have|had|may|might|must"
    r"|isn't|aren't|wasn't|weren't|don't|doesn't|didn't|can't|won't|hasn't|haven't)\b",
    re.IGNORECASE,
)
_TRAILING = re.compile(r"(?:which|who|whose|where|\w{2,}ing|hence|although|while)\b", re.IGNORECASE)
"""How a clause begins that only accompanies what a reference says."""
WHOLE = "whole"
"""The kind of literal that the whole text of a long reference makes."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the kinds of answer it calls for."""

    reading: Reading
    stems: frozenset[str]
    polar: bool
    """It wants a yes or a no."""
    temporal: bool
    quantity: bool
    person: bool
    several: bool
    """It asks for several things at once, so everything in the reference counts."""
    unit: tuple[str, float] | None
    """Of "how many feet"."""
    kind: str | None = None
    """The only kind of thing that answers it, where that is known."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference answer: what of it an answer has to give."""

    full: Reading
    """All of it."""
    reading: Reading
    """Without what stands in brackets."""
    clauses: tuple[Clause, ...]
    statuses: frozenset[bool | None]
    """Which of asserted, denied and open its clauses are; an answer's names and facts may stand in such ones too."""
    names: tuple[Name, ...]
    facts: tuple[Fact, ...]
    """Those that the question does not hold."""
    words: tuple[str, ...]
    """Stems outside names that the question does not hold."""
    denied: frozenset[str]
    """Stems of its denied clauses."""


@lru_cache(maxsize=4096)
def read_question(question: str) -> Question:
    """Read a cleaned question."""
    temporal = bool(_TEMPORAL.search(question))
    unit = re.search(r"\bhow (?:many|much) (\w+)", question, re.IGNORECASE)
    reading = read(question.rstrip("? "), temporal=temporal)
    return Question(
        reading,
        frozenset(reading.stems),
        polar=bool(_POLAR.match(question)) and not re.search(r"\bor\b(?! not)", question),
        temporal=temporal,
        quantity=bool(_QUANTITY.search(question)),
        person=bool(_PERSON.search(question)),
        several=bool(_SEVERAL.search(question)),
        unit=UNITS.get(unit[1].lower()) if unit else None,
    )


def asked_as(asked: Question, kind: str) -> Question:
    """A question as one that asks for ``kind`` alone."""
    return replace(
        asked,
        polar=False,
        several=False,
        temporal=kind == "date",
        quantity=kind in ("number", "count"),
        person=kind == "person",
        kind=kind,
    )


@lru_cache(maxsize=4096)
def read_reference(question: str, reference: str, kind: str | None = None) -> tuple[Question, Reference]:
    """Read a cleaned question, as one that asks for a ``kind``, and its reference without what stands in brackets."""
    asked = read_question(question)
    asked = asked_as(asked, kind) if kind else asked
    bare = re.sub(r"\s*\([^()]*[A-Za-z][^()]*\)", "", reference).strip()
    reading = read(bare if re.search(r"\w", bare) else reference, temporal=asked.temporal)
    parts = tuple(clauses(reading, "" if asked.polar else context(question, reference)))
    main = [part for number, part in enumerate(parts) if not (number and _TRAILING.match(part.text))]
    stated = [unit for part in main if part.asserted is not None for unit in part.units]
    starts = {unit.start for unit in stated}
    names = [name for name in find_names(reading) if not set(name.tokens) <= _tokens(asked) and name.start in starts]
    facts = tuple(unit.fact for unit in stated if unit.fact is not None) or tuple(reading.facts)
    said = asked.reading.facts
    fresh = tuple(fact for fact in facts if not any(agree(other, fact) for other in said)) or facts
    inside = [unit for unit in reading.units if any(name.start <= unit.start < name.end for name in names)]
    outside = [unit.stem for unit in stated if unit.fact is None and unit not in inside]
    words = tuple(dict.fromkeys(stem for stem in outside if stem not in asked.stems))
    denied = frozenset(unit.stem for part in parts if part.asserted is False for unit in part.units)
    if not (names or fresh or words):
        words = tuple(dict.fromkeys(outside))
    full = read(reference, temporal=asked.temporal)
    return asked, Reference(
        full, reading, parts, frozenset(part.asserted for part in parts), tuple(names), fresh, words, denied
    )


def context(question: str, reference: str) -> str:
    """Where denials deny nothing: the question, titles in the reference ("No Free Lunch"), and what it refuses."""
    titles = re.findall(r"\b(?:No|Not|Never|Nothing|None|Without|Neither)\s[A-Z]\w+", reference)
    return " ".join([question, *titles, *(found[0] for found in REFUSAL.finditer(reference))])


def kinds_asked(asked: Question, expected: Reference) -> tuple[type, ...]:
    """The kinds of fact that answer the question, as far as the reference has them."""
    if asked.several:
        return ()
    dates = [fact for fact in expected.facts if isinstance(fact, Date)]
    if asked.temporal and (dates or any(isinstance(fact, Time) for fact in expected.facts)):
        # "By the end of April" is more than its month.
        vague = dates and all(date.day is None and date.weekday is None and date.year is None for date in dates)
        return () if vague and expected.words else (Date, Time)
    if asked.quantity and any(isinstance(fact, Quantity) and not fact.weak for fact in expected.facts):
        return (Quantity,)
    return ()


def _tokens(asked: Question) -> set[str]:
    return {word for word in re.findall(r"\w+", asked.reading.text.lower()) if word not in STOPWORDS}
