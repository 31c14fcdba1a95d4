"""Letters that people also write as others: Müller or Mueller, Łukasz or Lukasz, Straße or Strasse.

FTS5 ignores most accents, so that Muller finds Müller. For the rest, an email's index gets the other spellings of its
words, and a keyword is searched in all of its own.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain
from unicodedata import normalize

from emailrl.mail.database import PARTY

_BOTH = {"ß": "ss", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ħ": "h", "ı": "i", "æ": "ae", "œ": "oe"}
_TABLES = [
    str.maketrans(letters | {letter.upper(): other.title() for letter, other in letters.items() if letter not in "ßı"})
    for letters in (_BOTH | {"ä": "ae", "ö": "oe", "ü": "ue", "ø": "oe", "å": "aa"}, _BOTH | {"ø": "o"})
]
_LETTER = re.compile(f"[{''.join(map(chr, {*_TABLES[0], *_TABLES[1]}))}]")
_WORD = re.compile(r"[^\W_]+")
_DIGRAPH = re.compile("(?<=[aou])e", re.IGNORECASE)


@lru_cache(8192)
def marked(text: str) -> str:
    """Return the words of a text as they stand in ``emails.extra``."""
    text = text if text.isascii() else normalize("NFC", text)
    return " ".join([PARTY + word for word in _WORD.findall(text)])


def spellings(text: str) -> list[str]:
    """Return the text and its other spellings."""
    if text.isascii() or not _LETTER.search(composed := normalize("NFC", text)):
        return [text]
    return [*dict.fromkeys((text, *map(composed.translate, _TABLES)))]


def accented(word: str) -> list[str]:
    """Return how a word without accents may be written with them, as far as FTS5 does not ignore these."""
    return [*dict.fromkeys((word, _DIGRAPH.sub("", word), word.replace("ss", "ß")))]


def other_spellings(names: str, subject: str, body: str) -> list[str]:
    """Return the other spellings of an email's names and subject, and of the words of its body, each with its
    neighbors, so that phrases of two words are found, too."""
    if names.isascii() and subject.isascii() and body.isascii():
        return []
    found = {other: None for text in (names, subject) for other in spellings(text)[1:]}
    if not body.isascii() and _LETTER.search(body := normalize("NFC", body)):
        words = _WORD.findall(body)
        spelled = [" ".join(words[max(at - 1, 0) : at + 2]) for at, word in enumerate(words) if _LETTER.search(word)]
        found |= dict.fromkeys(chain.from_iterable(spellings(each)[1:] for each in dict.fromkeys(spelled)))
    return [*found]
