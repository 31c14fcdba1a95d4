"""A text as its facts and words, in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from emailrl.facts.dates import DATE, TIME, Date, Time, read_dates, read_time
from emailrl.facts.literals import PATTERNS, Literal, read_literal
from emailrl.facts.quantities import NUMBER, Quantity, read_quantity
from emailrl.facts.words import WORD, says_something, stem

Fact = Date | Time | Quantity | Literal
MASK = "\ue000"
"""Stands for every sign of a fact in ``Reading.masked``."""
_FULL_STOP = re.compile(r"\.(?:\s*$|\s+[A-Z])")
"""Ends a sentence, whatever the fact before it: "at 1 p.m. Bring it."."""
_SHARES = {"1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "1/8", "1/10"}
_YEAR = re.compile(r"(?<![\w$.,/-])(?:1[0-9]|20)\d\d(?![\w%/-]|[.,]\d)")


@dataclass(frozen=True, slots=True)
class Unit:
    """One fact, or one word that says something."""

    start: int
    end: int
    text: str
    fact: Fact | None = None
    stem: str = ""
    """Of a word."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A text and its units in order; in ``masked``, as long as the text, facts are blotted out."""

    text: str
    masked: str
    units: tuple[Unit, ...]

    @property
    def facts(self) -> list[Fact]:
        """The facts alone."""
        return [unit.fact for unit in self.units if unit.fact is not None]

    @property
    def stems(self) -> list[str]:
        """The words alone."""
        return [unit.stem for unit in self.units if unit.fact is None]


def read(text: str, *, temporal: bool = False, literals: Iterable[Literal] = ()) -> Reading:
    """Read a cleaned text.

    ``temporal`` reads "1/3" as a day rather than a share and "1998" as a year; ``literals`` are looked for in any
    spelling, before anything else.
    """
    reader = _Reader(text)
    for literal in sorted(literals, key=lambda literal: -len(literal.text)):
        reader.take(literal.spellings, lambda found, literal=literal: [literal])  # type: ignore[misc]
    for kind, pattern in PATTERNS.items():
        reader.take(pattern, lambda found, kind=kind: _literals(kind, found[0]))  # type: ignore[misc]
    reader.take(DATE, lambda found: [] if _is_share(found, temporal) else read_dates(found))
    reader.take(TIME, lambda found: [time] if (time := read_time(found)) else [])
    if temporal:
        reader.take(_YEAR, lambda found: [Date(year=int(found[0]))])
    reader.take(NUMBER, lambda found: [read_quantity(found)])
    return reader.reading()


class _Reader:
    """Blots out what has been read, so that nothing is read twice."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.masked = text
        self.units: list[Unit] = []

    def take(self, pattern: re.Pattern[str], read_facts: Callable[[re.Match[str]], Sequence[Fact]]) -> None:
        """Read every match of a pattern that is not blotted out."""
        pieces, position = [], 0
        for found in pattern.finditer(self.masked):
            start = found.end() - len(found[0].lstrip())
            end = found.start() + len(found[0].rstrip())
            if _FULL_STOP.match(self.masked, end - 1):
                end -= 1
            if start >= end or MASK in self.masked[start:end]:
                continue
            if facts := read_facts(found):
                self.units += [Unit(start, end, self.text[start:end], fact) for fact in facts]
                pieces += [self.masked[position:start], MASK * (end - start)]
                position = end
        if pieces:
            self.masked = "".join([*pieces, self.masked[position:]])

    def reading(self) -> Reading:
        """What was read, and the words of the rest."""
        words = (
            Unit(found.start(), found.end(), found[0], None, stem(found[0]))
            for found in WORD.finditer(self.masked.replace(MASK, " "))
            if says_something(found[0])
        )
        return Reading(self.text, self.masked, tuple(sorted([*self.units, *words], key=lambda unit: unit.start)))


def _literals(kind: str, text: str) -> list[Fact]:
    return [] if kind == "code" and _is_number(text) else [read_literal(kind, text)]


def _is_share(found: re.Match[str], temporal: bool) -> bool:
    return found[0] in _SHARES and (not temporal or re.search(r"\d $", found.string[: found.start()][-2:]) is not None)


def _is_number(text: str) -> bool:
    """A number with a unit, or a word grown together with one ("40-page"), is no code."""
    return NUMBER.fullmatch(text) is not None or re.fullmatch(r"\d+-[a-z]{3,}", text, re.IGNORECASE) is not None


def same_kind(one: Fact, other: Fact) -> bool:
    """Whether two facts can be compared at all."""
    if isinstance(one, Literal) and isinstance(other, Literal):
        return one.kind == other.kind
    return type(one) is type(other)


def agree(one: Fact, other: Fact) -> bool:
    """The second gives what the first gives."""
    return same_kind(one, other) and one.agrees(other)  # type: ignore[arg-type]


def contradict(one: Fact, other: Fact) -> bool:
    """The two cannot both answer one question."""
    return same_kind(one, other) and one.contradicts(other)  # type: ignore[arg-type]
