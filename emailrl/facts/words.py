"""Words: lists of stopwords, irregular forms, synonyms, opposites, titles, nicknames and numbers; cleaning, stems."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path


def listed(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def _paired(text: str) -> dict[str, str]:
    """ "lost:lose" → {"lost": "lose"}."""
    return dict(pair.split(":") for pair in text.split())


def _numbered(text: str, start: int) -> dict[str, int]:
    """ "one two/pair" → {"one": 1, "two": 2, "pair": 2}."""
    return {word: number for number, words in enumerate(text.split(), start) for word in words.split("/")}


_LISTS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
CARDINALS = _numbered(_LISTS["cardinals"], start=0)
TENS = {word: 10 * number for word, number in _numbered(_LISTS["tens"], start=2).items()}
ORDINALS = _numbered(_LISTS["ordinals"], start=1)
MONTHS = _numbered(_LISTS["months"], start=1)
WEEKDAYS = _numbered(_LISTS["weekdays"], start=0)
STOPWORDS = listed(_LISTS["stopwords"])
_IRREGULAR = _paired(_LISTS["irregular"])
_SYNONYMS = _paired(_LISTS["synonyms"])
_OPPOSITES = listed(_LISTS["opposites"])
TITLES = listed(_LISTS["titles"])
STATES = listed(_LISTS["states"])
COUNTRIES = listed(_LISTS["countries"])
NICKNAMES = _paired(_LISTS["nicknames"])
ROLES = listed(_LISTS["roles"])

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_NUMBERED = re.compile(r"(?m)^\s*\d{1,2}[.)]\s+")
_SUFFIXES = (  # Suffixes and the minimum number of letters before them.
    *(("ations", 5), ("ation", 5), ("ments", 5), ("ment", 5), ("ings", 3), ("ing", 3), ("ions", 5), ("ion", 5)),
    *(("ied", 3), ("ies", 3), ("ed", 3), ("ly", 4), ("s", 3)),
)

_WORDINGS = [(key, re.compile(pattern, re.IGNORECASE), instead) for key, pattern, instead in _LISTS["wordings"]]


def clean(text: str) -> str:
    """Normalize quotes, dashes, spaces, accents and compatibility letters, and remove emphasis marks."""
    text = re.sub(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)
    text = unicodedata.normalize("NFKD", text).replace("\u2044", "/")
    text = re.sub(r"[\u0300-\u036f\ue000-\uf8ff\u200b-\u200f\u2060\ufeff]", "", text)
    text = re.sub(r"[\u2018\u2019\u02bc`\u00b4]", "'", text)
    text = re.sub(r"[\u201c\u201d\u00ab\u00bb\"*]|(?<![^\W_])_+|_+(?![^\W_])|''", " ", text)
    text = re.sub(r"[\u2010\u2011\u2012\u2212]", "-", text)
    text = re.sub(r"(?m)^\s*[-\u2022]\s+", "", text)
    if len(_NUMBERED.findall(text)) > 1:
        text = _NUMBERED.sub("", text)
    text = re.sub(r"\b(?:mr|mrs|ms|dr|prof|messrs)\b\.?\s(?=[A-Za-z])", "", text, flags=re.IGNORECASE)
    text = re.sub(r"\b([A-Za-z])\.(?:\s?(?=[A-Za-z]\.)|(?=[A-Za-z]\b))", r"\1", text)  # D. C. and P.V are one token
    text = re.sub(r"[^\S\n]+", " ", text).strip()
    lower = text.lower()
    for key, pattern, instead in _WORDINGS:
        if key in lower:
            text = pattern.sub(instead, text)
    return text


_SPELLINGS = tuple(  # Rewrites the British spelling of a stem as the American one.
    (re.compile(pattern), instead)
    for pattern, instead in (
        (r"(?<=\w{3})our", "or"),  # favour
        (r"(?<=\w{3}i)s$|(?<=ly)s$", "z"),  # organis(e), analys(e)
        (r"(?<=[tb])r$", "er"),  # centr(e), fibr(e)
        (r"(?<=\wog)u$", ""),  # catalogu(e)
        (r"(?<=\wen)s$", "c"),  # defens(e)
        (r"(?<=\w{4}l)l$", ""),  # travell(ed)
    )
)


def _shorten(word: str) -> str:
    word = _IRREGULAR.get(word, word)
    for suffix, least in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= least and not word.endswith("ss"):
            word = word[: -len(suffix)] + ("y" if suffix in ("ied", "ies") else "")
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lszi":
        word = word[:-1]
    word = word[:-1] if len(word) > 4 and word[-1] == "e" else word
    for pattern, instead in _SPELLINGS:
        word = pattern.sub(instead, word)
    return word


_SAME = {_shorten(word): _shorten(other) for word, other in _SYNONYMS.items()}


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """Return a crude stem, shared by most forms of a word and by a few synonyms."""
    short = _shorten(re.sub(r"'s?$", "", word.lower()))
    return _SAME.get(short, short)


def says_something(word: str) -> bool:
    """Whether a word is a content word, not a stopword."""
    word = word.lower()
    return word not in STOPWORDS and not word.endswith("n't")


def has_word(word: str, stems: Collection[str]) -> bool:
    """Whether a stem, or a longer or shorter form of it, is among ``stems``."""
    if word in stems or len(word) < 5:
        return word in stems
    return any(len(other) >= 5 and (word.startswith(other) or other.startswith(word)) for other in stems)


OPPOSITES: dict[str, set[str]] = {}
for _pair in sorted(_OPPOSITES):
    _one, _other = (stem(word) for word in _pair.split("/"))
    OPPOSITES.setdefault(_one, set()).add(_other)
    OPPOSITES.setdefault(_other, set()).add(_one)

_I_DONT_KNOW = re.compile(
    r"(?:(?:sorry|i am sorry|i'?m sorry|unfortunately),?\s*)?(?:but )?(?:i\s+)?(?:do\s+not|don'?t)\s+know"
    r"(?:\s+(?:the\s+answer|that|this|it))?(?:\s+to\s+(?:that|this|the|your)(?:\s+question)?)?|idk"
)


def is_i_dont_know(answer: str) -> bool:
    """Whether an answer is only "I don't know", ignoring apostrophe style, case and final period."""
    text = re.sub(r"[\u2018\u2019\u02bc`\u00b4]", "'", answer).lower().strip(" \t\r\n.!\"'")
    return _I_DONT_KNOW.fullmatch(text) is not None
