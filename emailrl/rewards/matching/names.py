"""Names: runs of capitalised words, told from words that only head a sentence, and compared token by token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from emailrl.rewards.matching.language import stem
from emailrl.rewards.matching.lexicon import GENERIC, PLACES, STOPWORDS, TITLES

_PARTICLE = r"(?:de|da|di|del|van|von|der|den|la|le|bin|al|of)"
_RUN = re.compile(rf"(?<![\w'])[A-Z][\w'&]*\.?(?:(?:\s|-|(?<=\.))(?:{_PARTICLE}\s)?[A-Z][\w'&]*\.?)*")
_PHRASE = {"in", "at", "from", "of", "for", "on", "via", "near", "by", "under", "using", "about", "within"}
_INNER_CAPITAL = re.compile(r"[a-z][A-Z]|[A-Z]{2}")
_AFTER_SUBJECT = re.compile(
    r"\s*(?:$|[,;/(]|(?:and|or|is|was|has|had|will|would|should|can|could|does|did|also|asked|said|agreed|offered|needs"
    r"|wants|alone|only|who|himself|herself|no|never|not|replaced|recommended|suggested)\b)"
)


@dataclass(frozen=True, slots=True)
class Name:
    """A name's words in lower case, titles left out."""

    tokens: tuple[str, ...]
    asserted: bool = True
    main: bool = True
    in_phrase: bool = False
    """It follows "in", "at", "from" and the like: where something is, rather than what the answer is."""

    def compatible(self, other: Name, *, part: bool) -> bool:
        """``other`` can be this name: no token of either is foreign to the longer one, initials stand for words.

        ``part`` lets a person's first or last name do; otherwise only words like "Systems" may be missing.
        """
        shorter, longer = sorted((self.tokens, other.tokens), key=len)
        if not all(any(_same_token(a, b) for b in longer) for a in shorter):
            return False
        if not any(len(token) > 1 and token in longer for token in shorter):
            return False
        missing = [token for token in self.tokens if not any(_same_token(token, b) for b in other.tokens)]
        return part or all(stem(token) in GENERIC for token in missing)


def find_names(piece: str, asserted: bool, main: bool) -> list[Name]:
    """The names in one clause."""
    names = []
    for found in _RUN.finditer(piece):
        raw = re.split(r"[\s-]+|(?<=\.)(?=\w)", re.sub(r"'s?\b", "", found[0]))
        words = [word.strip(".").lower() for word in raw]
        heads_clause = not piece[: found.start()].strip(" '(,-") and not (words[0] in STOPWORDS or words[0] in TITLES)
        tokens = tuple(word for word in words if word and word not in TITLES and word not in STOPWORDS)
        if not any(len(token) > 1 for token in tokens):
            continue
        # A capital at the head of a clause is no sign of a name, save in a run of several or a word like "TaskWeaver".
        plain = heads_clause and len(tokens) == 1 and not _INNER_CAPITAL.search(found[0])
        if not plain or _is_subject(piece, found):
            before = piece[: found.start()].split()
            names.append(Name(tokens, asserted, main, bool(before) and before[-1].lower() in _PHRASE))
    return names


def has_names(wanted: Sequence[Name], names: Iterable[Name], stems: set[str], *, part: bool) -> bool:
    """All of up to four names, four fifths of more, are among ``names`` or, in lower case, among ``stems``."""
    given = list(names)
    hits = sum(_has_name(name, given, stems, part=part) for name in wanted)
    return hits >= (len(wanted) if len(wanted) <= 4 else 0.8 * len(wanted))


def rival_names(given: Iterable[Name], said: Sequence[Name], stems: set[str]) -> bool:
    """Whether a name among ``given`` is neither one of ``said`` nor made of ``stems``: a further candidate."""
    for name in given:
        if not name.asserted or name.in_phrase or set(name.tokens) <= PLACES:
            continue
        if any(other.compatible(name, part=True) for other in said):
            continue
        if not all(stem(token) in stems for token in name.tokens) or _mixes(name, said):
            return True
    return False


def rival_items(text: str, stems: set[str]) -> bool:
    """Whether a short list, capitals or not, has an item of which nothing was said: "marta and joe"."""
    items = re.split(r",\s*(?:and\s+|or\s+)?|\s+(?:and|or)\s+|/", text.strip(" .").lower())
    if len(items) < 2 or len(text.split()) > 10:
        return False
    return any(_is_fresh(item, stems) for item in items)


def _is_fresh(item: str, stems: set[str]) -> bool:
    words = re.findall(r"[^\W\d_]+", item)
    if not 1 <= len(words) <= 3 or re.search(r"\d", item):
        return False
    return not any(word in STOPWORDS or word in PLACES or stem(word) in stems for word in words)


def _has_name(name: Name, given: Sequence[Name], stems: set[str], *, part: bool) -> bool:
    if any(name.compatible(other, part=part) for other in given if other.asserted):
        return True
    in_runs = {stem(token) for other in given for token in other.tokens}
    hits = [
        (stem(token) in stems and (not part or stem(token) not in in_runs)) or (not part and stem(token) in GENERIC)
        for token in name.tokens
        if len(token) > 1
    ]
    return any(hits) if part else all(hits)


def _mixes(name: Name, said: Sequence[Name]) -> bool:
    """The run takes tokens of two names ("Ben Hale", of Ben Carver and Lucy Hale)."""
    parts = [set(other.tokens) & set(name.tokens) for other in said]
    return len(name.tokens) > 1 and any(parts) and not any(set(name.tokens) <= part for part in parts)


def _same_token(a: str, b: str) -> bool:
    return a == b or (min(len(a), len(b)) == 1 and a[0] == b[0])


def _is_subject(piece: str, found: re.Match[str]) -> bool:
    """A single capitalised word that is the whole clause, or stands where its subject does."""
    if not piece[found.end() :].strip(" .,"):
        return True
    word = found[0].strip(".").lower()
    is_form = word.endswith(("ing", "ed", "ly", "tion")) and stem(word) != word
    return not is_form and _AFTER_SUBJECT.match(piece, found.end()) is not None
