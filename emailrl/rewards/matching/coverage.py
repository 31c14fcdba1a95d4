"""Whether an answer holds what the reference gives: its facts by value, its names, and enough of its words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from emailrl.facts.lexicon import GENERIC, TITLES
from emailrl.facts.literals import Literal
from emailrl.facts.names import Name, same_token
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import Fact, Reading, agree
from emailrl.facts.words import has_word, says_something, stem
from emailrl.rewards.matching.clauses import Clause
from emailrl.rewards.matching.question import WHOLE, Question, Reference, kinds_asked

ONE = Quantity(1.0, weak=True)
"""The word "one", which counts nothing."""


@dataclass(frozen=True, slots=True)
class Given:
    """An answer taken apart."""

    text: str
    reading: Reading
    clauses: tuple[Clause, ...]
    facts: tuple[Fact, ...]
    """Asserted ones."""
    stems: frozenset[str]
    """Of asserted clauses."""
    denied: frozenset[str]
    tokens: tuple[str, ...]
    """The words and commas of asserted clauses in order, with every break between clauses as an empty text."""
    mixed: bool
    """It is written with capitals and small letters, so that a capital tells a name."""


def covers(asked: Question, expected: Reference, given: Given) -> bool:
    """Whether the answer holds what has to be given for the question."""
    if any(isinstance(fact, Literal) and fact.kind == WHOLE for fact in given.facts):
        return True
    kinds = kinds_asked(asked, expected)
    if kinds:
        wanted = [fact for fact in expected.facts if isinstance(fact, kinds)]
        return has_facts([in_unit(fact, asked) for fact in wanted], given)
    if asked.person and expected.names and not asked.several:
        return has_names(expected.names, given, part=True)
    if asked.quantity and is_zero(expected.full):
        return is_zero(given.reading) and not any(isinstance(f, Quantity) and f.value for f in given.reading.facts)
    facts = [fact for fact in expected.facts if not (isinstance(fact, Quantity) and fact.weak)]
    weak = [fact for fact in expected.facts if fact not in facts and fact != ONE]
    if not has_facts(facts, given) or not has_names(expected.names, given, part=asked.person):
        return False
    hits = sum(has_word(word, given.denied if word in expected.denied else given.stems) for word in expected.words)
    hits += sum(any(agree(fact, other) for other in given.facts) for fact in weak)
    total = len(expected.words) + len(weak)
    if any(isinstance(fact, Literal) for fact in facts):
        return hits >= total // 3
    if facts or expected.names:
        return hits >= (total + 1) // 2 or (total == 1 and len(given.stems) == 0)
    return hits >= enough(total) and hits + total > 0


def is_zero(reading: Reading) -> bool:
    """Whether a text says that there is none."""
    numbers = [fact for fact in reading.facts if isinstance(fact, Quantity) and not fact.weak]
    if numbers:
        return all(fact.value == 0 for fact in numbers)
    return re.match(r"(?:there (?:are|were|is|was) )?(?:no|none|zero|nil)\b", reading.text, re.IGNORECASE) is not None


def in_unit(fact: Fact, asked: Question) -> Fact:
    """A bare number in the unit of "how many feet"."""
    if isinstance(fact, Quantity) and fact.base is None and asked.unit is not None:
        return replace(fact, base=asked.unit[0], factor=asked.unit[1])
    return fact


def enough(total: int) -> float:
    """How many of ``total`` words must be there where nothing but words is wanted: all of a few, fewer of many."""
    if total <= 2:
        return total
    return (0.66 if total <= 6 else 0.5) * total - 1e-9


def has_facts(wanted: Sequence[Fact], given: Given) -> bool:
    """All of up to four, four fifths of more."""
    hits = sum(any(agree(fact, other) for other in given.facts) for fact in wanted)
    return hits >= (len(wanted) if len(wanted) <= 4 else 0.8 * len(wanted))


def has_names(names: Sequence[Name], given: Given, *, part: bool) -> bool:
    """All of up to four names, four fifths of more."""
    hits = sum(has_name(name, given, part=part) for name in names)
    return hits >= (len(names) if len(names) <= 4 else 0.8 * len(names))


def has_name(name: Name, given: Given, *, part: bool) -> bool:
    """Every word of a name that matters; with ``part``, or where it is telling, its first or last word alone.

    Not with a stranger beside it: "Charlotte Bronte" is not Emily Bronte.
    """
    own = [word for token in name.tokens for word in token.split("-")]
    if len(own) > 1 and "".join(own) in (word.lower() for word in given.tokens):
        return True
    places = {
        at: same for at, word in enumerate(given.tokens) if (same := [o for o in own if same_token(word.lower(), o)])
    }
    held = {one for same in places.values() for one in same}
    if not any(len(given.tokens[at]) > 1 for at in places):
        return False
    alone = [at for at in places if not is_beside_stranger(given, at, own)]
    if all(one in held or stem(one) in GENERIC or len(one) == 1 for one in own):
        return bool(alone) or len(own) == 1 or is_together(given, own)
    ends = {own[0], own[-1]}
    return any(
        set(places[at]) & ends and (part or len(given.tokens[at]) >= 6 or given.tokens[at].isupper()) for at in alone
    )


def is_together(given: Given, own: Sequence[str]) -> bool:
    """Whether two words of a name follow each other, with at most one between them."""
    at = [at for at, word in enumerate(given.tokens) if any(same_token(word.lower(), one) for one in own)]
    return any(later - earlier <= 2 for earlier, later in pairwise(at))


def is_beside_stranger(given: Given, at: int, own: Sequence[str]) -> bool:
    """Whether a part of a name stands beside a word that may be of another one."""
    beside = [given.tokens[near] for near in (at - 1, at + 1) if 0 <= near < len(given.tokens)]
    return any(
        word.isalpha()
        and (word[0].isupper() if given.mixed else len(word) > 1)
        and is_telling(word)
        and not any(same_token(word.lower(), one) for one in own)
        for word in beside
    )


def is_telling(word: str) -> bool:
    """Not grammar, nor a title."""
    return says_something(word) and word.lower() not in TITLES
