"""Words: cleaning, tokens, stems and stopwords."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from functools import lru_cache

from emailrl.facts import lexicon

WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_NUMBERED = re.compile(r"(?m)^\s*\d{1,2}[.)]\s+")
_SUFFIXES = (  # Suffixes and the minimum number of letters before them.
    *(("ations", 5), ("ation", 5), ("ments", 5), ("ment", 5), ("ings", 3), ("ing", 3), ("ions", 5), ("ion", 5)),
    *(("ied", 3), ("ies", 3), ("ed", 3), ("ly", 4), ("s", 3)),
)


_WORDINGS = tuple(  # Rewrites phrases into the one form that the grammar reads, if the lowercase text contains the key.
    (key, re.compile(pattern, re.IGNORECASE), instead)
    for key, pattern, instead in (
        ("half", r"\ban? (year|month|week|day|hour|mile) and a half\b", r"one and a half \1s"),
        ("half", r"\b(\w+) (year|month|week|day|hour|mile)s and a half\b", r"\1 and a half \2s"),
        ("every other", r"\bevery other (day|week|month|year)\b", r"every two \1s"),
        ("quarter", r"\b(?:the )?(?:first|1st) quarter(?: of)? (?=(?:19|20)\d\d\b)", "Q1 "),
        ("quarter", r"\b(?:the )?(?:second|2nd) quarter(?: of)? (?=(?:19|20)\d\d\b)", "Q2 "),
        ("quarter", r"\b(?:the )?(?:third|3rd) quarter(?: of)? (?=(?:19|20)\d\d\b)", "Q3 "),
        ("quarter", r"\b(?:the )?(?:fourth|4th) quarter(?: of)? (?=(?:19|20)\d\d\b)", "Q4 "),
        ("hour", r"\bmiles (?:per|an) hour\b", "mph"),
        ("hour", r"\b(?:km|kilomet(?:er|re)s) (?:per|an) hour\b", "kmh"),
        ("watt", r"\b(k|m|g)(?:ilo|ega|iga)watt[\s-]hours?\b", r"\1wh"),
        ("cu", r"\bcu(?:bic|\.)? (?:feet|foot|ft)\b", "cf"),
        ("cu", r"\bcu(?:bic|\.)? met(?:er|re)s?\b", "cbm"),
        ("cfd", r"\b((?:mm?|b)?cf)d\b", r"\1/day"),
        ("sq", r"\bsq(?:uare|\.)? (?:feet|foot|ft)\b", "sqft"),
        ("sq", r"\bsq(?:uare|\.)? (?:met(?:er|re)s?|m)\b", "sqm"),
        ("sq", r"\bsq(?:uare|\.)? (?:kilomet(?:er|re)s?|km)\b", "sqkm"),
        ("sq", r"\bsq(?:uare|\.)? (?:miles?|mi)\b", "sqmi"),
        ("basis", r"\bbasis points?\b", "bps"),
        ("point", r"(?:\b(?:percentage|percent)|%) points?\b", "pp"),
        ("", r"(?:\s?\u00b0\s?|\bdegrees? )(?:f|fahrenheit)\b", " degf"),
        ("", r"(?:\s?\u00b0\s?|\bdegrees? )(?:c|celsius|centigrade)\b", " degc"),
        ("dollar", r"\bus\.? dollars?\b", "usd"),
        ("dollar", r"\bcanadian\.? dollars?\b", "cad"),
        ("dollar", r"\baustralian\.? dollars?\b", "aud"),
    )
)


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
    text = re.sub(r"\b([A-Za-z])\.\s?(?=[A-Za-z]\.)", r"\1", text)  # D. C. and P.V. are one token
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
    word = lexicon.IRREGULAR.get(word, word)
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


_SAME = {_shorten(word): _shorten(other) for word, other in lexicon.SAME.items()}


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """Return a crude stem, shared by most forms of a word and by a few synonyms."""
    short = _shorten(re.sub(r"'s?$", "", word.lower()))
    return _SAME.get(short, short)


def says_something(word: str) -> bool:
    """Whether a word is a content word, not a stopword."""
    word = word.lower()
    return word not in lexicon.STOPWORDS and not word.endswith("n't")


def has_word(word: str, stems: Collection[str]) -> bool:
    """Whether a stem, or a longer or shorter form of it, is among ``stems``."""
    if word in stems or len(word) < 5:
        return word in stems
    return any(len(other) >= 5 and (word.startswith(other) or other.startswith(word)) for other in stems)


OPPOSITES: dict[str, set[str]] = {}
for _pair in sorted(lexicon.OPPOSITES):
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
