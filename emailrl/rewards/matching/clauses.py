"""A text cut into clauses, each asserted, denied, or left open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from emailrl.facts.reading import Reading, Unit
from emailrl.rewards.matching.markers import DENIAL, DOUBT, FORMER, FORWARD, MOVED, NO_DENIAL, REFUSAL

_SENTENCE = re.compile(
    r"(?<!\b[A-Z])(?<!\b(?:St|Co|vs|No|Jr|Sr))(?<!\b(?:Inc|Ltd|etc|e\.g|i\.e))(?<!\bCorp)[.]+(?=\s|$)|[!;\n]+|\?(?=\s|$)"
)
_CLAUSE = re.compile(
    r",\s+(?:(?:and|or|but|so|because|although|while|which|who)\s+)?|(?<!one)(?<!body)(?<!thing)\s+but\s+|\s+(?:because|although|though|while|whereas)\s+"
    r"|:\s|\s[-\u2013\u2014]+\s|[()]|\s+so\s+(?=that\b)"
    r"|\s+and\s+(?=(?:not|never|will|would|should|is|are|was|were|has|have|can|could|must|he|she|it|they|we|you|i|then"
    r"|also|to)\b)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of a sentence. ``asserted`` is False where it is denied, None where nothing is said of it."""

    start: int
    end: int
    text: str
    """With its facts blotted out."""
    sentence: int
    asserted: bool | None
    units: tuple[Unit, ...]


def clauses(reading: Reading, said: str = "") -> list[Clause]:
    """The clauses of a text, in order; words of denial that are ``said`` in the question deny nothing."""
    found = []
    for number, (start, end, is_question) in enumerate(_sentences(reading.masked)):
        doubted = False
        for first, last in _pieces(reading.masked, start, end):
            for left, right, asserted in _signed(reading.masked, first, last, said):
                text = reading.masked[left:right]
                doubted = doubted or _first_new(DOUBT, text, said)
                status = None if is_question else False if doubted else asserted
                units = tuple(unit for unit in reading.units if left <= unit.start < right)
                found.append(Clause(left, right, text, number, status, units))
    return found


def _sentences(text: str) -> Iterator[tuple[int, int, bool]]:
    position = 0
    for cut in _SENTENCE.finditer(text):
        if text[position : cut.start()].strip():
            yield position, cut.start(), cut[0].startswith("?")
        position = cut.end()
    if text[position:].strip():
        yield position, len(text), False


def _pieces(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    position = start
    for cut in _CLAUSE.finditer(text, start, end):
        if text[position : cut.start()].strip():
            yield position, cut.start()
        position = cut.end()
    if text[position:end].strip():
        yield position, end


def _signed(text: str, start: int, end: int, said: str) -> Iterator[tuple[int, int, bool | None]]:
    """A piece cut where a denial begins that reaches forward only, and round the old value of a change."""
    piece = text[start:end]
    if FORMER.match(piece):
        yield start, end, None
        return
    moved = MOVED.search(piece)
    if moved:
        yield start, start + moved.start("old"), not denies(piece[: moved.start("old")], said)
        yield start + moved.start("old"), start + moved.end("old"), None
        yield start + moved.end("old"), end, not denies(piece[moved.end("old") :], said)
        return
    forward = FORWARD.search(piece)
    if forward is None:
        yield start, end, not denies(piece, said)
        return
    asserted = not denies(piece[: forward.start()], said)
    yield start, start + forward.start(), asserted
    yield start + forward.end(), end, not asserted


def denies(text: str, said: str = "") -> bool:
    """Whether a text holds a denial that was not ``said`` before, as "never" is in "who sings never give up"."""
    if not REFUSAL.search(said) and REFUSAL.search(text):
        return True
    return _first_new(DENIAL, NO_DENIAL.sub(" ", text), said)


def _first_new(marker: re.Pattern[str], text: str, said: str) -> bool:
    """Whether a marker, with the word behind it, is not in what was said."""
    for found in marker.finditer(text):
        following = re.match(r"\s+\w+", text[found.end() :])
        phrase = re.escape(found[0] + (following[0] if following else ""))
        if not re.search(rf"(?<!\w){phrase}\b", said, re.IGNORECASE):
            return True
    return False
