"""What stands against an answer that holds the right thing: it takes it back, hedges, turns it round, says too much."""

from __future__ import annotations

import re

from emailrl.facts.reading import Fact, agree
from emailrl.facts.words import OPPOSITES, has_word, says_something, stem
from emailrl.rewards.matching.case import Case, by_sentence, is_whole
from emailrl.rewards.matching.markers import (
    DIRECTION,
    DIRECTIONS,
    DOUBT,
    GIVES_UP,
    HEDGE,
    LIMITS,
    MAIL,
    REFUSAL,
    RETRACTION,
)
from emailrl.rewards.matching.order import rearranged, substitutes
from emailrl.rewards.matching.rivals import offers_choice, rival_answer, rival_facts, rival_items
from emailrl.rewards.matching.roles import turned_round

_PERSONAL = re.compile(r"\b(?:I(?='|\s[a-z])|me|my|we|we're|we'll|our|us|you|your|please|thanks|Please|Thanks)\b")
_MORE = re.compile(r"\b(?:who|where|when|why|how|what|which|further|more|other|additional|else|exact|specific)\b", re.I)
_ANAPHOR = re.compile(r"\b(?:it|its|they|their|them|he|she|his|her|this|that|these|those|also|both)\b", re.IGNORECASE)
_SMALL = re.compile(r"\b(?:before|after|more|less|without|with|over|under|above|below)\b")


def stands_against(case: Case) -> bool:
    """Whether anything in the answer speaks against it although it covers the reference."""
    return (
        retracts(case)
        or asks_back(case)
        or gives_up(case)
        or hedges(case)
        or offers_choice(case)
        or rival_facts(case)
        or rival_items(case)
        or rival_answer(case)
        or opposed(case)
        or denied(case)
        or misdirected(case)
        or substitutes(case)
        or rearranged(case)
        or turned_round(case)
        or says_too_much(case)
    )


def retracts(case: Case) -> bool:
    """The answer takes back what it says, or doubts it in a clause that says nothing else."""
    if case.is_new(RETRACTION, case.given.reading.masked):
        return True
    return any(
        case.is_new(DOUBT, part.text) and len(case.new(u for u in part.units if not DOUBT.search(u.text))) <= 1
        for part in case.given.clauses
    )


def asks_back(case: Case) -> bool:
    """The reference is all or part of a question."""
    end = case.given.text.rstrip().endswith("?")
    return end and case.holds_any(unit for part in case.given.clauses[-1:] for unit in part.units)


def gives_up(case: Case) -> bool:
    """What a clause says is missing is what was asked for: nothing of its own is named."""
    if GIVES_UP.search(case.expected.full.text) and not case.is_quoted:
        return False
    for number, part in enumerate(case.given.clauses):
        if GIVES_UP.search(part.text):
            rest = GIVES_UP.sub(" ", part.text)
            words = [word for word in re.findall(r"[^\W\d_]+", rest) if says_something(word)]
            if number and _MORE.search(part.text):
                continue
            if all(has_word(stem(word), case.known) for word in words):
                return True
    return False


def hedges(case: Case) -> bool:
    """A clause that holds a part of the reference only supposes it."""
    return any(case.is_new(HEDGE, part.text) for part in case.holding)


def opposed(case: Case) -> bool:
    """A word of the reference, or of the question, is answered by its opposite."""
    parts = case.holding
    stems = {unit.stem for part in parts for unit in part.units if unit.fact is None}
    stems |= {word for part in parts for word in _SMALL.findall(part.text.lower())}
    before = case.asked.reading.text if case.is_quoted else f"{case.expected.full.text} {case.asked.reading.text}"
    said = (case.asked.stems if case.is_quoted else case.known) | set(_SMALL.findall(before.lower()))
    said |= {stem("refuse")} if REFUSAL.search(before) else set()
    for word in stems - said:
        if OPPOSITES.get(word, set()) & said - stems or (word.startswith("un") and word[2:] in said):
            return True
    return False


def denied(case: Case) -> bool:
    """A word that the reference asserts is denied and nowhere asserted."""
    wanted = set(case.expected.words) - case.expected.denied
    if {True, False} <= case.expected.statuses and case.expected.denied & case.given.stems and not case.given.denied:
        return not case.is_quoted
    if case.expected.statuses == {True} and not re.search(r"\bor\b", case.asked.reading.text):
        for part in case.given.clauses:
            if part.asserted is False and part.units and all(unit.stem in case.asked.stems for unit in part.units):
                return True
    return bool(wanted & case.given.denied - case.given.stems) and not case.is_quoted


def misdirected(case: Case) -> bool:
    """A fact of the reference is given with another direction: "before July 9" for July 9."""
    for part in case.holding:
        for unit in part.units:
            if unit.fact is not None and not is_whole(unit) and case.holds(unit):
                here = direction(part.text[: unit.start - part.start])
                if here.isupper() and expected_direction(case, unit.fact) != here:
                    return True
    return False


def direction(before: str) -> str:
    """The last word of direction within five words of a fact: B and A are strict, b and a are not."""
    found = DIRECTION.findall(" ".join(before.split()[-5:]).lower())
    return DIRECTIONS[found[-1]] if found else ""


def expected_direction(case: Case, fact: Fact) -> str:
    """The direction, strict or not, with which reference or question give a fact."""
    for part in case.expected.clauses:
        for own in part.units:
            same = own.fact is not None and agree(own.fact, fact)
            if same and (here := direction(part.text[: own.start - part.start])):
                return here.upper()
    question = case.asked.reading.text.lower()
    asked = {DIRECTIONS[word].upper() for word in DIRECTION.findall(question)}
    asked |= {side for side, words in LIMITS.items() if words.search(question)}
    return asked.pop() if len(asked) == 1 else ""


def says_too_much(case: Case) -> bool:
    """What the answer adds to reference and question: a flood of it, sentences on something else, or a mail's text."""
    strange = total = longest = 0
    late, restates = True, False
    for number, parts in enumerate(by_sentence(case.given.clauses)):
        units = [unit for part in parts for unit in part.units]
        new = len(case.new(units))
        total, longest = total + new, max(longest, new - (4 if restates else 0))
        text = " ".join(part.text for part in parts)
        if new and new == len(units) and not _ANAPHOR.search(text) and not case.is_new(GIVES_UP, text):
            strange += 1
        if number == 0:
            late = not case.holds_any(units)
            restates = not late and sum(unit.stem in case.asked.stems for unit in units) >= 2
    if strange >= (3 if case.is_short and not late else 2) or longest > (12 if case.given.mixed else 6):
        return True
    if total > 30 or (late and total > 8) or case.is_new(MAIL, case.given.reading.masked):
        return True
    said = f"{case.expected.full.text} {case.asked.reading.text}".lower().split()
    personal = any(word.lower() not in said for word in _PERSONAL.findall(case.given.reading.masked))
    if case.is_short:
        return total > 8 and personal
    return total > 7 or (strange > 0 and total > 3) or (total > 4 and personal)
