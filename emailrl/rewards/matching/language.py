"""The English a matcher needs: stems, opposites, denials, and the clauses they reach over."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from emailrl.rewards.matching import lexicon

_SUFFIXES = (
    *(("ations", 5), ("ation", 5), ("ments", 5), ("ment", 5), ("ings", 3), ("ing", 3), ("ions", 5), ("ion", 5)),
    *(("ied", 3), ("ies", 3), ("ed", 3), ("ly", 4), ("s", 3)),
)
"""Endings and the least that must remain before them."""


def _shorten(word: str) -> str:
    word = lexicon.IRREGULAR.get(word, word)
    for suffix, least in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= least and not word.endswith("ss"):
            word = word[: -len(suffix)] + ("y" if suffix in ("ied", "ies") else "")
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lsz":
        word = word[:-1]
    return word[:-1] if len(word) > 4 and word[-1] == "e" else word


_SAME = {_shorten(word): _shorten(other) for word, other in lexicon.SAME.items()}


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """A crude stem, the same for most forms of a word and for a few words of one meaning."""
    short = _shorten(re.sub(r"'s?$", "", word.lower()))
    return _SAME.get(short, short)


def content_stems(text: str) -> list[str]:
    """Stems of the words that say something, in order."""
    words = re.findall(r"[^\W\d_\ue000-\uf8ff]+(?:'[^\W\d_]+)?", text)
    return [stem(word) for word in words if word.lower() not in lexicon.STOPWORDS and not word.lower().endswith("n't")]


OPPOSITES: dict[str, set[str]] = {}
for _pair in sorted(lexicon.OPPOSITES):
    _one, _other = (stem(word) for word in _pair.split("/"))
    OPPOSITES.setdefault(_one, set()).add(_other)
    OPPOSITES.setdefault(_other, set()).add(_one)

_DENYING_STEMS = frozenset(stem(word) for word in lexicon.DENYING)
_DENIAL = re.compile(
    r"\b(?:not|never|nobody|no one|none|neither|nor|cannot|no longer|no|nothing|nowhere|hardly|false|wrong|incorrect"
    r"|yet to)\b|n't\b|\b(?:do|does|did|is|are|was|were|has|have|had|wo|ca|could|would|should)nt\b",
    re.IGNORECASE,
)
_NO_DENIAL = re.compile(
    r"\bnot only\b|\bno (?:later|earlier|more|less|fewer) than\b|\bnot (?:later|more|less) than\b|\bno doubt\b"
    r"|\bwhy not\b|\bno\.? (?=[\ue000-\uf8ff])|(?:\bnot\b|n't\b)(?=.*\buntil\b)",
    re.IGNORECASE,
)
_FORWARD = re.compile(
    r"\b(?:instead of|rather than|except(?: for)?|other than|apart from|as opposed to|away from|in place of"
    r"|anything but|(?:any|every|all|no)\s?\w* but"
    r"|(?<=chosen )over|(?<=preferred )over|(?<=picked )over|(?<=selected )over"
    r"|not(?= (?-i:[A-Z\ue000-\uf8ff])))\b",
    re.IGNORECASE,
)
"""Denies what follows it, not what stands before."""
_MOVED = re.compile(
    r"\b(?:mov|chang|switch|shift|postpon|push|brought|bring|reschedul|renam|transfer|relocat|rais|rose|went|extend)\w*\b"
    r"[^,;]{0,40}?\bfrom\s(?P<old>[^,;]{1,40}?)\s(?:to|until|till)\b",
    re.IGNORECASE,
)
_FORMER = re.compile(
    r"\s*(?:previously|formerly|originally|initially|(?:extended|moved|changed|up|down) from)\b", re.IGNORECASE
)
_SENTENCE = re.compile(
    r"(?<!\b[A-Z])(?<!\b(?:St|Co|vs|No))(?<!\b(?:Inc|Ltd|etc|e\.g|i\.e))(?<!\bCorp)[.]+(?=\s|$)|[!;\n]+|(?<=\?)\s"
    r"|:\s|\s[-\u2013\u2014]+\s|[()]"
)
_CLAUSE = re.compile(
    r",\s+(?:(?:and|or|but|so|because|although|while|which|who)\s+)?|\s+(?:but|because|although|though|while|whereas)\s+"
    r"|\s+so\s+(?=that\b)|\s+and\s+(?=(?:not|never|will|would|should|is|are|was|were|has|have|can|could|must|he|she|it"
    r"|they|we|you|i|then|also|to)\b)",
    re.IGNORECASE,
)
_TRAILING = re.compile(r"(?:which|who|whose|where|\w{2,}ing|hence|although|while)\b", re.IGNORECASE)
_RELATIVE = re.compile(r",\s+(?:which|who|whose|where)\s+$", re.IGNORECASE)


def clauses(text: str, known: frozenset[str] = frozenset()) -> Iterator[tuple[str, bool | None, bool]]:
    """Cut a text into ``(piece, asserted, main)``.

    ``asserted`` is False where a denial reaches over the piece, None where nothing is said of it: it is asked back
    ("Friday? No, Monday") or the old value of a change ("from Friday to Monday"). Words that deny by meaning
    ("rejected") count unless their stem is ``known`` from the question or the reference. ``main`` is False for what
    only trails a sentence.
    """
    for sentence in _SENTENCE.split(text):
        position, number = 0, 0
        for cut in [*_CLAUSE.finditer(sentence), None]:
            piece = sentence[position : cut.start() if cut else len(sentence)]
            if piece.strip():
                trailing = number > 0 and (_TRAILING.match(piece) or _RELATIVE.search(sentence[:position]))
                for part, asserted in _signed(piece, known):
                    yield part, asserted, not trailing
                number += 1
            position = cut.end() if cut else position


def _signed(piece: str, known: frozenset[str]) -> Iterator[tuple[str, bool | None]]:
    if piece.rstrip().endswith("?") or _FORMER.match(piece):
        yield piece, None
        return
    moved = _MOVED.search(piece)
    if moved:
        yield moved["old"], None
        piece = piece[: moved.start("old")] + piece[moved.end("old") :]
    head, *tail = _FORWARD.split(piece, maxsplit=1)
    asserted = not _denies(head, known)
    yield head, asserted
    for rest in tail:
        yield rest, not asserted


def _denies(text: str, known: frozenset[str]) -> bool:
    if _DENIAL.search(_NO_DENIAL.sub(" ", text)):
        return True
    return any(word in _DENYING_STEMS and word not in known for word in content_stems(text))
