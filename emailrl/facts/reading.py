"""Reads a text into its facts and words, in order; finds its names, and those that addresses spell.

Literals are facts copied character by character: email and web addresses, paths, file names, phone numbers, extensions,
versions, codes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from emailrl.facts.dates import DATE, TIME, Date, Time, read_dates, read_time
from emailrl.facts.quantities import NUMBER, Quantity, read_quantity
from emailrl.facts.words import NICKNAMES, ROLES, STOPWORDS, TITLES, WORD, says_something, stem

EMAIL = r"[\w.+'-]{1,64}@[\w-]+(?:\.[\w-]+)+"
URL = r"(?:https?://|www\.)[^\s<>()\"']+[\w/]"
_PATTERNS = {
    "email": EMAIL,
    "url": URL,
    "path": r"(?:\b[A-Za-z]:|\\)\\[^\s,;()]*[\w\\]|(?<![\w/])/(?:[\w.-]+/)+[\w.-]*\w",
    "file": r"(?<![\w.@/\\-])[a-z\d][\w-]*(?:\.[\w-]+)*"
    r"\.(?:xlsx?|docx?|pptx?|pdf|txt|csv|zip|jpe?g|png|gif|rtf|mdb|html?|xml|json|eml|wpd|tiff?)\b(?![\w@])",
    "phone": r"\+\d[\d\s().-]{6,16}\d"
    r"|(?<![\w.])(?:\(?\d{1,3}\)?[\s.-]+)?(?:\(?\d{3}\)?[\s./-]*)?\d{3}[\s.-]\d{4}(?!\w)"
    r"|(?<!\w)\(?\d{3}\)?[\s.-]*\d{7}(?!\w)",
    "extension": r"\b(?:ext(?:ension)?\b\.?\s*|x\s?)\d[\d-]*\d\b|(?<![\w.-])\d-\d{4}(?![\w-])",
    "version": r"\b(?!\d{1,2}\.\d{1,2}\.(?:\d\d){1,2}(?!\d|\.\d))v?\d+(?:\.\d+){2,}(?!\w)|\b(?:v"
    r"|version\s)\d+(?:\.\d+)+(?!\w)",
    "code": r"\b[a-z]{1,4}-?\d{2,}(?:\.[a-z\d]+)+\b|"
    r"\b(?!(?:USD|EUR|GBP|US|MAY|JUN|JUL|SEP|IN|AT|ON|BY|NO|FY|CY|PM) )(?-i:[A-Z]{2,4}[ -](?!\d{5}\b)"
    r"|[A-Z]-)\d{2,}[A-Z]?\b(?!-[A-Z\d]{1,3}\b)"
    r"|\b(?=[\w/-]{0,40}\d)(?=[\w/-]{0,40}[a-z])(?!\d+(?:st|nd|rd|th|k|m|mm|bn|b|[ap]m|h|hrs?|kg|t|km|mw|kw|l|s"
    r"|-[a-z]{3,})\b)"
    r"[a-z0-9]+(?:[-/][a-z0-9]+){0,8}\b(?:\s\d{2,}\b)?",
}
PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _PATTERNS.items()}
"""Patterns by kind, in search order; text taken by one is hidden from the next."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal: its kind, and its characters in one normalized spelling."""

    kind: str
    text: str

    def agrees(self, other: Literal) -> bool:
        """Whether the characters are the same; phone numbers may lack country and area code."""
        if self.kind == other.kind == "phone":
            shorter, longer = sorted((self.text, other.text), key=len)
            return len(shorter) >= 7 and longer.endswith(shorter)
        return self.text == other.text

    def contradicts(self, other: Literal) -> bool:
        """Whether the other is another literal of the same form: INV-20449 or PO-20448 for INV-20448, but not 12A."""
        if self.kind == "code":
            forms = {re.sub(r"\d+", "9", re.sub(r"[a-z]+", "a", code)) for code in (self.text, other.text)}
            return self.text != other.text and len(forms) == 1
        return not self.agrees(other)

    @property
    def spellings(self) -> re.Pattern[str]:
        """A pattern that finds the literal in any spelling: other separators, with or without a prefix."""
        if self.kind in ("code", "phone", "extension"):
            runs = re.findall(r"[a-z]+|\d", self.text)
            body = r"[\s().\u2013/-]{0,3}".join(map(re.escape, runs))
        elif self.kind == "file":
            name, _, ending = self.text.rpartition(".")
            body = r"[\s_-]+".join(map(re.escape, re.split(r"[_-]+", name))) + rf"(?:\.{ending})?(?!\.\w)"
        else:
            body = re.escape(self.text)
        return re.compile(rf"(?<![\w@.]){_PREFIX.get(self.kind, '')}{body}/?(?![\w@/]|\.\d)", re.IGNORECASE)


_PREFIX = {
    "version": r"v?",
    "url": r"(?:https?://)?(?:www\.)?",
    "phone": r"(?:\+?\(?\d{1,3}\)?[\s(.-]{1,3}|\(?0|\()?",
    "extension": r"(?:\b(?:ext(?:ension)?\b\.?\s*|x\s?))?",
}


def read_literal(kind: str, text: str) -> Literal:
    """Return the literal of one match of ``PATTERNS[kind]``."""
    text = text.lower()
    match kind:
        case "phone" | "extension":
            digits = re.sub(r"\D", "", text)
            return Literal(kind, digits[-10:] if kind == "phone" else digits)
        case "url":
            return Literal(kind, re.sub(r"^(?:https?://)?(?:www\.)?", "", text).rstrip("/."))
        case "code":
            return Literal(kind, re.sub(r"[^a-z0-9]", "", text))
        case "version":
            return Literal(kind, re.sub(r"[^\d.]", "", text).strip("."))
    return Literal(kind, text.strip("'."))


Fact = Date | Time | Quantity | Literal
MASK = "\ue000"  # Replaces every character of a fact in ``Reading.masked``.
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
    stem: str = ""  # Stem of a word; empty for a fact.


@dataclass(frozen=True, slots=True)
class Reading:
    """A text and its units in order; ``masked`` is the text with its facts masked, of equal length."""

    text: str
    masked: str
    units: tuple[Unit, ...]

    @property
    def facts(self) -> list[Fact]:
        return [unit.fact for unit in self.units if unit.fact is not None]

    @property
    def stems(self) -> list[str]:
        return [unit.stem for unit in self.units if unit.fact is None]


def read(text: str, *, temporal: bool = False, numbering: bool = False, literals: Iterable[Literal] = ()) -> Reading:
    """Read a cleaned text. With ``temporal``, "1/3" is a day rather than a share, and "1998" is a year. With
    ``numbering``, "2.10" is a version or section, not 2.1. ``literals`` are searched first, in any spelling."""
    masked, units = text, list[Unit]()

    def take(pattern: re.Pattern[str], read_facts: Callable[[re.Match[str]], Sequence[Fact]]) -> None:
        """Read every match of a pattern, and mask it, so that nothing is read twice."""
        nonlocal masked
        pieces, position = [], 0
        for found in pattern.finditer(masked):
            start = found.end() - len(found[0].lstrip())
            end = found.start() + len(found[0].rstrip())
            if _FULL_STOP.match(masked, end - 1):
                end -= 1
            if start < end and MASK not in masked[start:end] and (facts := read_facts(found)):
                units.extend(Unit(start, end, text[start:end], fact) for fact in facts)
                pieces += [masked[position:start], MASK * (end - start)]
                position = end
        masked = "".join([*pieces, masked[position:]])

    for literal in sorted(literals, key=lambda literal: -len(literal.text)):
        take(literal.spellings, lambda found, literal=literal: [literal])  # type: ignore[misc]
    for kind, pattern in PATTERNS.items():
        take(pattern, lambda found, kind=kind: _literals(kind, found[0]))  # type: ignore[misc]
    take(DATE, lambda found: [] if _is_share(found, temporal) else read_dates(found))
    take(TIME, lambda found: [time] if (time := read_time(found)) else [])
    if temporal:
        take(_YEAR, lambda found: [Date(year=int(found[0]))])
    if numbering:
        take(_NUMBERING, lambda found: [Literal("version", found[0])])
    take(NUMBER, lambda found: [read_quantity(found)])
    joined: list[Unit] = []
    for unit in sorted(units, key=lambda unit: unit.start):
        last = joined[-1] if joined else unit
        fact = _sum(last.fact, unit.fact) if _BETWEEN.fullmatch(masked, last.end, unit.start) else None
        if fact is None:
            joined.append(unit)
        else:
            joined[-1] = Unit(last.start, unit.end, text[last.start : unit.end], fact)
            masked = masked[: last.end] + MASK * (unit.start - last.end) + masked[unit.start :]
    joined += [
        Unit(found.start(), found.end(), found[0], None, stem(found[0]))
        for found in WORD.finditer(masked.replace(MASK, " "))
        if says_something(found[0])
    ]
    return Reading(text, masked, tuple(sorted(joined, key=lambda unit: unit.start)))


def _sum(one: Fact | None, other: Fact | None) -> Quantity | None:
    """Return "2 hours and 30 minutes" as one quantity: if the second is less than one unit of the first."""
    if not (isinstance(one, Quantity) and isinstance(other, Quantity) and one.base and one.base == other.base):
        return None
    share = other.value * other.factor / one.factor
    return replace(one, value=one.value + share, rate=other.rate) if not one.rate and 0 < share < 1 else None


def _literals(kind: str, text: str) -> list[Fact]:
    """The literal, unless a code is a number with a unit or a hyphenated word ("40-page")."""
    is_number = NUMBER.fullmatch(text) or re.fullmatch(r"\d+-[a-z]{3,}", text, re.IGNORECASE)
    return [] if kind == "code" and is_number else [read_literal(kind, text)]


def _is_share(found: re.Match[str], temporal: bool) -> bool:
    if _FRACTION.fullmatch(found[0]) and _BEHIND_NUMBER.match(found.string, found.start()):
        return True  # 1 3/8
    return found[0] in _SHARES and not temporal


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


_PARTICLE = r"(?:de|da|di|del|van|von|der|den|la|le|bin|al)"
_RUN = re.compile(rf"(?<![\w'])[A-Z][\w'&]*(?:-[a-z]+)?\.?(?:(?:\s|-|(?<=\.))(?:{_PARTICLE}\s){{0,2}}[A-Z][\w'&]*\.?)*")
_VERB = re.compile(
    rf"\s*(?:$|[,;/().{MASK}]|(?:and|or|is|was|are|were|has|had|have|will|would|should|can|could|does|did|also|who|from|in|at)\b"
    r"|[a-z]+(?:ed|[^s]s)\b)"
)
_NO_PART = TITLES | STOPWORDS
_ADDRESS_PART = re.compile(r"[a-z]+(?:['-][a-z]+)*")


@dataclass(frozen=True, slots=True)
class Name:
    """A name: its position, and its words in lower case without titles."""

    start: int
    end: int
    tokens: tuple[str, ...]


def find_names(reading: Reading) -> list[Name]:
    """Return the names of a text in order; none if most letters are capitals. A single word at the start of a sentence
    is a name only if it can be the subject: "Ada will", not "Delay it"."""
    text = reading.masked
    if sum(map(str.isupper, text)) > 0.7 * sum(map(str.isalpha, text)):
        return []
    names = []
    for found in _RUN.finditer(text):
        raw = re.split(r"[\s-]+|(?<=\.)(?=\w)", re.sub(r"'s\b|'(?!\w)", "", found[0]))
        words = [word.strip(".'").lower() for word in raw]
        tokens = tuple(word for word in words if word and not (word in _NO_PART or re.fullmatch(_PARTICLE, word)))
        if not any(len(token) > 1 for token in tokens):
            continue
        before = text[: found.start()].rstrip(" ")
        heads = not before or before.endswith((".", "!", "?", ":", ";", "\n", "-", "("))
        is_subject = not found[0].endswith(("ing", "ed", "ly")) and _VERB.match(text, found.end())
        if len(words) > 1 or not heads or is_subject:
            names.append(Name(found.start(), found.end(), tokens))
    return names


def same_token(one: str, other: str) -> bool:
    """Whether two words of names are equal, or one is an initial or a short form of the other."""
    if one == other:
        return True
    if min(len(one), len(other)) == 1:
        return one[0] == other[0] and not {one, other} & {"i", "v", "x"}  # numerals of kings are not initials
    if min(len(one), len(other)) >= 6 and abs(len(one) - len(other)) == 1:  # Marseille, Marseilles
        return one.startswith(other) or other.startswith(one)
    return NICKNAMES.get(one, stem(one)) == NICKNAMES.get(other, stem(other))


def word_before(text: str, position: int) -> str:
    """Return the word before a position in lower case, or an empty string."""
    found = re.search(r"(\w+)\W+$", text[max(0, position - 30) : position])
    return found[1].lower() if found else ""


def name_of(address: str) -> str | None:
    """Return the name in an address: Sara Shackleton for ``sara.shackleton@enron.com``, without middle initials. None
    for a local part of any other form, or with words of a machine, a list or the domain."""
    local, _, domain = address.partition("@")
    parts = [part for part in re.split(r"[._]+", local) if part]
    if len(parts) == 3 and len(parts[1]) == 1:
        parts = [parts[0], parts[2]]
    if len(parts) != 2 or any(len(part) < 2 or not _ADDRESS_PART.fullmatch(part) for part in parts):
        return None
    if any(part in ROLES or part in domain.split(".") for part in parts):
        return None
    return " ".join("-".join(piece.capitalize() for piece in part.split("-")) for part in parts)
