"""Vetoes on meaning: denied, hedged, taken back, swapped roles, reordered parts, another word in the same place, or too
much besides."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import groupby, pairwise

from emailrl.facts.reading import Literal, Reading, Unit, agree, find_names, same_token, word_before
from emailrl.facts.words import OPPOSITES, has_word, says_something, stem
from emailrl.rewards.matching.hedging import JOINT, hedges_between
from emailrl.rewards.matching.language import (
    ALTERNATIVE,
    CONDITION,
    COPIED,
    DENIAL,
    DOUBT,
    EXCLUDES,
    GIVES_UP,
    HEDGE,
    REFUSAL,
    RETRACTION,
)
from emailrl.rewards.matching.question import Case

_BY_WHO = re.compile(
    r"^who\s(?:(?:is|are|was|were)\s(?!\w+ed\b)|(?:has|have|had|will|would)\s)*(?!(?:did|does|do|is|are|was|were)\b)"
    r"(?P<verb>\w+)",
    re.IGNORECASE,
)
_SLOTS = ("from", "for", "to", "into", "with", "against", "under")
_LINK = re.compile(r"\s+(?:after|before|if|unless|with|into|for|to|than|then)\s+", re.IGNORECASE)
_SCORE = re.compile(r"\ue000\s?(?:[-\u2013:]|to)\s?\ue000")
_PART = re.compile(rf"{JOINT.pattern}|{_LINK.pattern}|\s[-\u2013]\s", re.IGNORECASE)
"""Joins the parts of a statement; their order may matter."""


def turned_round(case: Case) -> bool:
    """Whether roles are swapped: a name from the question in the reference's place, or another name as the agent."""
    question, text = case.asked.reading.text, case.given.masked
    active = _BY_WHO.match(question)
    own = {token for name in case.expected.names for token in name.tokens if len(token) > 1}
    slots = {word_before(question, name.start): name.tokens[0] for name in find_names(case.asked.reading)}
    every = find_names(case.given)
    for part in case.clauses:
        said = part.text.lower()
        names = [name for name in every if part.asserted and part.start <= name.start < part.start + len(part.text)]
        for name in names:
            before = word_before(text, name.start)
            is_own = bool(own & {*name.tokens})
            asked = slots.get(before) if before in _SLOTS else None
            short = text[name.start : name.end].split()[0].isupper()  # "TW" for Transwestern
            if asked and not short and f"{before} {asked}" not in said and (asked in said) is is_own:
                return True
            agent = re.search(r"(\w+) by\s$", text[: name.start])
            if active and not is_own and agent and stem(agent[1]) in case.asked.stems:
                return True
            first = name.start <= part.start + len(before) + 3
            if active and is_own and not first and stem(before) == stem(active["verb"]):
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
    """Whether only the order differs: of facts, of the parts of a list, or of the two sides of an "after"."""
    own, given = case.expected.full, case.given
    if case.is_quoted or len(case.new(given.units)) > 2 or own.text.lower().rstrip(".") in given.text.lower():
        return False
    # "Ada 40 %, Bo 60 %" for "Ada 60 %, Bo 40 %", "1-3" for "3-1": the words keep their order, the facts do not.
    sames = [(unit, [at for at, one in enumerate(own.units) if has([one], unit)]) for unit in given.units]
    facts, words = (
        [at[0] for unit, at in sames if len(at) == 1 and bool(unit.fact) is is_fact] for is_fact in (True, False)
    )
    between = len(words) > 1 and any(a < word < b for a, b in pairwise(sorted(facts)) for word in words)
    if facts != sorted(facts) and words == sorted(words) and (between or _SCORE.search(own.masked)):
        return True
    ours, theirs = _parts(own), _parts(given)
    places = [[[at for at, part in enumerate(ours) if has(part, unit)] for unit in part] for part in theirs]
    sure = [[place for at in part if len(at) == 1 for place in at] for part in places]
    order = [at for part in sure for at in part]
    if order == sorted(order):
        return False
    if len(ours) == len(theirs) and any(sum(len(ours[at]) > 1 for at in {*part}) > 1 for part in sure):
        return True
    for link in _LINK.finditer(given.masked):
        middle = own.masked.find(link[0])
        behind = [unit for unit in given.units if unit.start >= link.end()][:2]
        early, late = ([u for u in own.units if (u.start < middle) is is_early] for is_early in (True, False))
        if any(has(early, unit) and not has(late, unit) for unit in behind):
            return True
    return False


def _parts(reading: Reading) -> list[list[Unit]]:
    """The units of each part of a statement."""
    starts = [cut.start() for cut in _PART.finditer(reading.masked)]
    return [[*part] for _, part in groupby(reading.units, key=lambda unit: bisect(starts, unit.start))]


def others_own(case: Case) -> bool:
    """Whether the expected name occurs only as the possessor of somebody else, as in "Ada Moss's deputy"."""
    own = {token for name in case.expected.names for token in name.tokens if case.asked.person}
    text, held = case.given.masked, [name for name in find_names(case.given) if own & {*name.tokens}]
    owned = [re.match(r"\W*'s?\s+(\w+)", text[name.end - 2 :]) for name in held]
    return bool(owned) and all(found and not has_word(stem(found[1]), case.expected.known) for found in owned)


def has(units: Sequence[Unit], wanted: Unit) -> bool:
    """Whether one of the units says the same as ``wanted``."""
    return any(
        agree(unit.fact, wanted.fact)
        if unit.fact and wanted.fact
        else unit.fact is wanted.fact and unit.stem == wanted.stem
        for unit in units
    )


_DIRECTION = re.compile(r"\b(?:before|after|more|less|fewer|without|with|over|under|above|below|least|most)\b")
_CONVERSE = frozenset(("buy", "sell"))  # "sold to Duke" answers "Who bought it?".
_MORE = re.compile(r"\b(?:who|where|when|why|how|what|which|further|more|other|additional|else|exact|specific)\b", re.I)
_PERSONAL = re.compile(r"\b(?:I(?='|\s[a-z])|me|my|we|we're|we'll|our|us|you|your|please|thanks|Please|Thanks)\b")
_ANAPHOR = re.compile(
    r"^\W*(?:\w+\s){0,2}(?:it|its|they|their|them|he|she|his|her|this|that|these|those|also|both)\b", re.IGNORECASE
)
_UPPER = r"before|under|below|(?:less|fewer) than|at most"
_LOWER = r"after|over|above|more than|at least"
_LIMITS = tuple(  # Upper and lower limits as a reference states them, and as a question asks for them.
    tuple(re.compile(rf"\b(?:{words}|{more})\b", re.IGNORECASE) for more in (stated, asked))
    for words, stated, asked in (
        (rf"{_UPPER}|most|maximum|limit|cap|latest|highest", "by|until|till|within|up to", "by (?:when|what)"),
        (rf"{_LOWER}|least|minimum|limit|earliest|lowest|since", "from", "from (?:when|what)"),
    )
)
_STRICT = re.compile(rf"\b(?P<no>not?\s)?(?:(?P<upper>{_UPPER})|{_LOWER})(?:\s(?:the|about|around))?\s$", re.IGNORECASE)


def is_new(case: Case, marker: re.Pattern[str], text: str) -> bool:
    """Whether a marker occurs in a text but in neither the reference nor the question."""
    return marker.search(text) is not None and not marker.search(case.texts)


def hedges(case: Case) -> bool:
    """Whether the answer only supposes its part of the reference, or offers an alternative."""
    text, masked = case.given.text, case.given.masked
    if is_new(case, ALTERNATIVE, text) or is_new(case, ALTERNATIVE, masked):
        return True
    for part in case.clauses:
        end = part.start + len(part.text)
        about = sum(case.is_asked(unit) and not case.holds(unit) for unit in case.sentences[part.sentence])
        markers = (HEDGE, CONDITION)[: 2 - about] if about < 2 else ()
        if any(is_new(case, marker, text[part.start : end]) for marker in markers) and (
            case.holds(*part.units) or text[end:].lstrip().startswith(":")
        ):
            return True
    return False


def takes_back(case: Case) -> bool:
    """Whether the answer retracts its statement, doubts it in a separate clause, or phrases it as a question."""
    if is_new(case, RETRACTION, case.given.masked) or is_new(case, EXCLUDES, case.given.masked):
        return True
    last = case.clauses[-1]
    if case.given.text.endswith("?") and case.holds(*last.units):
        return True
    doubted = [part for part in case.clauses if is_new(case, DOUBT, part.text)]
    return any(len(case.new(u for u in part.units if not DOUBT.search(u.text))) <= 1 for part in doubted)


def gives_up(case: Case) -> bool:
    """Whether a clause states that what was asked for is missing."""
    if GIVES_UP.search(case.expected.full.text) and not case.is_quoted:
        return False
    for number, part in enumerate(case.clauses):
        if GIVES_UP.search(part.text) and not (number and _MORE.search(part.text)):
            rest = re.findall(r"[^\W\d_]+", GIVES_UP.sub(" ", part.text))
            if all(has_word(stem(word), case.expected.known) for word in rest if says_something(word)):
                return True
    return False


def denied(case: Case) -> bool:
    """Whether the answer denies what the reference asserts, or asserts what it denies."""
    if case.is_quoted:
        return False
    asserts, denies, statuses = case.stems(True), case.stems(False), case.expected.statuses
    if {True, False} <= statuses and case.expected.denied & asserts and not denies:
        return True
    if statuses == {True} and not case.asked.polar and not re.search(r"\bor\b", case.asked.reading.text):
        for part in case.clauses:
            is_denied = part.asserted is False and DENIAL.search(part.text) and part.units
            if is_denied and all(unit.stem in case.asked.stems for unit in part.units):
                return True
    return bool(({*case.expected.words} - case.expected.denied) & denies - asserts)


def opposed(case: Case) -> bool:
    """Whether the answer uses the opposite of a word of the reference or the question, or another limit."""
    parts = [part for part in case.clauses if case.holds(*part.units)]
    given = {unit.stem for part in parts for unit in part.units if unit.fact is None}
    before = case.asked.reading.text if case.is_quoted else case.texts
    said = {*(case.asked.stems if case.is_quoted else case.expected.known)} - _CONVERSE
    if not case.is_quoted:
        given |= {stem(word) for part in parts for word in _DIRECTION.findall(part.text.lower())}
        said |= {*map(stem, _DIRECTION.findall(case.expected.full.text.lower()))}
    said |= {"refus"} if REFUSAL.search(before) else set()
    if any(OPPOSITES.get(word, set()) & said - given or word.removeprefix("un") in said for word in given - said):
        return True
    units = [unit for part in parts for unit in part.units if not isinstance(unit.fact, Literal | None)]
    held = [unit for unit in units if case.holds(unit)]
    for limit in (_STRICT.search(case.given.masked[: unit.start]) for unit in held):
        if limit:
            stated, asked = _LIMITS[(limit["upper"] is None) is (limit["no"] is None)]
            if not (stated.search(case.expected.full.text) or asked.search(case.asked.reading.text)):
                return True
    return False


def says_too_much(case: Case) -> bool:
    """Whether the answer adds too much: many new words, sentences about something else, or an email's text. An answer
    to a short reference may be longer if it repeats the question."""
    units = list(case.sentences.values())
    news = [len(case.new(one)) for one in units]
    joined = {part.sentence for part in case.clauses if _ANAPHOR.search(part.text) or is_new(case, GIVES_UP, part.text)}
    at = next((at for at, one in enumerate(units) if case.holds(*one)), 0)
    seen = {unit.stem for unit in units[at] if unit.fact is None}
    odd = [
        number not in joined
        and 3 * new > 2 * len(one)
        and not seen & {unit.stem for unit in one if unit.fact is None} - case.asked.stems
        for (number, one), new in zip(case.sentences.items(), news, strict=True)
    ]
    strange = sum(odd)
    if at and odd[0] and not case.asked.polar:
        return True
    if case.is_short and case.is_mixed and case.echoes(units[at]):
        longest, total = 28, 60
    else:
        longest, total = 12 if case.is_mixed else 6, 8 if at else 30
    if strange >= 2 or max(news) > longest or sum(news) > total or is_new(case, COPIED, case.given.masked):
        return True
    said = case.texts.lower().split()
    personal = any(word.lower() not in said for word in _PERSONAL.findall(case.given.masked))
    if case.is_short:
        return sum(news) > 8 and personal
    return sum(news) > (3 if strange else 4 if personal else 7)


VETOES: tuple[Callable[[Case], bool], ...] = (
    *(takes_back, hedges, gives_up, denied, hedges_between, opposed),
    *(turned_round, others_own, mixed_up, replaced, says_too_much),
)


def stands_against(case: Case) -> bool:
    """Whether any veto applies to an answer that covers the reference."""
    return any(veto(case) for veto in VETOES)
