"""Who does what to whom: whether an answer turns the question's relation round."""

from __future__ import annotations

import re

from emailrl.facts.names import Name, find_names, word_before
from emailrl.facts.words import stem
from emailrl.rewards.matching.case import Case
from emailrl.rewards.matching.clauses import Clause

_AUXILIARY = r"(?:is|are|was|were|did|does|do|has|have|had|will|would|can|could|should)\b"
_SUBJECT = re.compile(
    rf"^(?:who|(?:which|what)(?:\s(?!{_AUXILIARY})\w+){{1,2}}?)\s(?:(?:is|are|was|were|will|would|has|have|had|be|been)\s)*"
    rf"(?!{_AUXILIARY})[a-z]+\b",
    re.IGNORECASE,
)
_PASSIVE = re.compile(r"\b(?:by|is|was|are|were|been|be)\b", re.IGNORECASE)
_PREPOSITIONS = frozenset(["from", "for", "to", "of", "into", "with", "against", "under"])


def turned_round(case: Case) -> bool:
    """A name of the question stands where the reference belongs, or the question's verb has another subject."""
    if not case.given.mixed or not case.expected.names:
        return False
    names = find_names(case.given.reading)
    for part in case.given.clauses:
        if part.asserted:
            here = [name for name in names if part.start <= name.start < part.end]
            wanted = [name for name in here if any(same(name, own) for own in case.expected.names)]
            others = [name for name in here if name not in wanted]
            if (wanted and others and trades_places(case, part, wanted, others)) or has_other_agent(case, part, here):
                return True
    return False


def same(one: Name, other: Name) -> bool:
    """Two names share a word of more than a letter."""
    return any(len(token) > 1 and token in other.tokens for token in one.tokens)


def trades_places(case: Case, part: Clause, wanted: list[Name], others: list[Name]) -> bool:
    """The preposition before a name of the question now stands before the reference, and not before that name."""
    text = case.given.reading.masked
    for asked in find_names(case.asked.reading):
        before = word_before(case.asked.reading.text, asked.start)
        moved = [name for name in others if same(name, asked)]
        if not moved:
            continue
        if before in _PREPOSITIONS:
            if any(word_before(text, name.start) == before for name in wanted) and not any(
                word_before(text, name.start) == before for name in moved
            ):
                return True
        elif is_subject_question(case) and moved[0].start < wanted[0].start:
            between = text[moved[0].end : wanted[0].start]
            if verb_in(case, between) and not _PASSIVE.search(between):
                return True
    return False


def has_other_agent(case: Case, part: Clause, names: list[Name]) -> bool:
    """ "Approved by Ned", where Ned is neither asked about nor expected."""
    if not is_subject_question(case):
        return False
    text = part.text
    for name in names:
        if any(same(name, own) for own in case.expected.names):
            continue
        before = text[: name.start - part.start]
        by = re.search(r"(\w+) by\s$", before)
        if by and verb_in(case, by[1]):
            return True
    return False


def is_subject_question(case: Case) -> bool:
    """ "Who replaced Ada", not "whom did Ada replace"."""
    return _SUBJECT.match(case.asked.reading.text) is not None


def verb_in(case: Case, text: str) -> bool:
    """Whether a text has a word of the question that is no name."""
    return any(stem(word) in case.asked.stems for word in re.findall(r"[a-z]+", text))
