"""Detects answers with the right words but another meaning: swapped roles, or reordered parts of a list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import pairwise

from emailrl.facts.names import find_names, same_token, word_before
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Reading, Unit, agree
from emailrl.facts.words import has_word, stem
from emailrl.rewards.matching.coverage import Case
from emailrl.rewards.matching.rivals import JOINT, lists

_BY_WHO = re.compile(
    r"^(?:who|(?:which|what)\s(?!(?:is|are|was|were|do|does|did)\b)\w+)\s(?:(?:is|are|was|were|has|have|had|will|would)\s)*"
    r"(?!(?:did|does|do)\b)(?P<verb>\w+)",
    re.IGNORECASE,
)
_SLOTS = ("from", "for", "to", "into", "with", "against", "under")
_TO_WHOM = re.compile(r"^(?:who|whom|(?:which|what)(?:\s\w+){1,3}?)\s(?:did|does|do)\s", re.IGNORECASE)
_LINK = re.compile(r"\s+(?:after|before|if|unless|with|into|for|to|than|then)\s+", re.IGNORECASE)
_SCORE = re.compile(r"\s?(?:[-\u2013:]|\bto\b)\s?")
_PART = re.compile(f"{JOINT.pattern}|{_LINK.pattern}", re.IGNORECASE)
"""Joins the parts of a statement; their order may matter."""


def turned_round(case: Case) -> bool:
    """Whether roles are swapped: a name from the question in the reference's place, or another name as the agent."""
    if not (case.is_mixed and case.is_short):
        return False
    question, text = case.asked.reading.text, case.given.masked
    active, whom = _BY_WHO.match(question), _TO_WHOM.match(question)
    own = {token for name in case.expected.names for token in name.tokens if len(token) > 1}
    slots = {word_before(question, name.start): name.tokens[0] for name in find_names(case.asked.reading)}
    every = find_names(case.given)
    for part in case.clauses:
        names = [name for name in every if part.asserted and part.start <= name.start < part.start + len(part.text)]
        for name in names:
            before, after = word_before(text, name.start), re.match(r"\W+(?!\w+ing\b)(\w+)", text[name.end :])
            is_own = bool(own & {*name.tokens})
            asked = slots.get(before) if before in _SLOTS else None
            if asked and f"{before} {asked}" not in part.text.lower() and (asked in part.text.lower()) is is_own:
                return True
            agent = re.search(r"(\w+) by\s$", text[: name.start])
            if active and not is_own and agent and stem(agent[1]) in case.asked.stems:
                return True
            first = name.start <= part.start + len(before) + 3
            if active and is_own and not first and stem(before) == stem(active["verb"]):
                return True
            if whom and is_own and after and stem(after[1]) in case.asked.stems:
                return True
    return False


def replaced(case: Case) -> bool:
    """Whether a new word or fact replaces one of the reference in the same context."""
    own = case.expected.full.units
    ours = [unit.stem or unit.fact for unit in own]
    for units in case.sentences.values():
        theirs = [unit.stem or unit.fact for unit in units]
        for kind, first, last, start, end in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
            inside = first > 0 and last < len(own) and start > 0 and end < len(units)
            alone = kind == "replace" and last - first == end - start == 1
            if not (inside and alone) or same_token(own[first].text.lower(), units[start].text.lower()):
                continue
            if case.new(units[start:end]) and not has(case.given.units, own[first]):
                return True
    return False


def mixed_up(case: Case) -> bool:
    """Whether only the order differs: the parts of a list are shuffled, or the two sides of an "after" exchanged."""
    if scores_exchanged(case):
        return True
    if case.is_quoted or len(case.new(case.given.units)) > 2:
        return False
    if facts_exchanged(case):
        return True
    ours, theirs = (
        [item.units for items in lists(reading.masked, reading.units, _PART) for item in items if item.units]
        for reading in (case.expected.full, case.given)
    )
    places = [[[at for at, part in enumerate(ours) if has(part, unit)] for unit in part] for part in theirs]
    sure = [[place for at in part if len(at) == 1 for place in at] for part in places]
    order = [at for part in sure for at in part]
    if order == sorted(order):
        return False
    if len(ours) == len(theirs) and any(sum(len(ours[at]) > 1 for at in {*part}) > 1 for part in sure):
        return True
    own, given = case.expected.full, case.given
    for link in _LINK.finditer(given.masked):
        middle = own.masked.find(link[0])
        behind = [unit for unit in given.units if unit.start >= link.end()][:2]
        early = [unit for unit in own.units if unit.start < middle]
        late = [unit for unit in own.units if unit.start > middle]
        if any(has(early, unit) and not has(late, unit) for unit in behind):
            return True
    return False


def scores_exchanged(case: Case) -> bool:
    """Whether the sides of a score or ratio are exchanged: "1-3" for "3-1"."""
    own, given = set(_scores(case.expected.full)), set(_scores(case.given))
    return any((second, first) in given - own for first, second in own - given)


def _scores(reading: Reading) -> Iterator[tuple[float, float]]:
    """Yield the two numbers of each score, ratio or range: "3-1", "2:1", "7 to 2"."""
    for one, other in pairwise(reading.units):
        joint = _SCORE.fullmatch(reading.text[one.end : other.start])
        if joint and isinstance(one.fact, Quantity) and isinstance(other.fact, Quantity):
            yield one.fact.value, other.fact.value


def facts_exchanged(case: Case) -> bool:
    """Whether the words keep the reference's order but the facts do not.

    Example: "Ada 40 %, Bo 60 %" for "Ada 60 %, Bo 40 %".
    """
    own = case.expected.full.units
    sure = []
    for unit in case.given.units:
        places = [at for at, one in enumerate(own) if has([one], unit)]
        if len(places) == 1:
            sure.append((*places, unit.fact is None))
    words, facts = ([at for at, is_word in sure if is_word is wanted] for wanted in (True, False))
    between = any(first < word < last for first, last in pairwise(sorted(facts)) for word in words)
    return between and words == sorted(words) and len(words) > 1 and facts != sorted(facts)


def others_own(case: Case) -> bool:
    """Whether the expected name occurs only as the possessor of somebody else, as in "Ada Moss's deputy"."""
    if not (case.asked.person and case.expected.names):
        return False
    own = {token for name in case.expected.names for token in name.tokens}
    text = case.given.masked
    held = [name for name in find_names(case.given) if own & {*name.tokens}]
    owned = [re.match(r"\W*'s?\s+(\w+)", text[name.end - 2 :]) for name in held]
    return bool(owned) and all(found is not None and not has_word(stem(found[1]), case.known) for found in owned)


def has(units: Sequence[Unit], wanted: Unit) -> bool:
    """Whether one of the units says the same as ``wanted``."""
    return any(
        agree(unit.fact, wanted.fact)
        if unit.fact and wanted.fact
        else unit.fact is wanted.fact and unit.stem == wanted.stem
        for unit in units
    )
