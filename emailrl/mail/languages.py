"""Words as people write and inflect them: other spellings, German and Dutch compounds, scripts without spaces.

Which language an email is in is not guessed. English forms of a keyword (``keys`` of ``key``) are made by rule. The
table ``stems`` has the words of emails that are not plainly English (marked in ``emails.extra``), by their spellings
(Müller or Mueller, Łukasz or Lukasz) and their stems in every other language, unless they stand more often in plainly
English emails (``not``). A keyword stands for every word with which it shares one, and for every compound of it. FTS5
ignores the accents of Latin letters. Chinese, Japanese and Korean text gets its pairs of characters, each after
``PARTY``, so that queries as ART-E writes them do not find these.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache, lru_cache
from itertools import islice, product
from pathlib import Path
from typing import Any
from unicodedata import normalize

from emailrl.mail.database import PARTY

FOREIGN = f"{PARTY}{PARTY}"
"""The mark of an email that is not plainly English."""
_STEMMED = ("german", "french", "spanish", "italian", "portuguese", "dutch", "russian", "polish")
_COMPOUNDING = ("german", "dutch")
WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
_ENGLISH, _COMPOUNDED, _OTHERS = (frozenset(WORDS[kind].split()) for kind in ("english", "compounding", "others"))
_SHARED = frozenset("éèêóç")  # letters of Dutch and of others
_FOREIGN = _COMPOUNDED | _OTHERS | _SHARED
_IRREGULAR = dict[str, list[str]]()
for _forms in map(str.split, WORDS["irregular"].split(",")):
    for _form in _forms:
        _IRREGULAR[_form] = [*_IRREGULAR.get(_form, ()), *_forms]
_DOUBT = 5  # English words that outweigh one of another language
_TOLD_CHARS = 400  # from which that is told
_WORD = re.compile(r"[^\W_]+")
_APOSTROPHE = re.compile(r"([^\W_]+)['’]([^\W_]+)")
_ACCENTED = re.compile("([a-z])[\u0300-\u036f]+")
_BOTH = {"ß": "ss", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ħ": "h", "ı": "i", "æ": "ae", "œ": "oe"}
_TABLES = [
    str.maketrans(letters | {letter.upper(): other.title() for letter, other in letters.items() if letter not in "ßı"})
    for letters in (_BOTH | {"ä": "ae", "ö": "oe", "ü": "ue", "ø": "oe", "å": "aa"}, _BOTH | {"ø": "o"})
]
_LETTER = re.compile(f"[{''.join(map(chr, {*_TABLES[0], *_TABLES[1]}))}]")
_CJK_RANGES = (
    "\u3005\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003ffff"
)
_CJK = re.compile(f"[{_CJK_RANGES}]")
_RUN = re.compile(f"([{_CJK_RANGES}]+)|[^{_CJK_RANGES}]+")
_LONGEST_DOUBLED = 6  # letters: permitted, but visited
_SHORTEST, _SHORTEST_PART, _SHORTEST_COMPOUND, _LONGEST = 3, 4, 8, 40  # letters
_BEGINS, _ENDS, _LAST = "<", ">", "\U0010ffff"  # begin the keys of compounds in ``stems``
_MOST_FORMS = 3  # of each word of a phrase, and as many words
_SEARCHED_CHARS, _MOST_WORDS = 100_000, 8  # of a text, for its snippet
_ENDINGS = ("s", "", "y", "e", "ies", "es", "ed", "ing", "ied", "ying", "al", "als")  # of a word without its own
_ENDING = re.compile("(?<=..)(?:i?e[sd]|(?<![aeiou])ying|ing|(?<!s)s|(?<!e)e|(?<![aeiou])y)$")
_PLURAL_ES, _DOUBLES = re.compile("(?:[sxz]|[cs]h)$"), re.compile("[^aeiou][aeiou][^aeiouwxy]$")
_IRREGULAR_END = re.compile(r"i?e(?=[ck]$)|(?<=\w\wu)[sx]$")  # Polish: zegarek, zegarka; French: pneus, jeux
_PHONES = [  # a zero, a country's number or neither, then an area and the rest, by its digits
    re.compile(rf"{begins}([0-9]{{1,4}}){''.join(f'([0-9]{{{digits}}})' for digits in rest)}")
    for begins in ("0(?!0)", r"(?:\+|00)\d", r"(?:\+|00)\d\d", r"(?:\+|00)\d{3}", "(?=[1-9].{8})")
    for rest in ("6", "33", "222", "7", "34", "322", "8", "44", "2222")
]
_DOUBLED = re.compile(r"(?<=(.))\1$")


def _told(subject: str, body: str) -> tuple[bool, bool]:
    """Whether an email is plainly English by its beginning, and whether some of its words may be compounds."""
    head = f"{subject} {body[:_TOLD_CHARS]}"[:_TOLD_CHARS].lower()
    words = [*head.replace(":", " ").replace(",", " ").split(), *(() if head.isascii() else head)]
    others = _FOREIGN.intersection(words)
    is_english = len(_ENGLISH.intersection(words)) > _DOUBT * len(others)
    return is_english, (not is_english and others <= _SHARED) or not _COMPOUNDED.isdisjoint(others)


def indexed_words(names: str, subject: str, body: str) -> list[str]:
    """Return what the index gets for an email besides its text, as it stands in ``emails.extra``."""
    found, is_marked = list[str](filter(None, [marked(closed(names))])), not _told(subject, body)[0]
    for text in (names, subject, body):
        if not text.isascii():
            is_marked = is_marked or _LETTER.search(normalize("NFC", text)) is not None
            if _CJK.search(text):
                words = _WORD.findall(normalize("NFKC", text))
                found += [PARTY + piece for word in words if _CJK.search(word) for piece in _pieces(word)]
    return [*found, FOREIGN] if is_marked else found


class Stems:
    """Gathers the rows (stem, word) of the table ``stems``: of the words of marked emails, without those that stand
    more often in plainly English emails."""

    def __init__(self) -> None:
        self._words, self._english, self._compounds = Counter[str](), Counter[str](), set[str]()

    def add(self, names: str, subject: str, body: str) -> None:
        """Add a marked email; of one in plain English, its words of other letters alone."""
        is_english, has_compounds = _told(subject, body)
        words = _words_in(f"{names}\n{subject}\n{body}")
        self._words.update((word for word in words if not word.isascii()) if is_english else words)
        if has_compounds:
            self._compounds |= words

    def compare(self, subject: str, body: str, times: int) -> None:
        """Count the words of a plainly English email that stands for so many."""
        for word in _words_in(f"{subject}\n{body}"):
            if word in self._words:
                self._english[word] += times

    def rows(self) -> set[tuple[str, str]]:
        words = [
            word
            for word, number in self._words.items()
            if word.isalpha() and _SHORTEST <= len(word) <= _LONGEST
            if number >= self._english[word] or not word.isascii()
        ]
        compounds = [word for word in words if word in self._compounds and len(word) >= _SHORTEST_COMPOUND]
        forms = ((word, {*spellings(word), fold(word), fold(_IRREGULAR_END.sub("", word))}) for word in words)
        pairs = [(each, fold(word)) for word, others in forms for each in others]
        found = {(each, word) for each, word in pairs if each != word}
        written, kept = [each for each, _ in pairs], [word for _, word in pairs]
        for name in _STEMMED:
            found.update(zip(_stems(name, written), kept, strict=True))
        for name in _COMPOUNDING:
            for stem, word in zip(_stems(name, compounds), map(fold, compounds), strict=True):
                found.update(((f"{_BEGINS}{stem}", word), (f"{_ENDS}{stem[::-1]}", word)))
        return found


def stem_ranges(word: str) -> str:
    """Return, as JSON, the first and the last key in ``stems`` of each group of words for which a keyword stands."""
    word = normalize("NFC", word.lower())
    written = {word, fold(word), fold(_IRREGULAR_END.sub("", word))}
    found = [(each, each) for each in written.union(*(_stems(name, written) for name in _STEMMED))]
    for stem in {stem for name in _COMPOUNDING for stem in _stems(name, [word])}:
        if len(stem) >= _SHORTEST_PART:
            found += [(f"{key}{stem}", f"{key}{stem}{_LAST}") for key, stem in ((_BEGINS, stem), (_ENDS, stem[::-1]))]
    return json.dumps(found)


def closed(names: str) -> str:
    """Return the words that have an apostrophe without it: OBrien."""
    return " ".join(map("".join, _APOSTROPHE.findall(names))) if "'" in names or "’" in names else ""


@lru_cache(8192)
def marked(text: str) -> str:
    """Return the words of a text as they stand in ``emails.extra``."""
    text = text if text.isascii() else normalize("NFC", text)
    return " ".join([PARTY + word for word in _WORD.findall(text)])


def words_of(text: str) -> set[str]:
    """Return the words of a text in lower case, as FTS5 keeps them."""
    return {*map(fold, _WORD.findall(text.lower()))}


def _words_in(text: str) -> set[str]:
    text = text.lower()
    return {*_WORD.findall(text if text.isascii() else normalize("NFC", text))}


def fold(word: str) -> str:
    """Return a word in lower case as FTS5 keeps it: without the accents of Latin letters."""
    return word if word.isascii() else normalize("NFC", _ACCENTED.sub(r"\1", normalize("NFD", word)))


def spellings(text: str) -> list[str]:
    """Return the text and its other spellings."""
    if text.isascii() or not _LETTER.search(composed := normalize("NFC", text)):
        return [text]
    return [*dict.fromkeys((text, *map(composed.translate, _TABLES)))]


def phrases(keyword: str, forms: Callable[[str], Collection[str]]) -> list[str]:
    """Return a keyword with each of its words in its ``forms``; a few of each if there are several."""
    words = _WORD.findall(keyword)
    if len(words) < 2:
        return [form for word in words for form in forms(word)]
    if len(words) > _MOST_FORMS:
        return []
    return [*map(" ".join, product(*([word, *islice(forms(word), _MOST_FORMS)] for word in words)))]


def english_forms(word: str) -> list[str]:
    """Return the inflections of an English word, those of nouns first: what differs in its ending alone and has the
    same stem, which tells ``evening`` from a form of ``even``."""
    word, stem = word.lower(), _stemmer("english").stemWord
    known = [form for form in _IRREGULAR.get(word, ()) if form != word]
    if not (word.isascii() and word.isalpha() and _SHORTEST <= len(word) <= _LONGEST):
        return known
    root = _ENDING.sub("", word)
    stripped = dict.fromkeys((root, _DOUBLED.sub("", root))) if root != word else ()
    ends = ["es" if _PLURAL_ES.search(word) else "s", "d" if word[-1] == "e" else "ed", "ing"]
    if len(word) <= _LONGEST_DOUBLED and _DOUBLES.search(word):
        ends += [f"{word[-1]}ed", f"{word[-1]}ing"]
    forms = [*(each + ending for ending in _ENDINGS for each in stripped), *(word + end for end in ends)]
    made = (form for form in forms if form != word and stem(form) == stem(word))
    return [*dict.fromkeys([*known, *made])]


def phone_groups(number: str) -> list[str]:
    """Return the groups in which a telephone number typed in one piece may be written; none for other keywords."""
    found = (each.fullmatch(number) for each in _PHONES) if number[-1:].isdecimal() else ()
    return [zero + " ".join(groups.groups()) for groups in found if groups for zero in ("", "0")]


def words_apart(keyword: str) -> list[str]:
    """Return the keyword; its words if one is of a script without spaces, whose pairs form no phrases with others."""
    return keyword.split() if not keyword.isascii() and _CJK.search(keyword) else [keyword]


def in_pairs(keyword: str) -> list[str]:
    """Return the FTS5 phrase by which ``emails.extra`` has a keyword in a script without spaces; none for others."""
    if keyword.isascii() or not _CJK.search(keyword):
        return []
    pieces = [piece for word in _WORD.findall(normalize("NFKC", keyword)) for piece in _pieces(word)]
    ends_in_pair = len(pieces) > 1 and len(pieces[-2]) == 2 and pieces[-2][1:] == pieces[-1]
    pieces = pieces[:-1] if ends_in_pair else pieces
    return [f'"{" ".join(PARTY + piece for piece in pieces)}"{"" if ends_in_pair else " *"}']


def words_around(text: str, keywords: Collection[str]) -> list[str]:
    """Return the words of a text, at most a few, in which a keyword in a script without spaces stands."""
    parts = [part for keyword in keywords for part in words_apart(keyword) if _CJK.search(part)]
    words = dict.fromkeys(_WORD.findall(text[:_SEARCHED_CHARS]) if parts else ())
    return [*islice((word for word in words if any(part in word for part in parts)), _MOST_WORDS)]


def _pieces(word: str) -> Iterator[str]:
    """The pairs of characters of each run of a script without spaces, then its last one; other runs whole."""
    for match in _RUN.finditer(word):
        if run := match[1]:
            yield from (run[at : at + 2] for at in range(len(run) - 1))
            yield run[-1]
        else:
            yield match[0]


def _stems(language: str, words: Collection[str]) -> list[str]:
    return [*map(fold, _stemmer(language).stemWords([*words]))]


@cache
def _stemmer(language: str) -> Any:
    import Stemmer

    return Stemmer.Stemmer(language, 0)  # without a cache, which costs more than it saves
