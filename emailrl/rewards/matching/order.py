"""An answer in the reference's words that says something else: a word exchanged, or the words in another order."""

from __future__ import annotations

import re
from collections.abc import Sequence

from emailrl.facts.reading import Reading, Unit, agree
from emailrl.facts.words import has_word
from emailrl.rewards.matching.case import Case

_ITEM = re.compile(r"\s*[,;:]\s+(?:(?:and|but|then|or|with)\s+)*|\s+(?:and|but|or)\s+(?:then\s+)?|\.\s+|\n|\s+then\s+")
_LINK = re.compile(r"\b(?:after|before|if|unless|with|into|for|to|than)\b", re.IGNORECASE)


def substitutes(case: Case) -> bool:
    """One word of the reference is replaced by another between the same two neighbours."""
    wanted = [unit.stem for unit in case.expected.reading.units]
    for part in case.given.clauses:
        have = [unit.stem for unit in part.units]
        for at in range(1, len(have) - 1):
            left, right = have[at - 1], have[at + 1]
            fresh = left and right and have[at] and not has_word(have[at], case.known)
            if fresh and any(wanted[own - 1] == left and wanted[own + 1] == right for own in range(1, len(wanted) - 1)):
                return True
    return False


def rearranged(case: Case) -> bool:
    """Nothing is new but the order, where the order tells: items mixed with each other, or "then" between others."""
    own, given = case.expected.full, case.given.reading
    if case.is_quoted or len(case.new(given.units)) > 2 or not is_inverted(own.units, given.units):
        return False
    if "then" in own.text.split() and "then" in given.text.split():
        return True
    if crosses_link(own, given):
        return True
    theirs, ours = items(given.masked, given.units), items(own.masked, own.units)
    if len(ours) < 2 or len(theirs) != len(ours):
        return False
    for mine in theirs:
        sources = {at for unit in mine for at, item in enumerate(ours) if place_in(item, unit) is not None}
        alone = [{at for at, item in enumerate(ours) if place_in(item, unit) is not None} for unit in mine]
        if len(sources) > 1 and len({min(at) for at in alone if len(at) == 1}) > 1:
            return True
    return False


def is_inverted(own: Sequence[Unit], given: Sequence[Unit]) -> bool:
    """Whether some unit stands behind another that it precedes in the reference."""
    position = 0
    for unit in given:
        place = place_in(own[position:], unit)
        if place is not None:
            position += place + 1
        elif place_in(own[:position], unit) is not None:
            return True
    return False


def crosses_link(own: Reading, given: Reading) -> bool:
    """What stands before a preposition in the one stands behind it in the other: "lemon cake with raspberry"."""
    for link in _LINK.finditer(given.masked):
        for mine in re.finditer(rf"\b{link[0]}\b", own.masked, re.IGNORECASE):
            behind = [unit for unit in given.units if unit.start > link.start()][:2]
            early = [unit for unit in own.units if unit.start < mine.start()]
            late = [unit for unit in own.units if unit.start > mine.start()]
            if any(place_in(early, unit) is not None and place_in(late, unit) is None for unit in behind):
                return True
    return False


def place_in(units: Sequence[Unit], wanted: Unit) -> int | None:
    """Where among the units one stands that says the same."""
    for at, unit in enumerate(units):
        if unit.fact is None and wanted.fact is None and unit.stem == wanted.stem:
            return at
        if unit.fact is not None and wanted.fact is not None and agree(unit.fact, wanted.fact):
            return at
    return None


def items(text: str, units: Sequence[Unit]) -> list[list[Unit]]:
    """The units between commas and conjunctions."""
    found, position = [], 0
    for end, following in [*((cut.start(), cut.end()) for cut in _ITEM.finditer(text)), (len(text), len(text))]:
        item = [unit for unit in units if position <= unit.start < end]
        if item:
            found.append(item)
        position = following
    return found
