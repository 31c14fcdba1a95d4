"""Rivals: another fact or name in the place of the right one, or joined to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from emailrl.facts.lexicon import PLACES
from emailrl.facts.names import find_names, word_before
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Fact, Unit, agree, contradict, same_kind
from emailrl.rewards.matching.case import SHORT, Case
from emailrl.rewards.matching.question import kinds_asked

_NO_CHOICE = r"(?!\s(?:so|more|less|later|earlier|after|before|not|higher|lower|better|fewer)\b)"
_JOINT = re.compile(
    rf"\s*,\s*(?:and|or|but also|then)\s+|\s+(?:and|as well as|plus|or{_NO_CHOICE})\s+|,\s+|\s?/\s?|\s&\s|;\s|\n",
    re.IGNORECASE,
)
_AND = re.compile(r"and|plus|as well|&", re.IGNORECASE)
_OR = re.compile(rf"\bor\b{_NO_CHOICE}|\bOR\b")
_END = re.compile(r"(?<=[\w)\ue000][.!?])\s|[()]|:\s|\n")
_SAME = re.compile(r"\s*(?:about|roughly|approximately|nearly|around)\b", re.IGNORECASE)
_CHANGED = re.compile(
    r"\b(?:moved|changed|postponed|shifted|rescheduled|pushed|extended)\b[^,;]{0,20} to\b", re.IGNORECASE
)
_IN_FACT = re.compile(r"\b(?:in fact|actually|in reality|in truth)\b", re.IGNORECASE)
_ASIDE = re.compile(r"\b(?:before that|earlier|previous(?:ly)?|after that|since then|ago)\b", re.IGNORECASE)
_PLACING = frozenset(["of", "in", "at", "from", "on", "for", "with", "near", "via"])
_LINKS = frozenset({"later", "then", "now", "initial", "previou", "either", "between", "another"})


@dataclass(frozen=True, slots=True)
class Item:
    """What stands between two joints, and the joint before it."""

    joint: str
    text: str
    units: tuple[Unit, ...]


def rival_facts(case: Case) -> bool:
    """A fact that contradicts all that was said, in the place of the right one."""
    kinds = kinds_asked(case.asked, case.expected) or tuple({type(fact) for fact in case.expected.facts})
    if not kinds_asked(case.asked, case.expected) and len(case.expected.words) > 6:
        return False
    units = [unit for part in case.given.clauses if part.asserted for unit in part.units]
    rivals = [
        at for at, unit in enumerate(units) if unit.fact and isinstance(unit.fact, kinds) and is_rival(case, unit.fact)
    ]
    if not any(is_coordinated(case, units, at) or replaces(case, units[at]) for at in rivals):
        return False
    return not is_breakdown(case, units)


def replaces(case: Case, unit: Unit) -> bool:
    """Whether a fact stands in a clause that says nothing else, or behind a change: "moved it to May 3"."""
    part = next(part for part in case.given.clauses if unit in part.units)
    if _CHANGED.search(part.text[: unit.start - part.start]):
        return True
    whole = [other for near in case.given.clauses if near.sentence == part.sentence for other in near.units]
    return not _ASIDE.search(part.text) and all(other.fact is not None or case.is_known(other) for other in whole)


def is_rival(case: Case, fact: Fact) -> bool:
    """Whether a fact is of the kind of the reference's and contradicts everything said."""
    if isinstance(fact, Quantity) and fact.weak:
        return False
    if not any(same_kind(fact, other) for other in case.expected.facts):
        return False
    if case.asked.kind:
        return not any(agree(fact, other) or agree(other, fact) for other in case.said)
    return all(contradict(other, fact) for other in case.said if same_kind(other, fact))


def is_coordinated(case: Case, units: Sequence[Unit], at: int) -> bool:
    """Whether between a fact and one of the reference nothing new is said."""
    for step in (-1, 1):
        other = at + step
        while 0 <= other < len(units):
            unit = units[other]
            if unit.fact is not None and case.holds(unit):
                return True
            if unit.fact is None and not case.is_known(unit) and unit.stem not in _LINKS:
                break
            other += step
    return False


def is_breakdown(case: Case, units: Sequence[Unit]) -> bool:
    """Whether the other numbers add up to the right one."""
    values = [unit.fact.value for unit in units if isinstance(unit.fact, Quantity) and not case.holds(unit)]
    wanted = [fact.value for fact in case.expected.facts if isinstance(fact, Quantity)]
    return len(values) > 1 and any(abs(sum(values) - value) < 1e-6 for value in wanted)


def lists(case: Case) -> list[list[Item]]:
    """The sentences of an answer cut at commas and conjunctions."""
    text = case.given.reading.masked
    found: list[list[Item]] = []
    position = 0
    for end in [*(cut.start() for cut in _END.finditer(text)), len(text)]:
        items: list[Item] = []
        joint = ""
        for cut in [*_JOINT.finditer(text, position, end), None]:
            last = cut.start() if cut else end
            units = tuple(unit for unit in case.given.reading.units if position <= unit.start < last)
            if units or (cut and items):
                items.append(Item(joint, text[position:last], units))
            joint, position = (cut[0] if cut else ""), (cut.end() if cut else end)
        found.append(items)
    return found


def offers_choice(case: Case) -> bool:
    """An "or" joins a part of the reference to something else."""
    if _OR.search(case.expected.full.text) and not case.is_quoted:
        return False
    if _OR.search(case.asked.reading.text) and len(case.given.text.split()) > 8:
        return False
    for items in lists(case):
        for at, (left, right) in enumerate(pairwise(items)):
            if not _OR.search(right.joint) or _SAME.match(right.text):
                continue
            held = [case.holds_any(item.units) for item in (left, right)]
            if not case.is_short and (case.new(left.units) or case.new(right.units)):
                return True
            if any(held) and is_short(left if held[1] else right):
                return True
            if (left.units and case.holds(left.units[-1])) or (right.units and case.holds(right.units[0])):
                return True
            while at > 0 and is_bare(items[at]):
                at -= 1
                if case.holds_any(items[at].units):
                    return True
    return False


def is_short(item: Item) -> bool:
    """A few words: something that can be an answer by itself."""
    return len(item.units) <= SHORT


def rival_items(case: Case) -> bool:
    """A list or a pair in which the reference is one item and another is new."""
    if not (case.is_short or (case.asked.person and case.expected.names)):
        return False
    for items in lists(case):
        bare = all(is_bare(item) for item in items) and case.is_short
        states = [item_state(case, item, bare=bare) for item in items]
        for first, last in runs(states):
            run = items[first:last]
            if not {"held", "new"} <= set(states[first:last]):
                continue
            if not (bare or joins(case, run, states[first:last])):
                continue
            joints = [item.joint for item in run[1:]]
            news = states[first:last].count("new")
            whole = first == 0 and last == len(items) and bare
            if any(_AND.search(joint) for joint in joints) or (whole and (news > 1 or case.asked.person)):
                return True
    return False


def runs(states: Sequence[str]) -> list[tuple[int, int]]:
    """Where items that can be candidates stand side by side."""
    found, first = [], 0
    for at, state in enumerate([*states, "other"]):
        if state == "other":
            if at - first > 1:
                found.append((first, at))
            first = at + 1
    return found


def joins(case: Case, run: Sequence[Item], states: Sequence[str]) -> bool:
    """Whether the held item touches the next one with its part of the reference: "by Ada and Ben", not "by Ada at noon
    and in Rome"; places behind a place only say where it lies."""
    for at in range(len(run) - 1):
        left, right = run[at], run[at + 1]
        if {states[at], states[at + 1]} != {"held", "new"} or not (left.units and right.units):
            continue
        other = right if states[at] == "held" else left
        if not any(_AND.search(item.joint) for item in run) and all(
            unit.text.lower() in PLACES for unit in other.units
        ):
            continue
        if case.holds(left.units[-1]) or case.holds(right.units[0]):
            return True
    return False


def is_bare(item: Item) -> bool:
    """A candidate and nothing else."""
    return (
        len(item.units) <= 3
        and len(item.text.split()) <= 4
        and re.search(r"\b(?:is|was|are|were|has|had|will)\b", item.text) is None
    )


def item_state(case: Case, item: Item, *, bare: bool) -> str:
    """ "held": it has a part of the reference; "new": a short one of which nothing was said; else "other"."""
    if case.holds_any(item.units):
        return "held"
    if bare:
        return "new" if case.new(item.units) else "other"
    new = case.new(item.units)
    if not new or new[0] != item.units[0] or len(new) > SHORT or any(unit.fact is not None for unit in new):
        return "other"
    if case.given.mixed and not all(unit.text[0].isupper() for unit in new):
        return "other"
    return "new"


def rival_answer(case: Case) -> bool:
    """A clause without the reference answers the question in its own words, with another name."""
    if not (case.expected.names and case.given.mixed and (case.is_short or case.asked.person)):
        return False
    named = find_names(case.given.reading)
    for part in case.given.clauses:
        if not part.asserted or case.holds_any(part.units):
            continue
        new = case.new(part.units)
        if not new or not (_IN_FACT.search(part.text) or any(unit.stem in case.asked.stems for unit in part.units)):
            continue
        names = [unit for unit in new if any(name.start <= unit.start < name.end for name in named)]
        if len(names) < len(new) or any(unit.text.lower() in PLACES for unit in names):
            continue
        if word_before(case.given.reading.masked, names[0].start) not in _PLACING:
            return True
    return False
