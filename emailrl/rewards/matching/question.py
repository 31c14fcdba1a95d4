"""Reads what a question asks for, and its reference accordingly, in clauses: asserted, denied or left open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from emailrl.facts.dates import ZONE, Date, Time
from emailrl.facts.names import Name, find_names
from emailrl.facts.quantities import UNITS, Quantity
from emailrl.facts.reading import Fact, Reading, Unit, agree, read
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


_TEMPORAL = re.compile(
    r"\bwhen\b|\b(?:what|which)\s(?:(?:is|was|are|will be)\s)?(?:the\s)?(?:\w+\s)?"
    r"(?:time|date|day|weekday|month|year|deadline)s?\b",
    re.IGNORECASE,
)
_QUANTITY = re.compile(
    r"\bhow\s(?:many|much|long|large|big|far|old|tall|high|wide|fast|often)\b|\b(?:price|costs?|fee|budget|rate|amount"
    r"|salary|share|percentage|percent|discount|rent|strike|size|total|value|volume|number of|balance|limit|threshold"
    r"|minimum|maximum)\b",
    re.IGNORECASE,
)
_PERSON = re.compile(
    r"^(?:and\s|so\s)?(?:to\s|from\s|with\s|by\s|for\s)?(?:who|whom|whose)\b|\b(?:which|what)\s(?:\w+\s)?"
    r"(?:person|people|colleague|employee|candidate|name|member|manager|analyst|trader|lawyer|actor|actress|singer)s?\b",
    re.IGNORECASE,
)
_NUMBERING = re.compile(
    r"\b(?:which|what)(?:'s)?\s(?:\w+\s){0,3}?(?:version|release|revision|build|firmware|section|chapter|clause"
    r"|paragraph|appendix|exhibit)s?\b(?!\s(?:date|time|price|size|cost))",
    re.IGNORECASE,
)
_SEVERAL = re.compile(
    r"(?:\band|,)\s(?:by\s|to\s|at\s|for\s)?(?:who|whom|what|when|where|why|how|which)\b", re.IGNORECASE
)
_POLAR = re.compile(
    r"^(?:and\s|so\s)?(?:am|may|must|(?:is|are|was|were|do|does|did|can|could|will|would|should|shall|has|have|had|might)"
    r"(?:n't)?|[cw](?:a|o)n't)\b",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"(?:which|who|whose|where|\w{2,}ing|hence|although|while)\b", re.IGNORECASE)
"""Begins a clause that only adds to what a reference says."""
_ASIDE_IN_BRACKETS = re.compile(rf"\s*\((?!{ZONE}\))[^()]*[A-Za-z][^()]*\)", re.IGNORECASE)
_TITLE = re.compile(r"\b(?:No|Not|Never|Nothing|None|Without|Neither)\s[A-Z]\w+")


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the kinds of answer it calls for."""

    reading: Reading
    stems: frozenset[str]
    polar: bool
    """Whether it is a yes/no question."""
    temporal: bool
    numbering: bool
    """Whether it asks for a version or section, where 2.10 is not 2.1."""
    quantity: bool
    person: bool
    several: bool
    """Whether it asks for several things at once, so that everything in the reference counts."""
    unit: tuple[str, float] | None
    """Base unit and factor of "how many feet"."""
    kind: str | None = None
    """The only kind of answer, if known."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference answer, with the parts that an answer must contain."""

    full: Reading
    """The whole reference; the other fields omit text in brackets and text repeated from the question."""
    others: Reading
    """The reference and its alternatives, which an answer may also give."""
    clauses: tuple[Clause, ...]
    names: tuple[Name, ...]
    facts: tuple[Fact, ...]
    words: tuple[str, ...]
    """Stems outside names."""
    said: str
    """Text whose denials are ignored: the question, and the reference's titles ("No Free Lunch") and refusals."""
    lasting: bool
    """Whether something lasts until a time, so that "not until" denies it."""
    kinds: tuple[type, ...]
    """The kinds of fact that answer the question and occur in the reference."""

    @property
    def statuses(self) -> set[bool | None]:
        """The distinct values of ``asserted`` among its clauses."""
        return {part.asserted for part in self.clauses}

    @property
    def denied(self) -> set[str]:
        """The stems of its denied clauses."""
        return {unit.stem for part in self.clauses if part.asserted is False for unit in part.units}


@lru_cache(maxsize=4096)
def read_question(question: str, kind: str | None) -> Question:
    """Read a cleaned question; if its ``kind`` is known, it asks for that kind only."""
    temporal = bool(_TEMPORAL.search(question)) if kind is None else kind == "date"
    unit = re.search(r"\bhow (?:many|much) (\w+)", question, re.IGNORECASE)
    numbering = bool(_NUMBERING.search(question))
    reading = read(question.rstrip("? "), temporal=temporal, numbering=numbering)
    asked = Question(
        reading,
        frozenset(reading.stems),
        polar=bool(_POLAR.match(question)) and not re.search(r"\bor\b(?! not)", question),
        temporal=temporal,
        numbering=numbering,
        quantity=bool(_QUANTITY.search(question)),
        person=bool(_PERSON.search(question)),
        several=bool(_SEVERAL.search(question)),
        unit=UNITS.get(unit[1].lower()) if unit else None,
    )
    if kind is None:
        return asked
    return replace(
        asked, polar=False, several=False, quantity=kind in ("number", "count"), person=kind == "person", kind=kind
    )


@lru_cache(maxsize=4096)
def read_reference(question: str, reference: str, others: str, kind: str | None) -> tuple[Question, Reference]:
    """Read a cleaned question and its reference."""
    asked = read_question(question, kind)
    bare = _ASIDE_IN_BRACKETS.sub("", reference).strip()
    reading, full, every = (
        read(text, temporal=asked.temporal, numbering=asked.numbering)
        for text in (bare if re.search(r"\w", bare) else reference, reference, others)
    )
    told = [
        *_TITLE.findall(reference),
        *(found[0] for one in (REFUSAL, SUPERSEDED) for found in one.finditer(reference)),
    ]
    if re.search(r"\bnot\b|n't\b|\bcannot\b", question):  # "It was not held" only repeats "Why wasn't it held?"
        told += [f"not {word} n't {word} cannot {word}" for word in question.rstrip("? ").split()]
    said = "" if asked.polar else "\n".join([question, *told])
    parts = tuple(clauses(reading, said))
    main = [part for number, part in enumerate(parts) if not (number and _ASIDE.match(part.text))]
    stated = [unit for part in main if part.asserted is not None for unit in part.units]
    starts = {unit.start for unit in stated}
    known = {*re.findall(r"\w+", question.lower())}
    names = tuple(name for name in find_names(reading) if not {*name.tokens} <= known and name.start in starts)
    facts = tuple(unit.fact for unit in stated if unit.fact is not None) or tuple(reading.facts)
    facts = tuple(fact for fact in facts if not any(agree(own, fact) for own in asked.reading.facts)) or facts
    inside = [unit for unit in reading.units if any(unit.start in range(name.start, name.end) for name in names)]
    outside = [unit.stem for unit in stated if unit.fact is None and unit not in inside]
    words = [stem for stem in outside if stem not in asked.stems] or ([] if names or facts else outside)
    unique = tuple(dict.fromkeys(words))
    return asked, Reference(
        full,
        every,
        parts,
        names,
        facts,
        unique,
        said,
        re.search(r"\buntil\b", reference) is not None and not NOT_UNTIL.search(reference),
        kinds_asked(asked, facts, unique),
    )


def kinds_asked(asked: Question, facts: tuple[Fact, ...], words: tuple[str, ...]) -> tuple[type, ...]:
    """Return the kinds among ``facts`` that answer a question; empty if everything in the reference counts."""
    dates = [fact for fact in facts if isinstance(fact, Date)]
    if asked.several:
        return ()
    if asked.temporal and any(isinstance(fact, Date | Time) for fact in facts):
        # "By the end of April" is more than its month.
        vague = dates and all(date.day is None and date.weekday is None and date.year is None for date in dates)
        return () if vague and words else (Date, Time)
    return (Quantity,) if asked.quantity and any(isinstance(f, Quantity) and not f.weak for f in facts) else ()
