"""Reads a text into its facts and words, in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from emailrl.facts.dates import DATE, TIME, Date, Time, read_dates, read_time
from emailrl.facts.literals import PATTERNS, Literal, read_literal
from emailrl.facts.quantities import NUMBER, Quantity, read_quantity
from emailrl.facts.words import WORD, says_something, stem

Fact = Date | Time | Quantity | Literal
MASK = "\ue000"
"""Replaces every character of a fact in ``Reading.masked``."""
_FULL_STOP = re.compile(r"\.(?:\s*$|\s+[A-Z])")
"""Ends a sentence, even after a fact that may end in a period: "at 1 p.m. Bring it."."""
_SHARES = {"1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "1/8", "1/10"}
_YEAR = re.compile(r"(?<![\w$.,/-])(?:1[0-9]|20)\d\d(?![\w%/-]|[.,]\d)")
_FRACTION = re.compile(r"[1-9]/(?:[2-9]|1[06])")
_BEHIND_NUMBER = re.compile(r"(?<=\d[ -])")
_BETWEEN = re.compile(r",? (?:and )?")
_NUMBERING = re.compile(r"(?<![\w.,$])\d+\.\d+(?![\w%]|\.\d)")


@dataclass(frozen=True, slots=True)
class Unit:
    """One fact, or one content word."""

    start: int
    end: int
    text: str
    fact: Fact | None = None
    stem: str = ""
    """Stem of a word; empty for a fact."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A text and its units in order; ``masked`` is the text with its facts masked, of equal length."""

    text: str
    masked: str
    units: tuple[Unit, ...]

    @property
    def facts(self) -> list[Fact]:
        """The facts in order."""
        return [unit.fact for unit in self.units if unit.fact is not None]

    @property
    def stems(self) -> list[str]:
        """The stems of the words in order."""
        return [unit.stem for unit in self.units if unit.fact is None]


def read(text: str, *, temporal: bool = False, numbering: bool = False, literals: Iterable[Literal] = ()) -> Reading:
    """Read a cleaned text.

    With ``temporal``, "1/3" is a day rather than a share, and "1998" is a year. With ``numbering``, "2.10" is a version
    or section, not 2.1. ``literals`` are searched first, in any spelling.
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
    if numbering:
        reader.take(_NUMBERING, lambda found: [Literal("version", found[0])])
    reader.take(NUMBER, lambda found: [read_quantity(found)])
    reader.join()
    return reader.reading()


class _Reader:
    """Masks text once it is read, so that nothing is read twice."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.masked = text
        self.units: list[Unit] = []

    def take(self, pattern: re.Pattern[str], read_facts: Callable[[re.Match[str]], Sequence[Fact]]) -> None:
        """Read every match of a pattern that is not masked."""
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
        """Return the facts read so far and the words of the remaining text."""
        words = (
            Unit(found.start(), found.end(), found[0], None, stem(found[0]))
            for found in WORD.finditer(self.masked.replace(MASK, " "))
            if says_something(found[0])
        )
        return Reading(self.text, self.masked, tuple(sorted([*self.units, *words], key=lambda unit: unit.start)))

    def join(self) -> None:
        """Join two adjacent quantities into one: "2 hours and 30 minutes"."""
        joined: list[Unit] = []
        for unit in sorted(self.units, key=lambda unit: unit.start):
            last = joined[-1] if joined else unit
            fact = _sum(last.fact, unit.fact) if _BETWEEN.fullmatch(self.masked, last.end, unit.start) else None
            if fact is None:
                joined.append(unit)
                continue
            joined[-1] = Unit(last.start, unit.end, self.text[last.start : unit.end], fact)
            self.masked = self.masked[: last.end] + MASK * (unit.start - last.end) + self.masked[unit.start :]
        self.units = joined


def _sum(one: Fact | None, other: Fact | None) -> Quantity | None:
    """Return the sum of two quantities if the second is less than one unit of the first."""
    if not (isinstance(one, Quantity) and isinstance(other, Quantity) and one.base and one.base == other.base):
        return None
    share = other.value * other.factor / one.factor
    return replace(one, value=one.value + share, rate=other.rate) if not one.rate and 0 < share < 1 else None


def _literals(kind: str, text: str) -> list[Fact]:
    return [] if kind == "code" and _is_number(text) else [read_literal(kind, text)]


def _is_share(found: re.Match[str], temporal: bool) -> bool:
    if _FRACTION.fullmatch(found[0]) and _BEHIND_NUMBER.match(found.string, found.start()):
        return True  # 1 3/8
    return found[0] in _SHARES and not temporal


def _is_number(text: str) -> bool:
    """Whether a text is a number with a unit or a hyphenated word ("40-page") rather than a code."""
    return NUMBER.fullmatch(text) is not None or re.fullmatch(r"\d+-[a-z]{3,}", text, re.IGNORECASE) is not None


def same_kind(one: Fact, other: Fact) -> bool:
    """Whether two facts are of the same kind and can be compared."""
    if isinstance(one, Literal) and isinstance(other, Literal):
        return one.kind == other.kind
    return type(one) is type(other)


def agree(one: Fact, other: Fact) -> bool:
    """Whether the second fact states what the first states."""
    return same_kind(one, other) and one.agrees(other)  # type: ignore[arg-type]


def contradict(one: Fact, other: Fact) -> bool:
    """Whether two facts cannot both answer one question."""
    return same_kind(one, other) and one.contradicts(other)  # type: ignore[arg-type]
