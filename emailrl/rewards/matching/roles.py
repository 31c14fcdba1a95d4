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
    rf"(?!{_AUXILIARY})(?P<verb>[a-z]+)\b",
    re.IGNORECASE,
)
_OBJECT = re.compile(r"^(?:who|whom|(?:which|what)(?:\s\w+){1,3}?)\s(?:did|does|do)\b", re.IGNORECASE)
_PREPOSITIONS = frozenset(("from", "for", "to", "of", "into", "with", "against", "under"))


def turned_round(case: Case) -> bool:
    """A name of the question stands where the reference belongs, or another does what is asked about."""
    if not case.given.mixed or not case.is_short:
        return False
    names = find_names(case.given.reading)
    for part in case.given.clauses:
        here = [name for name in names if part.asserted and part.start <= name.start < part.end]
        wanted = [name for name in here if any(is_same(name, own) for own in case.expected.names)]
        others = [name for name in here if name not in wanted]
        if case.holds_any(part.units) and trades_places(case, wanted, others):
            return True
        if any(acts(case, part, name) for name in others):
            return True
        if any(is_acted_on(case, part, name) for name in wanted):
            return True
    return False


def is_same(one: Name, other: Name) -> bool:
    """Two names share a word of more than a letter."""
    return any(len(token) > 1 and token in other.tokens for token in one.tokens)


def trades_places(case: Case, wanted: list[Name], others: list[Name]) -> bool:
    """The preposition before a name of the question stands before the reference now, or before a stranger."""
    text, question = case.given.reading.masked, case.asked.reading.text
    for name in others:
        found = re.search(rf"\b{re.escape(name.tokens[0])}\b", question, re.IGNORECASE)
        before = word_before(question, found.start()) if found else ""
        moved = before in _PREPOSITIONS and word_before(text, name.start) != before
        if moved and any(word_before(text, other.start) == before for other in wanted):
            return True
    known = [name for name in others if set(name.tokens) <= set(re.findall(r"\w+", question.lower()))]
    for preposition in ("from", "for", "to", "against"):
        asked = any(word_before(question, name.start) == preposition for name in find_names(case.asked.reading))
        strangers = [name for name in others if name not in known and word_before(text, name.start) == preposition]
        if asked and strangers and not known:
            return True
    return False


def acts(case: Case, part: Clause, name: Name) -> bool:
    """ "Approved by Ned", where Ned is neither asked about nor expected."""
    by = re.search(r"(\w+) by\s$", part.text[: name.start - part.start])
    if by is None or not _SUBJECT.match(case.asked.reading.text):
        return False
    return stem(by[1]) in case.asked.stems


def is_acted_on(case: Case, part: Clause, name: Name) -> bool:
    """ "Ada replaced Ben" for who replaced Ada; "Ben beat us" for whom we beat."""
    text, question = case.given.reading.masked, case.asked.reading.text
    before = word_before(text, name.start)
    if verb := _SUBJECT.match(question):
        return stem(before) == stem(verb["verb"]) and name.start - part.start > len(before) + 3
    after = re.match(r"\W+(\w+)", text[name.end : part.end])
    if after is None or not _OBJECT.match(question) or after[1].endswith("ing"):
        return False
    return stem(after[1]) in case.asked.stems
