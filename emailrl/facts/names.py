"""Finds names: runs of capitalized words in carefully written text, and the names that addresses spell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emailrl.facts.lexicon import NICKNAMES, ROLES, STOPWORDS, TITLES
from emailrl.facts.reading import MASK, Reading
from emailrl.facts.words import stem

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
    """Return the names of a text in order; none if most letters are capitals.

    A single word at the start of a sentence is a name only if it can be the subject: "Ada will", not "Delay it".
    """
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
    """Return the name in an address: Sara Shackleton for ``sara.shackleton@enron.com``, without middle initials.

    None for a local part of any other form, or with words of a machine, a list or the domain.
    """
    local, _, domain = address.partition("@")
    parts = [part for part in re.split(r"[._]+", local) if part]
    if len(parts) == 3 and len(parts[1]) == 1:
        parts = [parts[0], parts[2]]
    if len(parts) != 2 or any(len(part) < 2 or not _ADDRESS_PART.fullmatch(part) for part in parts):
        return None
    if any(part in ROLES or part in domain.split(".") for part in parts):
        return None
    return " ".join("-".join(piece.capitalize() for piece in part.split("-")) for part in parts)
