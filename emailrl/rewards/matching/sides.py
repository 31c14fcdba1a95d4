"""Yes, no, or neither: the side a text takes on a yes/no question."""

from __future__ import annotations

import re
from collections.abc import Sequence

from emailrl.facts.words import OPPOSITES
from emailrl.rewards.matching.clauses import Clause
from emailrl.rewards.matching.markers import REFUSAL
from emailrl.rewards.matching.question import Question

_YES = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:yes|yeah|yep|correct|affirmative|indeed)\b", re.IGNORECASE)
_NO = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:no|nope)\b(?!\s(?:later|more|less)\b)|^not\b(?! only\b)", re.IGNORECASE)
_UNDECIDED = re.compile(
    r"\b(?:maybe|perhaps|possibly|unclear|unsure|sometimes|depend\w*|uncertain|unknown|undecided|might|not sure"
    r"|not clear|nobody knows|yes and no|yes or no|could not tell)\b",
    re.IGNORECASE,
)
_BRIEF_REPLY = re.compile(
    r"(?:he|she|it|they|we|i|you|that)\s(?:(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should|must|may)"
    r"(?:n't|\snot)?|won't|cannot)\s*(?:$|[.!,;])",
    re.IGNORECASE,
)


def side(text: str, parts: Sequence[Clause], asked: Question) -> bool | None:
    """True for yes, False for no, None where the text takes no side."""
    if _UNDECIDED.search(text):
        return None
    yes, no = _YES.search(text), _NO.search(text)
    if yes and no:
        return yes.start() < no.start()
    if yes or no:
        return yes is not None
    if brief := _BRIEF_REPLY.match(text):
        return not re.search(r"n't\b|\bnot\b", brief[0])
    stems = asked.stems
    if refusal := REFUSAL.search(text):
        about = REFUSAL.search(asked.reading.text) is not None
        part = next((part for part in parts if part.start <= refusal.start() < part.end), None)
        negated = part is not None and re.search(r"\bnot\b|n't\b|\bnever\b", part.text, re.IGNORECASE) is not None
        return about is not negated
    said = {unit.stem for part in parts for unit in part.units if unit.fact is None}
    if any(OPPOSITES.get(word, set()) & stems for word in said - stems):
        return False
    denied = any(part.asserted is False and any(unit.stem in stems for unit in part.units) for part in parts)
    asserted = any(part.asserted and any(unit.stem in stems for unit in part.units) for part in parts)
    return None if not denied and not asserted else not denied
