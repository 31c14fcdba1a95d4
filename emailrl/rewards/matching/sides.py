"""Yes, no, or neither: the side a text takes on a yes/no question."""

from __future__ import annotations

import re

from emailrl.rewards.matching.question import Question
from emailrl.rewards.matching.statement import Statement

_YES = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:yes|yeah|yep|correct|affirmative|indeed)\b", re.IGNORECASE)
_NO = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:no|nope)\b(?!\s(?:later|more|less)\b)|^not\b(?! only\b)", re.IGNORECASE)
_UNDECIDED = re.compile(
    r"\b(?:maybe|perhaps|possibly|unclear|unsure|sometimes|depend\w*|uncertain|unknown|undecided|might|not sure"
    r"|not clear|nobody knows|yes and no|yes or no)\b",
    re.IGNORECASE,
)
_BRIEF_REPLY = re.compile(r"(?:he|she|it|they|we|i|you|that)\s(?:\w+n't|\w+(?:\snot)?)[.!]?", re.IGNORECASE)
_OPENING = 6
"""So many content words show what an answer speaks of."""


def side(statement: Statement, asked: Question) -> bool | None:
    """True for yes, False for no, None where the text takes no side."""
    text = statement.text
    yes, no = _YES.search(text), _NO.search(text)
    if yes and no:
        return yes.start() < no.start()
    if yes or no:
        return yes is not None
    if _BRIEF_REPLY.fullmatch(text):
        return not re.search(r"n't\b|\bnot\b", text)
    denied = asked.stems & set(statement.denied_stems)
    asserted = asked.stems & (set(statement.stems) | statement.trailing_stems)
    return None if not denied and not asserted else not denied


def takes_side(given: Statement, asked: Question, expected: Statement) -> bool | None:
    """The side an answer takes; None, too, where it hedges or speaks of something else."""
    if _UNDECIDED.search(given.text):
        return None
    opening = (given.stems + given.denied_stems)[:_OPENING]
    said = asked.stems | expected.all_stems()
    to_the_point = 2 * sum(word in said for word in opening) >= len(opening)
    return side(given, asked) if to_the_point else None
