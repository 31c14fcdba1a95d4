"""Question, reference and answer side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from emailrl.facts.reading import Fact, Unit, agree
from emailrl.facts.words import has_word, stem
from emailrl.rewards.matching.clauses import Clause
from emailrl.rewards.matching.coverage import Given
from emailrl.rewards.matching.question import WHOLE, Question, Reference

SHORT = 4
"""A reference of at most so many facts and words is an answer without a sentence round it."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, expected and given; what of the answer is wanted, and what was said before."""

    asked: Question
    expected: Reference
    given: Given
    wanted: frozenset[str]
    """Stems that the reference adds to the question."""
    known: frozenset[str]
    """Stems of reference and question."""
    said: tuple[Fact, ...]
    """Facts of reference and question."""

    def is_known(self, unit: Unit) -> bool:
        """Whether reference or question say a thing too."""
        if unit.fact is None:
            return has_word(unit.stem, self.known)
        return is_whole(unit) or any(agree(fact, unit.fact) or agree(unit.fact, fact) for fact in self.said)

    def holds(self, unit: Unit) -> bool:
        """Whether it is a part of what the reference adds to the question."""
        if unit.fact is None:
            return has_word(unit.stem, self.wanted)
        return is_whole(unit) or any(agree(fact, unit.fact) for fact in self.expected.facts)

    def holds_any(self, units: Iterable[Unit]) -> bool:
        """Whether any unit is such a part."""
        return any(self.holds(unit) for unit in units)

    def new(self, units: Iterable[Unit]) -> list[Unit]:
        """Those of which neither reference nor question speaks."""
        return [unit for unit in units if not self.is_known(unit)]

    @property
    def is_short(self) -> bool:
        """Whether the reference is a word, a name or a fact rather than a sentence."""
        return len(self.expected.reading.units) <= SHORT

    @property
    def is_quoted(self) -> bool:
        """Whether the answer has a long reference word for word; it is blotted out like a fact then."""
        return any(is_whole(unit) for unit in self.given.reading.units)

    @property
    def holding(self) -> list[Clause]:
        """The clauses that hold a part of the reference."""
        return [part for part in self.given.clauses if self.holds_any(part.units)]

    def is_new(self, marker: re.Pattern[str], text: str) -> bool:
        """Whether a marker is in a text, and in neither reference nor question."""
        before = self.asked.reading.text + ("" if self.is_quoted else f" {self.expected.full.text}")
        return marker.search(text) is not None and marker.search(before) is None


def is_whole(unit: Unit) -> bool:
    """Whether the unit is the reference itself, word for word."""
    return getattr(unit.fact, "kind", None) == WHOLE


def make_case(asked: Question, expected: Reference, given: Given) -> Case:
    """Lay the three side by side."""
    names = {stem(word) for name in expected.names for token in name.tokens for word in (token, *token.split("-"))}
    known = asked.stems | frozenset(expected.full.stems) | names
    said = (*expected.full.facts, *asked.reading.facts)
    return Case(asked, expected, given, frozenset(names | set(expected.words)), known, said)


def by_sentence(parts: Sequence[Clause]) -> list[list[Clause]]:
    """Clauses grouped by their sentences."""
    found: dict[int, list[Clause]] = {}
    for part in parts:
        found.setdefault(part.sentence, []).append(part)
    return list(found.values())
