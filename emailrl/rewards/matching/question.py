"""What a question asks for, and its reference answer read in that light."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from emailrl.rewards.matching.language import content_stems
from emailrl.rewards.matching.statement import Statement, read

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
    r"(?:person|people|colleague|employee|candidate|name|member|manager|analyst|bank|companie|company)s?\b",
    re.IGNORECASE,
)
_SEVERAL = re.compile(r"(?:\band|,)\s(?:by\s|to\s|at\s)?(?:who|whom|what|when|where|why|how|which)\b", re.IGNORECASE)
_POLAR = re.compile(
    r"^(?:and\s|so\s)?(?:is|are|was|were|am|do|does|did|can|could|will|would|should|shall|has|have|had|may|might|must"
    r"|isn't|aren't|wasn't|weren't|don't|doesn't|didn't|can't|won't|hasn't|haven't)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the kinds of answer it calls for."""

    statement: Statement
    stems: frozenset[str]
    polar: bool
    """It wants a yes or a no."""
    temporal: bool
    quantity: bool
    person: bool
    several: bool
    """It asks for several things at once, so everything in the reference counts."""


@lru_cache(maxsize=4096)
def read_question(question: str) -> Question:
    """Read a cleaned question."""
    temporal, person = bool(_TEMPORAL.search(question)), bool(_PERSON.search(question))
    return Question(
        read(question.rstrip("? "), temporal=temporal, person=person),
        frozenset(content_stems(question)),
        polar=bool(_POLAR.match(question)) and not re.search(r"\bor\b(?! not)", question),
        temporal=temporal,
        quantity=bool(_QUANTITY.search(question)),
        person=person,
        several=bool(_SEVERAL.search(question)),
    )


@lru_cache(maxsize=4096)
def read_reference(question: str, reference: str) -> Statement:
    """Read a cleaned reference answer to a cleaned question."""
    asked = read_question(question)
    # What happened can be a refusal: only where a side is asked for does a word like "declined" deny the rest.
    known = frozenset() if asked.polar else frozenset(content_stems(reference))
    return read(reference, temporal=asked.temporal, person=asked.person, known=known)
