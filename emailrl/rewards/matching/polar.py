"""Reads the answer to a yes/no question."""

from __future__ import annotations

import re

from emailrl.facts.dates import Date, Time
from emailrl.facts.reading import Reading
from emailrl.facts.words import OPPOSITES
from emailrl.rewards.matching.clauses import Clause
from emailrl.rewards.matching.coverage import Case
from emailrl.rewards.matching.language import DENIAL, NO_DENIAL, REFUSAL

_YES = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:yes|yeah|yep|correct|affirmative|indeed)\b", re.IGNORECASE)
_NO = re.compile(r"(?:^|[.,;!:]\s*|\bso\s+)(?:no|nope)\b(?!\s(?:later|more|less|doubt)\b)|^not\b(?! only\b)", re.I)
_UNDECIDED = re.compile(
    r"\b(?:maybe|perhaps|possibly|unclear|unsure|sometimes|depend\w*|uncertain|unknown|undecided|might|not sure"
    r"|not clear|nobody knows|yes and no|yes or no|could not tell)\b",
    re.IGNORECASE,
)
_VERDICT = re.compile(
    r"^\W*(?:yes|yeah|yep|no|nope)\b|(?<!said )(?<!says )(?<!saying )(?<!answered )(?<!replied )(?<!voted )"
    r"\b(?:yes|yeah|yep|no|nope)\b(?!\.\s?\ue000)(?=\s*(?:$|[^\w\s'\ue000]|\ue000+\s*(?:$|[^\w\s]|yes|no)))",
    re.IGNORECASE,
)
"""A yes or no that opens a text or ends a part of it; "no" before a noun and "they said no" are none."""
_REPLY = re.compile(
    r"(?:he|she|it|they|we|i|you|that)\s(?:is|are|was|were|do|does|did|has|have|had|can|could|will|would|should|must|may|won)"
    r"(?P<no>(?:n'?t|\snot)?|'t|not)\s*(?:$|[.!,;])",
    re.IGNORECASE,
)


def is_undecided(reading: Reading) -> bool:
    """Whether a text gives both yes and no as its verdict, in any layout."""
    return len({"y" in found[0].lower() for found in _VERDICT.finditer(reading.masked)}) > 1


def side(case: Case) -> bool | None:
    """Return a text's answer to a yes/no question: True for yes, False for no, None for neither."""
    text, stems = case.given.text, case.asked.stems
    if _UNDECIDED.search(text):
        return None
    yes, no = _YES.search(text), _NO.search(text)
    if yes or no:
        return no is None or (yes is not None and yes.start() < no.start())
    if reply := _REPLY.match(text):
        return not reply["no"]
    if refusal := REFUSAL.search(text):
        part = next(
            (part for part in case.clauses if part.start <= refusal.start() < part.start + len(part.text)), None
        )
        if part is not None and part.asserted is None:
            return None
        negated = part is not None and re.search(r"\bnot\b|n't\b|\bnever\b", part.text, re.IGNORECASE) is not None
        return (REFUSAL.search(case.asked.reading.text) is not None) is not negated
    said = {unit.stem for unit in case.given.units if unit.fact is None}
    if any(OPPOSITES.get(word, set()) & stems for word in said - stems):
        return False
    about = [part.asserted for part in case.clauses if any(unit.stem in stems for unit in part.units)]
    return None if not {True, False} & {*about} else False not in about


_FACTUAL = re.compile(r"(?:is|are|was|were|do|does|did|has|have|had)\b", re.IGNORECASE)
_LIMITED = re.compile(
    r"\b(?:will|would|should|shall|can|could|may|might|must|to|only|just|still|some|one|few|most|half|partly|part|yet|but"
    r"|until|if|when|once|after|before|because|as|so|though|although|however|instead|later|than|except)\b",
    re.IGNORECASE,
)
"""Tells that a clause qualifies the yes or no before it."""
_ALL = ("everyone", "everybody")
_SAID_NO = re.compile(r"\b(?:said|says|answered|replied)\s(?:no|not)\b", re.IGNORECASE)


def contradicts_itself(case: Case) -> bool:
    """Whether a yes or no is followed by its opposite: "No, it was signed", "Yes, she refused"."""
    question, text = case.asked.reading, case.given.text
    word = _NO.match(text) or _YES.match(text)
    if word is None or DENIAL.search(question.text):
        return False
    part = next((part for part in case.clauses if re.search(r"\w", rest_of(part, word.end()))), None)
    if part is None:
        return False
    rest = rest_of(part, word.end())
    stems = {unit.stem for unit in part.units if unit.fact is None}
    asked = case.asked.stems - {unit.stem for unit in question.units if unit.text[0].isupper()}
    negated = DENIAL.search(NO_DENIAL.sub(" ", rest)) is not None
    if _YES.match(text):
        opposite = any(OPPOSITES.get(stem, set()) & case.asked.stems for stem in stems - case.asked.stems)
        denied = opposite is not negated and (opposite or bool(stems & asked))
        return not _LIMITED.match(rest) and (denied or _SAID_NO.search(rest) is not None)
    if negated or not _FACTUAL.match(question.text) or question.facts or _LIMITED.search(rest):
        return False
    if case.holds(*(unit for unit in part.units if unit.stem not in case.asked.stems)):
        return False
    new = [unit for unit in case.new(part.units) if not isinstance(unit.fact, Date | Time)]
    return bool(stems & asked) and all(unit.text.lower() in _ALL for unit in new)


def rest_of(part: Clause, start: int) -> str:
    """Return the text of a clause from position ``start`` of the answer."""
    return part.text[max(0, start - part.start) :].lstrip(" .,;:!")
