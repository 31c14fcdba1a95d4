"""Cuts a text into clauses: asserted, denied or left open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from emailrl.facts.reading import Reading, Unit
from emailrl.rewards.matching.language import DENIAL, DOUBT, FORWARD, MOVED, NO_DENIAL, NOT_UNTIL, REFUSAL, SUPERSEDED

SENTENCE_END = re.compile(
    r"(?<!\b[A-Z])(?<!\b(?:St|Co|vs|No|Jr|Sr))(?<!\bno(?=\.\s\ue000))(?<!\b(?:Inc|Ltd|etc|e\.g|i\.e))(?<!\bCorp)[.]+(?=\s|$)|[!;\n]+|\?(?=\s|$)"
)
_CUT = re.compile(
    rf"(?P<forward>{FORWARD})|,\s+(?:(?:and|or|but|so|because|although|while|which|who)\s+)?|:\s|\s[-\u2013\u2014]+\s|[()]"
    r"|(?<!\bnot)(?<!n't)(?<!\bnever)(?<!\bbut)\s+because\s+"
    r"|\s+(?:although|though|while|whereas|(?<!one )(?<!body )(?<!thing )but)\s+|\s+so\s+(?=that\b)"
    r"|\s+and\s+(?=(?:not|never|will|would|should|is|are|was|were|has|have|can|could|must|he|she|it|they|we|you|i|then"
    r"|also|to)\b)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of a sentence; ``asserted`` is False if it is denied and None if it is left open."""

    start: int
    text: str
    """The clause with its facts masked."""
    sentence: int
    asserted: bool | None
    units: tuple[Unit, ...]


def clauses(reading: Reading, said: str, lasting: bool = False) -> Iterator[Clause]:
    """Yield the clauses of a text in order; denials and doubts that also occur in ``said`` are ignored.

    "Not until May" is no denial, unless the reference names something ``lasting`` until then.
    """
    text, position = reading.masked, 0
    for number, stop in enumerate([*SENTENCE_END.finditer(text), None]):
        end = stop.start() if stop else len(text)
        doubted = False
        for first, last, status in _pieces(text, position, end, said):
            piece = text[first:last]
            doubted = doubted or _is_new(DOUBT, piece, said)
            if stop and stop[0] == "?":
                status = None
            elif doubted or (status and denies(piece, said, lasting)):
                status = False
            units = tuple(unit for unit in reading.units if first <= unit.start < last)
            yield Clause(first, piece, number, status, units)
        position = stop.end() if stop else end


def _pieces(text: str, start: int, end: int, said: str) -> Iterator[tuple[int, int, bool | None]]:
    """Split a sentence: the old value of a change is left open, and what follows "instead of" is denied."""
    status: bool | None = True
    for cut in [*_CUT.finditer(text, start, end), None]:
        if cut and cut["forward"] and not _follows_new(cut, said):
            continue
        last = cut.start() if cut else end
        moved = MOVED.search(text[start:last]) if status else None
        if moved and not (moved["gone"] and moved[0].removeprefix(moved["gone"]).split()[0] in said):
            left, right = (start + place for place in moved.span(moved.lastgroup or 0))
            yield from ((start, left, status), (left, right, None), (right, last, status))
        elif text[start:last].strip():
            yield start, last, status
        if cut:
            start, status = cut.end(), cut["forward"] is None


def denies(text: str, said: str, lasting: bool) -> bool:
    """Whether a text contains a denial that does not occur in ``said``."""
    denial = NO_DENIAL.sub(" ", text if lasting else NOT_UNTIL.sub(" ", text))
    return _is_new(DENIAL, denial, said) or any(
        not marker.search(said) and marker.search(text) for marker in (REFUSAL, SUPERSEDED)
    )


def _is_new(marker: re.Pattern[str], text: str, said: str) -> bool:
    """Whether a marker occurs in a text but not in ``said``."""
    return any(_follows_new(found, said) for found in marker.finditer(text))


def _follows_new(found: re.Match[str], said: str) -> bool:
    """Whether a marker together with the next word is absent from ``said``."""
    following = re.match(r"\s+(?:\w+|\S)", found.string[found.end() :])
    phrase = re.escape(found[0] + (following[0] if following else ""))
    return re.search(rf"{phrase}\b", said, re.IGNORECASE) is None
