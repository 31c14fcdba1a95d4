"""A text taken apart: facts (dates, times, quantities, addresses, codes), names and words, each asserted or denied."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

from emailrl.rewards.matching.dates import DATE, TIME, Date, Time, read_dates, read_time
from emailrl.rewards.matching.language import clauses, content_stems
from emailrl.rewards.matching.names import Name, find_names
from emailrl.rewards.matching.quantities import NUMBER, Quantity, read_quantity

LONGEST = 4000
"""Characters of a text that are read."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Something copied sign by sign: an email or web address, a path, a phone number, a version, a code."""

    kind: str
    text: str

    def agrees(self, other: Literal) -> bool:
        """The same signs; phone numbers may lack country and area code."""
        if self.kind == other.kind == "phone":
            shorter, longer = sorted((self.text, other.text), key=len)
            return len(shorter) >= 7 and longer.endswith(shorter)
        return self.text == other.text

    def contradicts(self, other: Literal) -> bool:
        """Another one of the same make: INV-20449 or PO-20448 against INV-20448, but not seat 12A."""
        if self.kind == "code":
            return self.text != other.text and _make(self.text) == _make(other.text)
        return not self.agrees(other)


Fact = Date | Time | Quantity | Literal


def same_kind(one: Fact, other: Fact) -> bool:
    """Whether two facts can be compared at all."""
    if isinstance(one, Literal) and isinstance(other, Literal):
        return one.kind == other.kind
    return type(one) is type(other)


def agree(one: Fact, other: Fact) -> bool:
    """The second gives what the first gives."""
    return same_kind(one, other) and one.agrees(other)  # type: ignore[arg-type]


@dataclass(slots=True)
class Statement:
    """What a text says. Denied facts, words and old values are kept apart; ``trailing`` ones only accompany."""

    text: str
    facts: list[Fact] = field(default_factory=list)
    denied_facts: list[Fact] = field(default_factory=list)
    trailing_facts: list[Fact] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    stems: list[str] = field(default_factory=list)
    """Content stems of asserted main clauses, names included, repeats left out, in order."""
    trailing_stems: set[str] = field(default_factory=set)
    denied_stems: list[str] = field(default_factory=list)

    def all_facts(self) -> list[Fact]:
        """Facts in whatever standing."""
        return self.facts + self.denied_facts + self.trailing_facts

    def all_stems(self) -> set[str]:
        """Stems in whatever standing."""
        return set(self.stems) | self.trailing_stems | set(self.denied_stems)


def clean(text: str) -> str:
    """One spelling for quotes, dashes, spaces and compatibility letters; private-use signs removed."""
    text = unicodedata.normalize("NFKC", text[:LONGEST])
    text = re.sub(r"[\u2018\u2019\u02bc`\u00b4]", "'", text)
    text = re.sub(r"[\u201c\u201d\u00ab\u00bb\"*_]", " ", text)
    text = re.sub(r"[\u2010\u2011\u2012\u2212]", "-", text)
    text = re.sub(r"[\ue000-\uf8ff\u200b-\u200f\u2060\ufeff]", "", text)
    text = re.sub(r"\b(?:mr|mrs|ms|dr|prof|messrs)\b\.?\s(?=[A-Za-z])", "", text, flags=re.IGNORECASE)
    return re.sub(r"[^\S\n]+", " ", text).strip()


def read(
    text: str,
    *,
    temporal: bool = False,
    person: bool = False,
    literals: Iterable[Literal] = (),
    known: frozenset[str] = frozenset(),
) -> Statement:
    """Take a cleaned text apart.

    ``temporal`` reads "1/3" as a day rather than a share; ``person`` reads a lone "Jun" or "April" as a name;
    ``literals`` are those of the reference, looked for in any spelling; ``known`` stems never deny by their meaning
    (see ``language.clauses``).
    """
    marked, found = _extract(text, temporal, person, literals)
    statement = Statement(text)
    shouted = sum(map(str.isupper, marked)) > 0.6 * max(1, sum(map(str.isalpha, marked)))
    for piece, asserted, main in clauses(marked, known):
        facts = [fact for sign in re.findall(r"[\ue000-\uf8ff]", piece) for fact in found[ord(sign) - 0xE000]]
        stems = content_stems(piece)
        if asserted is None:
            statement.denied_facts += facts
        elif not asserted:
            statement.denied_facts += facts
            statement.denied_stems += [word for word in stems if word not in statement.denied_stems]
        elif main:
            statement.facts += facts
            statement.stems += [word for word in dict.fromkeys(stems) if word not in statement.stems]
        else:
            statement.trailing_facts += facts
            statement.trailing_stems |= set(stems)
        if not shouted:
            statement.names += find_names(piece, bool(asserted), main)
    return statement


_EMAIL = re.compile(r"[\w.+'-]+@[\w-]+(?:\.[\w-]+)+")
_URL = re.compile(r"(?:https?://|www\.)[^\s<>()]+[\w/]", re.IGNORECASE)
_PATH = re.compile(r"(?:\b[A-Za-z]:|\\)\\[^\s,;()]*[\w\\]|(?<![\w/])/(?:[\w.-]+/)+[\w.-]*\w")
_PHONE = re.compile(
    r"\+\d[\d\s().-]{6,16}\d|(?<![\w.])(?:\(?\d{1,3}\)?[\s.-]+)?(?:\(?\d{3}\)?[\s.-]*)?\d{3}[\s.-]\d{4}(?!\w)"
    r"|(?<!\w)\(?\d{3}\)?[\s.-]*\d{7}(?!\w)"
)
_EXTENSION = re.compile(r"\b(?:ext(?:ension)?\b\.?\s*|x\s?)(\d[\d-]*\d)\b", re.IGNORECASE)
_VERSION = re.compile(r"\bv?(\d+(?:\.\d+){2,})(?!\w)", re.IGNORECASE)
_CODE = re.compile(
    r"\b(?=[\w/-]{0,40}\d)(?=[\w/-]{0,40}[A-Za-z])(?!\d+(?:st|nd|rd|th|k|m|mm|bn|[ap]m|h|hrs?|kg|t|km|mw|kw|l)\b)"
    r"[A-Za-z0-9]+(?:[-/][A-Za-z0-9]+){0,8}\b(?:\s\d{2,}\b)?",
    re.IGNORECASE,
)
_SPACED_CODE = re.compile(
    r"\b(?!(?:USD|EUR|GBP|US|MAY|JUN|JUL|SEP|IN|AT|ON|BY|NO|FY|CY|PM) )(?:[A-Z]{2,4}[ -]|[A-Z]-)\d{2,}[A-Z]?\b"
)
_WORD_NUMBER = re.compile(r"[a-z]+-\w+|\d+-[a-z]+", re.IGNORECASE)
_SHARES = {"1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "1/8", "1/10"}


def _extract(text: str, temporal: bool, person: bool, literals: Iterable[Literal]) -> tuple[str, list[list[Fact]]]:
    """Replace every fact by one private-use sign that numbers it."""
    found: list[list[Fact]] = []

    def put(facts: list[Fact], matched: str) -> str:
        if not facts or len(found) >= 6000:
            return matched
        found.append(facts)
        return f" {chr(0xE000 + len(found) - 1)} "

    def date(match: re.Match[str]) -> str:
        if match[0] in _SHARES and (not temporal or re.search(r"\d $", match.string[: match.start()])):
            return match[0]
        if person and match["month3"] and not match["year3"]:
            return match[0]
        return put(list(read_dates(match)), match[0])

    def time(match: re.Match[str]) -> str:
        read = read_time(match)
        return put([read] if read else [], match[0])

    text = _EMAIL.sub(lambda m: put([Literal("email", m[0].lower().strip("'."))], m[0]), text)
    for literal in sorted(literals, key=lambda literal: -len(literal.text)):  # a code may be part of an address
        text = _spellings(literal).sub(lambda m, same=literal: put([same], m[0]), text)  # type: ignore[misc]
    text = _URL.sub(lambda m: put([Literal("url", _bare_url(m[0]))], m[0]), text)
    text = _PATH.sub(lambda m: put([Literal("path", m[0].lower())], m[0]), text)
    text = _PHONE.sub(lambda m: put([Literal("phone", _digits(m[0])[-10:])], m[0]), text)
    text = _EXTENSION.sub(lambda m: put([Literal("extension", _digits(m[1]))], m[0]), text)
    text = TIME.sub(time, DATE.sub(date, text))
    text = _VERSION.sub(lambda m: put([Literal("version", m[1])], m[0]), text)
    text = _SPACED_CODE.sub(lambda m: put([Literal("code", _signs(m[0]))], m[0]), text)
    text = _CODE.sub(lambda m: put(_code(m[0]), m[0]), text)
    text = NUMBER.sub(lambda m: put([read_quantity(m)], m[0]), text)
    return text, found


def _code(text: str) -> list[Fact]:
    """A code, unless it is a number with a unit or a word grown together with one ("40-page")."""
    if NUMBER.fullmatch(text) or (_WORD_NUMBER.fullmatch(text) and re.fullmatch(r"\d+-[a-z]{3,}", text)):
        return []
    return [Literal("code", _signs(text))]


def _spellings(literal: Literal) -> re.Pattern[str]:
    """A literal of the reference in any spelling: other separators, with or without a prefix."""
    if literal.kind == "code":
        runs, between, prefix = re.findall(r"[a-z]+|\d", literal.text), r"[\s./-]?", ""
    elif literal.kind == "phone":
        runs, between, prefix = list(literal.text), r"[\s().-]*", r"(?:\+?\(?\d{1,3}\)?[\s(.-]*|\(?0|\()?"
    elif literal.kind == "extension":
        runs, between, prefix = list(literal.text), "-?", r"(?:\b(?:ext(?:ension)?\b\.?\s*|x\s?))?"
    else:
        runs, between, prefix = [literal.text], "", r"(?:https?://)?(?:www\.)?" if literal.kind == "url" else ""
    body = between.join(map(re.escape, runs))
    return re.compile(rf"(?<![\w@.]){prefix}{body}/?(?![\w@/])", re.IGNORECASE)


def _make(code: str) -> str:
    return re.sub(r"\d+", "9", re.sub(r"[a-z]+", "a", code))


def _signs(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _digits(text: str) -> str:
    return re.sub(r"\D", "", text)


def _bare_url(text: str) -> str:
    return re.sub(r"^(?:https?://)?(?:www\.)?", "", text.lower()).rstrip("/.")
