"""Reads what a question asks for, and reference and answer accordingly, in clauses: asserted, denied or left open."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from emailrl.facts.dates import ZONE, Date, Time
from emailrl.facts.quantities import UNITS, Quantity
from emailrl.facts.reading import Fact, Literal, Name, Reading, Unit, agree, find_names, read
from emailrl.facts.words import has_word, stem
from emailrl.rewards.matching.language import (
    DENIAL,
    DOUBT,
    FORWARD,
    MOVED,
    NEGATIVE,
    NO_DENIAL,
    NOT_UNTIL,
    REFUSAL,
    SUPERSEDED,
)

SHORT = 4  # A reference of at most this many facts and words is a bare answer, not a sentence.
WHOLE = "whole"  # The kind of literal made of a long reference's whole text; it is masked in an answer like a fact.
_SENTENCE_END = re.compile(
    r"(?<!\b[A-Z])(?<!\b(?:St|Co|vs|No|Jr|Sr))(?<!\bno(?=\.\s\ue000))(?<!\b(?:Inc|Ltd|etc|e\.g|i\.e))(?<!\bCorp)[.]+(?=\s|$)|[!;\n]+|\?(?=\s|$)"
)
_CUT = re.compile(
    rf"(?P<forward>{FORWARD})|,\s+(?:(?:and|or|but|so|because|although|while|which|who)\s+)?|:\s|\s[-\u2013\u2014]+\s|[()]"
    r"|(?<!\bnot)(?<!n't)(?<!\bnever)(?<!\bbut)\s+because\s+"
    r"|\s+(?:although|though|while|whereas|(?<!one )(?<!body )(?<!thing )but)\s+|\s+so\s+(?=that\b)"
    r"|\s+and\s+(?=(?:not|never|will|would|should|is|are|was|were|has|have|had|did|does|do|can|could|might|may|must|he|she|it|they|we|you|i"
    r"|then|also|to|nobody|no|none|nothing)\b)"
    r"|,?\s+(?:since|so|when|while)\s+|\s+(?:which|that|who)\s+(?=(?:\w+\s)?(?:not|never|cannot)\b|\w+n't\b)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of a sentence; ``asserted`` is False if it is denied and None if it is left open."""

    start: int
    text: str  # The clause with its facts masked.
    sentence: int
    asserted: bool | None
    units: tuple[Unit, ...]


def clauses(
    reading: Reading, said: str, lasting: bool = False, echo: frozenset[str] = frozenset()
) -> tuple[Clause, ...]:
    """Return the clauses of a text in order; denials and doubts that also occur in ``said`` are ignored, and denials in
    a clause with two stems of ``echo``. "Not until May" is no denial, unless the reference names something ``lasting``
    until then."""
    text, position, found = reading.masked, 0, []
    for number, stop in enumerate([*_SENTENCE_END.finditer(text), None]):
        end = stop.start() if stop else len(text)
        doubted = False
        for first, last, status in _pieces(text, position, end, said):
            piece = text[first:last]
            units = tuple(unit for unit in reading.units if first <= unit.start < last)
            echoes = sum(unit.stem in echo for unit in units) > 1 and not _NOT_IT.match(piece)
            doubted = doubted or _says_new(DOUBT, piece, said)
            if stop and stop[0] == "?":
                status = None
            elif status:
                denial = NO_DENIAL.sub(" ", piece if lasting else NOT_UNTIL.sub(" ", piece))
                refused = any(found.search(piece) and not found.search(said) for found in (REFUSAL, SUPERSEDED))
                status = not (doubted or (not echoes and (refused or _says_new(DENIAL, denial, said))))
            elif doubted:
                status = False
            found.append(Clause(first, piece, number, status, units))
        position = stop.end() if stop else end
    return tuple(found)


_NOT_IT = re.compile(r"\W*(?:it\s)?(?:is\s|was\s)?(?:\w+ly\s)?(?:not\b|isn't|wasn't)", re.IGNORECASE)


def _pieces(text: str, start: int, end: int, said: str) -> Iterator[tuple[int, int, bool | None]]:
    """Split a sentence: the old value of a change is left open, and what follows "instead of" is denied."""
    status: bool | None = True
    for cut in [*_CUT.finditer(text, start, end), None]:
        if cut and cut["forward"] and not _is_new(cut, said):
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


def _says_new(marker: re.Pattern[str], text: str, said: str) -> bool:
    return any(_is_new(found, said) for found in marker.finditer(text))


def _is_new(found: re.Match[str], said: str) -> bool:
    """Whether a marker together with the next word is absent from ``said``."""
    following = re.match(r"\s+(?:\w+|\S)", found.string[found.end() :])
    phrase = re.escape(found[0] + (following[0] if following else ""))
    return re.search(rf"{phrase}\b", said, re.IGNORECASE) is None


_TEMPORAL = re.compile(
    r"^(?:\w+\s){0,2}when\b|\b(?:and|or|by|since|until)\swhen\b"
    r"|\b(?:what|which)\s(?:(?:is|was|are|will be)\s)?(?:the\s)?(?:\w+\s)?"
    r"(?:time|date|day|weekday|month|year|deadline)s?\b",
    re.IGNORECASE,
)
_QUANTITY = re.compile(
    r"\bhow\s(?:many|much|long|large|big|far|old|tall|high|wide|fast|often)\b|\b(?:what|which)(?:'s)?\s(?:[\w'-]+\s){0,5}?"
    r"(?:price|costs?|fee|budget|rate|amount|salary|share|percentage|percent|discount|rent|strike|size|total|value|volume"
    r"|number of|balance|limit|threshold|minimum|maximum)\b",
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
_SEVERAL = re.compile(r"(?:\band|,)\s(?:by\s|to\s|at\s|for\s)?(?:who|whom|what|when|where|why|how|which)\b", re.I)
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
    polar: bool  # Whether it is a yes/no question.
    temporal: bool
    numbering: bool  # Whether it asks for a version or section, where 2.10 is not 2.1.
    quantity: bool
    person: bool
    several: bool  # Whether it asks for several things at once, so that everything in the reference counts.
    unit: tuple[str, float] | None  # Base unit and factor of "how many feet".


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference answer, with the parts that an answer must contain."""

    full: Reading
    """The whole reference; ``clauses``, ``names``, ``facts`` and ``words`` omit brackets and the question's text."""
    clauses: tuple[Clause, ...]
    names: tuple[Name, ...]
    facts: tuple[Fact, ...]
    words: tuple[str, ...]  # Stems outside names.
    wanted: frozenset[str]  # Stems that it adds to the question, those of names included.
    known: frozenset[str]  # Stems of the question, the reference and its alternatives, which an answer may also give.
    known_facts: tuple[Fact, ...]
    said: str
    """Text whose denials are ignored: the question, and the reference's titles ("No Free Lunch") and refusals."""
    echo: frozenset[str]  # The question's stems if it asks for what is not.
    lasting: bool  # Whether something lasts until a time, so that "not until" denies it.
    kinds: tuple[type, ...]
    """The kinds of fact that answer the question and occur in the reference; empty if everything in it counts."""

    @property
    def statuses(self) -> set[bool | None]:
        return {part.asserted for part in self.clauses}

    @property
    def denied(self) -> set[str]:
        denied, rest = (
            {unit.stem for part in self.clauses if (part.asserted is False) is no for unit in part.units}
            for no in (True, False)
        )
        return denied - rest


@lru_cache(maxsize=4096)
def read_reference(question: str, reference: str, others: str, kind: str | None) -> tuple[Question, Reference]:
    """Read a cleaned question, which asks for its ``kind`` only if that is known, and its reference. ``others``: with
    alternatives."""

    def asks(pattern: re.Pattern[str], *kinds: str) -> bool:
        return pattern.search(question) is not None if kind is None else kind in kinds

    temporal, numbering = asks(_TEMPORAL, "date"), _NUMBERING.search(question) is not None
    unit = re.search(r"\bhow (?:many|much) (\w+)", question, re.IGNORECASE)
    reading = read(question.rstrip("? "), temporal=temporal, numbering=numbering)
    asked = Question(
        reading,
        frozenset(reading.stems),
        polar=asks(_POLAR) and not re.search(r"\bor\b(?! not)", question),
        temporal=temporal,
        numbering=numbering,
        quantity=asks(_QUANTITY, "number", "count"),
        person=asks(_PERSON, "person"),
        several=asks(_SEVERAL),
        unit=UNITS.get(unit[1].lower()) if unit else None,
    )
    bare = _ASIDE_IN_BRACKETS.sub("", reference).strip()
    reading, full, every = (
        read(text, temporal=asked.temporal, numbering=asked.numbering)
        for text in (bare if re.search(r"\w", bare) else reference, reference, others)
    )
    told = _TITLE.findall(reference)
    told += [found[0] for marker in (REFUSAL, SUPERSEDED) for found in marker.finditer(reference)]
    if re.search(r"\bnot\b|n't\b|\bcannot\b", question):  # "It was not held" only repeats "Why wasn't it held?"
        told += [f"not {word} n't {word} cannot {word}" for word in question.rstrip("? ").split()]
    said = "" if asked.polar else "\n".join([question, *told])
    parts = clauses(reading, said)
    main = [part for number, part in enumerate(parts) if not (number and _ASIDE.match(part.text))]
    stated = [unit for part in main if part.asserted is not None for unit in part.units]
    starts = {unit.start for unit in stated}
    words_asked = {*re.findall(r"\w+", question.lower())}
    names = tuple(name for name in find_names(reading) if not {*name.tokens} <= words_asked and name.start in starts)
    facts = tuple(unit.fact for unit in stated if unit.fact is not None) or tuple(reading.facts)
    facts = tuple(fact for fact in facts if not any(agree(own, fact) for own in asked.reading.facts)) or facts
    named = {place for name in names for place in range(name.start, name.end)}
    outside = [unit.stem for unit in stated if unit.fact is None and unit.start not in named]
    added = [word for word in outside if word not in asked.stems] or ([] if names or facts else outside)
    words = tuple(dict.fromkeys(added))
    in_names = {stem(word) for name in names for token in name.tokens for word in (token, *token.split("-"))}
    dates = [fact for fact in facts if isinstance(fact, Date)]
    kinds: tuple[type, ...] = ()
    if asked.temporal and any(isinstance(fact, Date | Time) for fact in facts):
        # "By the end of April" is more than its month.
        vague = dates and all(date.day is None and date.weekday is None and date.year is None for date in dates)
        kinds = () if vague and words else (Date, Time)
    elif asked.quantity and any(isinstance(fact, Quantity) and not fact.weak for fact in facts):
        kinds = (Quantity,)
    return asked, Reference(
        full,
        parts,
        names,
        facts,
        words,
        wanted=frozenset({*in_names, *words}),
        known=asked.stems | {*in_names, *every.stems},
        known_facts=(*every.facts, *asked.reading.facts),
        said=said,
        echo=asked.stems if NEGATIVE.search(question) and not asked.polar else frozenset(),
        lasting=re.search(r"\buntil\b", reference) is not None and not NOT_UNTIL.search(reference),
        kinds=() if asked.several else kinds,
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A question, its reference and an answer, read and ready to compare."""

    asked: Question
    expected: Reference
    given: Reading
    clauses: tuple[Clause, ...]

    def is_known(self, unit: Unit) -> bool:
        """Whether a unit also occurs in the reference or the question."""
        fact, known = unit.fact, self.expected.known_facts
        if fact is None:
            return has_word(unit.stem, self.expected.known)
        return is_whole(fact) or any(agree(other, fact) or agree(fact, other) for other in known)

    def is_asked(self, unit: Unit) -> bool:
        """Whether a unit occurs in the question."""
        if unit.fact is None:
            return has_word(unit.stem, self.asked.stems)
        return any(agree(unit.fact, other) for other in self.asked.reading.facts)

    def holds(self, *units: Unit) -> bool:
        """Whether any unit is part of what the reference adds to the question."""
        return any(
            has_word(unit.stem, self.expected.wanted)
            if unit.fact is None
            else is_whole(unit.fact) or any(agree(fact, unit.fact) for fact in self.expected.facts)
            for unit in units
        )

    def new(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the units that occur in neither the reference nor the question."""
        return [unit for unit in units if not self.is_known(unit)]

    def echoes(self, units: Iterable[Unit]) -> bool:
        """Whether units repeat the question, as a whole sentence does: two of its words or facts beside the answer."""
        return sum(self.is_asked(unit) and not self.holds(unit) for unit in units) > 1

    @property
    def is_short(self) -> bool:
        """Whether the reference is a word, a name or a fact rather than a sentence."""
        return len(self.expected.full.units) <= SHORT

    @property
    def is_quoted(self) -> bool:
        """Whether the answer quotes a long reference word for word."""
        return any(map(is_whole, self.given.facts))

    @property
    def asserted(self) -> list[Unit]:
        return [unit for part in self.clauses if part.asserted for unit in part.units]

    @property
    def sentences(self) -> dict[int, list[Unit]]:
        found: dict[int, list[Unit]] = {}
        for part in self.clauses:
            found.setdefault(part.sentence, []).extend(part.units)
        return found

    @property
    def texts(self) -> str:
        return f"{self.expected.full.text} {self.asked.reading.text}"

    @property
    def is_mixed(self) -> bool:
        """Whether the answer is in mixed case, so that a capital letter indicates a name."""
        return self.given.text not in (self.given.text.upper(), self.given.text.lower())

    def stems(self, asserted: bool) -> set[str]:
        """Return the stems of the answer's asserted or denied clauses."""
        return {u.stem for part in self.clauses if part.asserted is asserted for u in part.units if u.fact is None}


def is_whole(fact: Fact) -> bool:
    return isinstance(fact, Literal) and fact.kind == WHOLE
