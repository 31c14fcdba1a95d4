"""Detects rivals in an answer without a sentence, such as "Northline, Telmark" or "Telmark Omega Northline Delta"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from emailrl.facts.lexicon import COUNTRIES, STATES, TITLES
from emailrl.facts.reading import Unit
from emailrl.facts.words import says_something
from emailrl.rewards.matching.coverage import Case
from emailrl.rewards.matching.rivals import LAYOUT, Item, is_rival, lists

_JOINING = frozenset(("the", "a", "an", "or", "also", "then", "as", "so", "both", "each", "to"))
_PLACE = re.compile(
    r"\bwhere\b|\b(?:what|which)\s(?:(?:is|was|are|were|will be)\s)?(?:(?:the|his|her|their|your|my|our)\s)?(?:\w+\s)?"
    r"(?:place|location|venue|region|address|hotel|airport|inn|restaurant|office|building|floor|room|setting"
    r"|(?P<level>city|town|village|county|country|state(?! of\b)))\b",
    re.IGNORECASE,
)
"""Asks for a place, at any level ("where") or at one ("which city")."""
_WITHIN = re.compile(r"\s*(?:,|\(|\s-\s)?\s*")
"""Joins a place to a larger one or to a detail."""
_APPOSED = re.compile(r"(?:the|an?)\s|\w+(?:ed|ing|ly)\s\w", re.IGNORECASE)
"""Begins a remark on a candidate ("shipped, awaiting pickup") rather than another one."""


def bare_rivals(case: Case) -> bool:
    """Whether an answer of loose words and facts offers another candidate, however the two are separated."""
    linked = any(
        not says_something(word) and word not in _JOINING for word in re.findall(r"[a-z']+", case.given.masked.lower())
    )
    aside = len(case.given.masked.split("(")[0])
    if linked or not case.is_short or not any(part.asserted for part in case.clauses):
        return False
    kinds = case.expected.kinds or tuple({type(fact) for fact in case.expected.facts})
    units = [unit for part in case.clauses if part.asserted for unit in part.units]
    if any(isinstance(unit.fact, kinds) and unit.start < aside and is_rival(case, unit) for unit in units):
        return True
    items = [item for one in lists(case.given.masked, case.given.units, LAYOUT) for item in one if item.units]
    place = _PLACE.search(case.asked.reading.text)
    if place and place["level"]:
        return any(is_other_place(case, item.units) for item in items)
    told = any(unit.stem in case.asked.stems and not case.holds(unit) for unit in units)
    if told or not (case.expected.names or case.expected.words) or case.expected.kinds:
        return False
    return any(is_run(case, item.units) for item in items) or (
        any(case.holds(*item.units) for item in items)
        and any(
            item.units[0].start < aside and is_candidate(case, item) and not (place and _WITHIN.fullmatch(item.joint))
            for item in items
        )
    )


def is_other_place(case: Case, units: Sequence[Unit]) -> bool:
    """Whether words are names alone, one of them new and no state or country that contains the right place."""
    own = {token for name in case.expected.names for token in name.tokens}
    larger = frozenset() if own & COUNTRIES else COUNTRIES if own & STATES else COUNTRIES | STATES
    named = all(unit.fact is None and (unit.text[0].isupper() or not case.is_mixed) for unit in units)
    return named and any(unit.text.lower() not in larger | TITLES for unit in case.new(units))


def is_candidate(case: Case, item: Item) -> bool:
    """Whether an item is a candidate of its own: all new, and a name if the reference is one."""
    words = [unit for unit in item.units if unit.fact is None and unit.text.lower() not in TITLES]
    if not words or len(words) < len(item.units) or len(case.new(words)) < len(words):
        return False
    initials = {token[0] for name in case.expected.names for token in name.tokens}
    if "'" in item.text or all({*unit.text.lower()} <= initials for unit in words):
        return False
    named = all(unit.text[0].isupper() for unit in words) or not case.is_mixed
    return named if case.expected.names else _APPOSED.match(item.text.lstrip()) is None


def is_run(case: Case, units: Sequence[Unit]) -> bool:
    """Whether loose new words stand on both sides of the reference, or a whole other name on one."""
    held = [at for at, unit in enumerate(units) if case.holds(unit)]
    if not held:
        return False
    new = {unit.start for unit in case.new(units) if unit.fact is None and unit.text.lower() not in TITLES}
    sides = [[unit for unit in side if unit.start in new] for side in (units[: held[0]], units[held[-1] :])]
    if all(sides) or len(sides[1]) > 2:
        return True
    whole = any(len([token for token in name.tokens if len(token) > 1]) > 1 for name in case.expected.names)
    return whole and case.is_mixed and any(len(s) > 1 and all(u.text[0].isupper() for u in s) for s in sides)
