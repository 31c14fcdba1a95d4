"""Words of other languages than English, for the index: inflections, German compounds, and scripts without spaces.

An email in one of ``LANGUAGES`` gets, in ``emails.extra``, the stems of its words in their order, and the ends of its
compounds (``rechnung`` of ``Stromrechnung``); Chinese, Japanese and Korean text gets its pairs of characters. Every
such word begins with ``PARTY``, so that queries as ART-E writes them do not find it. A search looks up a keyword's
stems in the languages of the database alone: one of English mail is searched as fast as without them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import cache, lru_cache
from itertools import islice
from typing import Any
from unicodedata import normalize

from emailrl.mail.database import PARTY

LANGUAGES = ("german", "french", "spanish", "italian", "portuguese", "dutch", "russian")
_COMMON = {
    "german": "und der das dass nicht ist mit für wir ich sie bitte eine einen wird haben auf zum zur ä ö ü ß "
    "bei dem dir mir uns hallo liebe noch auch aber wenn oder liegt sind kommt",
    "french": "les des une pour vous nous dans avec pas sur est votre que merci bonjour ç è ê à "
    "je chez sont mais salut bises mme elle cette bien é",
    "spanish": "los las por para con una del que está como hola gracias su el ñ ¿ ¡ ó muy pero hay cuando esta í",
    "italian": "gli della che sono non una con del ciao grazie questo è ò ù il",
    "portuguese": "os não para uma com você são obrigado que ã õ dos em",
    "dutch": "het een niet van voor met wij zijn ik naar ij graag deze",
}
"""Words and letters that tell a language; two of them do. Hardly any is an English word."""
_TELLING = {name: frozenset(words.split()) for name, words in _COMMON.items()}
_ANY_TELLING = frozenset[str]().union(*_TELLING.values())
_TOLD_CHARS = 600  # from which an email's language is told
_WORD = re.compile(r"[^\W_]+")
_CYRILLIC = re.compile("[\u0400-\u04ff]")
_CJK_RANGES = (
    "\u3005\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff"
)
_CJK = re.compile(f"[{_CJK_RANGES}]")
_RUN = re.compile(f"([{_CJK_RANGES}]+)|[^{_CJK_RANGES}]+")
_COMPOUNDING = ("german", "dutch")
_SHORTEST_HEAD, _SHORTEST_PART, _SHORTEST_COMPOUND = 3, 4, 8  # letters
_TAIL = "tail"
_SEARCHED_CHARS, _MOST_WORDS = 100_000, 8  # of a text, for its snippet


def language_of(subject: str, body: str) -> str:
    """Return which of ``LANGUAGES`` an email begins in, or an empty string."""
    head = f"{subject} {body[:_TOLD_CHARS]} "[:_TOLD_CHARS].lower()
    is_ascii = head.isascii()
    if is_ascii and (" the " in head or " and " in head or " you " in head):
        return ""
    if not is_ascii and _CYRILLIC.search(head):
        return "russian"
    words = _ANY_TELLING.intersection(head.split() if is_ascii else (*head.split(), *head))
    counts = {name: len(words & telling) for name, telling in _TELLING.items()} if len(words) > 1 else {"": 0}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 1 else ""


def indexed_words(names: str, subject: str, body: str) -> list[str]:
    """Return what the index gets for an email besides its text, as it stands in ``emails.extra``."""
    found: list[str] = []
    if language := language_of(subject, body):
        words = _WORD.findall(f"{names}\n{subject}\n{body}".lower())
        found += [mark(language), *(mark(language, _stem(language, word)) for word in words)]
        if language in _COMPOUNDING:
            tails = (tail for word in dict.fromkeys(words) for tail in _tails(language, word))
            found += [mark(_TAIL, tail) for tail in dict.fromkeys(tails)]
    for text in (names, subject, body):
        if not text.isascii() and _CJK.search(text):
            words = _WORD.findall(normalize("NFKC", text))
            found += [PARTY + piece for word in words if _CJK.search(word) for piece in _pieces(word)]
    return found


def mark(kind: str, word: str = "") -> str:
    """Return a stem or an end of a compound as it stands in the index; without a word, what says the language."""
    return f"{PARTY}{kind}{PARTY}{word}"


def words_apart(keyword: str) -> list[str]:
    """Return the keyword, or its words if one is of a script without spaces: pairs of characters form no phrases with
    other words."""
    return keyword.split() if not keyword.isascii() and _CJK.search(keyword) else [keyword]


def ways(keyword: str, languages: Collection[str]) -> list[str]:
    """Return the FTS5 phrases by which ``emails.extra`` has a keyword in languages of the database."""
    words = _WORD.findall(keyword.lower())
    found: list[str] = []
    for language in languages if words else ():
        stems = [_stem(language, word) for word in words]
        is_part = language in _COMPOUNDING and len(stems) == 1 and len(stems[0]) >= _SHORTEST_PART
        found.append(f'"{" ".join(mark(language, stem) for stem in stems)}"{" *" if is_part else ""}')
        if is_part:
            found.append(f'"{mark(_TAIL, stems[0])}"')
    if not keyword.isascii() and _CJK.search(keyword):
        pieces = [piece for word in _WORD.findall(normalize("NFKC", keyword)) for piece in _pieces(word)]
        ends_in_pair = len(pieces) > 1 and len(pieces[-2]) == 2 and pieces[-2][1:] == pieces[-1]
        pieces = pieces[:-1] if ends_in_pair else pieces
        found.append(f'"{" ".join(PARTY + piece for piece in pieces)}"{"" if ends_in_pair else " *"}')
    return found


def words_like(subject: str, body: str, keywords: Collection[str]) -> list[str]:
    """Return words of an email that have a keyword's stem in the email's language, or a keyword in a script without
    spaces; at most a few."""
    ideographs = [word for keyword in keywords for word in words_apart(keyword) if _CJK.search(word)]
    name = language_of(subject, body)
    stems = {_stem(name, word) for each in keywords for word in _WORD.findall(each.lower())} if name else set()
    parts = [each for each in stems if len(each) >= _SHORTEST_PART] if name in _COMPOUNDING else []

    def is_like(word: str) -> bool:
        own = _stem(name, word) if name else word
        is_part = any(own.startswith(part) or part in _tails(name, word) for part in parts)
        return own in stems or is_part or any(each in word for each in ideographs)

    text = f"{subject}\n{body}"[:_SEARCHED_CHARS].lower() if stems or ideographs else ""
    return [*islice(filter(is_like, dict.fromkeys(_WORD.findall(text))), _MOST_WORDS)]


def _pieces(word: str) -> Iterator[str]:
    """The pairs of characters of each run of a script without spaces, then its last one; other runs whole."""
    for match in _RUN.finditer(word):
        if run := match[1]:
            yield from (run[at : at + 2] for at in range(len(run) - 1))
            yield run[-1]
        else:
            yield match[0]


def _tails(language: str, word: str) -> list[str]:
    """The stems of what may be the last parts of a compound."""
    if len(word) < _SHORTEST_COMPOUND:
        return []
    return [_stem(language, word[at:]) for at in range(_SHORTEST_HEAD, len(word) - _SHORTEST_PART + 1)]


@cache
def _stemmer(language: str) -> Any:
    import snowballstemmer

    return snowballstemmer.stemmer(language)


@lru_cache(200_000)
def _stem(language: str, word: str) -> str:
    return _stemmer(language).stemWord(normalize("NFC", word))
