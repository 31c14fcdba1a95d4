"""What a text says of an answer: the values that it lacks, and the passage that bears it."""

from __future__ import annotations

import re
from collections import Counter
from itertools import chain

from emailrl.facts.reading import Literal, agree, find_names, read, same_token
from emailrl.facts.words import clean, says_something, stem

_WORD = re.compile(r"\w+")
_PIECE = re.compile(r"\S.{0,299}?(?:\w{3}[.]|[^\w\s][.]|[!?])(?=\s)|\S.{0,299}")
"""A sentence or the rest of its line, at most 300 characters. No sentence ends at "Dr." or "am 3."."""
_READ_CHARS = 20_000  # of a text in which other spellings are looked for: reading them takes 2 s at worst


def unstated(answer: str, text: str) -> list[str]:
    """Return the dates, numbers, codes and names of an answer that a text states in no spelling, as they stand in the
    answer; one word of a name suffices."""
    said, words = read(clean(answer)), _WORD.findall(text.lower())
    plain, long = f" {' '.join(words)} ", {word for word in words if len(word) > 1}
    known = read(clean(text[:_READ_CHARS]), literals=[fact for fact in said.facts if isinstance(fact, Literal)]).facts
    values = [
        unit.text
        for unit in said.units
        if unit.fact is not None and f" {' '.join(_WORD.findall(unit.text.lower()))} " not in plain
        if not any(agree(unit.fact, fact) for fact in known)
    ]
    names = [
        said.text[name.start : name.end].strip(" .,)")
        for name in find_names(said)
        if not any(same_token(part, word) for part in name.tokens if len(part) > 1 for word in long)
    ]
    return list(dict.fromkeys(values + names))


def passage(answer: str, question: str, text: str) -> list[str]:
    """Return the sentence or line of a text that shares most with an answer, and less with its question, between its
    neighbours; a word counts the less the more of them have it. "…" stands where the text goes on."""
    pieces = _PIECE.findall(text)
    said = [{stem(word) for word in _WORD.findall(piece) if says_something(word)} for piece in pieces]
    common = Counter(chain.from_iterable(said))
    weights = {stem(word): 0.1 for word in _WORD.findall(question)} | dict.fromkeys(map(stem, _WORD.findall(answer)), 1)
    values = [sum(weights.get(word, 0) / common[word] for word in words) for words in said]
    best = max(range(len(pieces)), key=values.__getitem__, default=0)
    return ["…"] * (best > 1) + pieces[max(0, best - 1) : best + 2] + ["…"] * (best + 2 < len(pieces))
