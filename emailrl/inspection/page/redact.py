"""Consistent pseudonyms for the people and addresses of a mailbox in a page's data.

``learn`` collects the entities: every address, and the names in addresses (``ann.lee@x.com`` names Ann and Lee) and in
email headers. Then one pass over every string replaces them: addresses and paths as a whole, names as words.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

from emailrl.inspection.page.build import PageData
from emailrl.records import Record

NOTICE: Final = (
    "each address, and each name that stands in an address or email header, has one pseudonym throughout. Other names, "
    "names of one or two letters and names that are common words (outside the full name), phone numbers and what the "
    "emails say are unchanged: read the page before you share it."
)
Span = tuple[int, int, str]

_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)")
"""A model's calls are JSON in text: the n of an escaped line break is not part of the next name."""
_LOCAL = r"\w.!#$&'*+/=?^`{|}~-"
_ADDRESS = (
    rf'(?:"(?P<quoted>[^"\n]{{1,200}}?)" ?|(?<![{_LOCAL}])(?P<local>(?:[{_LOCAL}]|%(?!(?:25)*40))++))'
    r"(?:@|%(?:25)*40|&#0*64;)(?P<domain>\[[^]\s]{1,60}\]|[\w-]++(?:\.[\w-]++)*)"
)
_PART = r"""[^\s/"'<>|:*?,;()]++"""
_PATH = rf"(?<![\w./:<])(?P<path>(?:file://)?(?:~[\w.-]*)?/(?:{_PART}(?: {_PART}){{0,3}}/+)*(?P<last>{_PART})?)"
"""An absolute path; its folders may hold spaces."""
_HOME = re.compile(r".*/(?:home|Users)/[^/]*|~[^/]*/?")
_WORD = r"[^\W\d_]++(?!['’]t\b)"  # Don, but not the Don of Don't
_ENTITY = re.compile(rf"{_ADDRESS}|{_PATH}|(?P<word>{_WORD})")
_HEADER = re.compile(r"^[ \t>*]*(?:From|To|Cc|Bcc|Sent by|Forwarded by)[ \t]*:([^\n]{2,300})", re.I | re.M)
_BEFORE = re.compile(
    r"(?<![\w.'-])([^\W\d_][\w.'-]*+(?:,?[ \t]++[^\W\d_][\w.'-]*+){0,3})\"?[ \t]*+[<\[(](?:mailto:)?[^\s<>]{1,99}@"
)
"""The name in ``"Lee, Ann" <al@x.com>``."""
_CAPITALISED = re.compile(r"\b[^\W\d_a-z][^\W\d_]*\b")
_COMMON = re.compile(
    r"the|and|for|from|with|sent|subject|date|(?:mon|tues|wednes|thurs|fri|satur|sun)day|january|february|march|april|"
    r"may|june|july|august|(?:sept|octo|novem|decem)+ber|jan|feb|mar|apr|jun|jul|aug|sep|oct|nov|dec|mailto|com|org|"
    r"net|edu|example|javamail|info|sales|support|admin|office|news|team|all|list|noreply|reply|services?|help|contact|"
    r"e?mail|marketing|press|group|desk|mailing|owner|request|subscribe|announce|[pce]st|corp|inc|llc|users?|root|home"
)
"""Parts of addresses that are names only within a full name."""
_IN_LOWERCASE = re.compile(
    r"art|bill|black|brown|chase|cook|dean|don|faith|frank|good|gray|green|grace|grant|hope|joy|king|lance|long|mark|"
    r"page|pat|price|ray|rich|rob|rose|stone|sue|white|will|young"
)
"""Names that are common words unless capitalized."""
_REASON = re.compile(r"(could not be read|not a training note|not a metrics record).*", re.DOTALL)
"""Read errors may quote the line."""
_TEXTS = ("id", "file", "group", "scenario", "question", "gold", "answer")
_FIXED = ("role", "finish", "kind", "source")


def redacted(data: PageData, mailbox: Iterable[str] = ()) -> PageData:
    """Return the page's data with pseudonyms; ``mailbox`` has all its addresses, if they are at hand."""
    redactor = Redactor()
    for record in ({"run": data.run}, *data.details()):
        redactor.learn({name: value for name, value in record.items() if name != "samples"})
    redactor.learn_mailbox(mailbox)
    left_out = [_REASON.sub(r"\1", each) for each in data.run["left_out"]]
    run = redactor.record(data.run | {"title": f"Redacted {data.run['kind']}", "left_out": left_out})
    rows = [row | redactor.record({name: row[name] for name in _TEXTS}) for row in data.rows]

    def details() -> Iterator[Record]:
        for record in data.details():
            yield redactor.record(record | {"samples": []}) | {"samples": [*map(redactor.sample, record["samples"])]}

    return PageData(run | {"redacted": NOTICE}, rows, details)


class Redactor:
    """Collects names with ``learn``; the other methods replace them."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._domains: dict[str, str] = {}
        self._people: set[str] = set()
        """Parts of full names; a word that stands alone before an @ (energy@x.com) may be a common one."""
        self._pairs: set[tuple[str, str]] = set()
        """Neighbors in full names, in both orders."""
        self._small: Counter[str] = Counter()
        """How often a word is lowercase, minus how often it is capitalized."""

    def learn(self, value: Any) -> None:
        """Collect every address, and every name in an address or email header, from all texts of a record."""
        if isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                self.learn(each)
        elif isinstance(value, str):
            text = _unescaped(value)
            for entity in _ENTITY.finditer(text):
                if entity["domain"]:
                    self._note(re.findall(_WORD, entity["quoted"] or entity["local"]))
                elif word := entity["word"]:
                    self._small[word.lower()] += 1 if word.islower() else -1
            for line in _HEADER.findall(text) + _BEFORE.findall(text):
                for name in re.split(r"[;<>()\[\]@]|,(?=[^,]*,)", line):
                    self._note(_CAPITALISED.findall(name), is_person=True)

    def learn_mailbox(self, mailbox: Iterable[str]) -> None:
        """Collect the names in addresses of people who may not occur: words that look common are no names alone."""
        for address in mailbox:
            self._note(re.findall(_WORD, address.rpartition("@")[0]), is_person=False)

    def _note(self, words: list[str], *, is_person: bool | None = None) -> None:
        for word in (words := [word.lower() for word in words]):
            self._names.setdefault(word, f"Name{len(self._names) + 1}")
        if len(words) > 1 if is_person is None else is_person:
            self._people.update(words)
        for one, other in pairwise(words):
            self._pairs |= {(one, other), (other, one)}

    def record(self, value: Any) -> Any:
        """Return the value with pseudonyms in all its text, also in JSON; field names are kept."""
        if isinstance(value, dict):
            return {self._key(key): item if key in _FIXED else self.record(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.record(item) for item in value]
        if not isinstance(value, str):
            return value
        if value[:1] in ("{", "["):
            with suppress(ValueError, RecursionError):
                return json.dumps(self.record(json.loads(value)), ensure_ascii=False, separators=(",", ":"))
        return self._replaced(value)

    def _key(self, key: str) -> str:
        return key if re.fullmatch("[a-z_]+", key) else self._replaced(key)

    def sample(self, sample: Record) -> Record:
        """Return a token sequence with pseudonyms: a name's first token shows its pseudonym, and its ids are withheld.

        Without texts all ids are withheld, as anyone with the tokenizer could read them.
        """
        if sample["pieces"] is None:
            return sample | {"ids": None}
        text, ids, shown = "".join(sample["pieces"]), list(sample["ids"]), [""] * len(sample["pieces"])
        token = [at for at, piece in enumerate(sample["pieces"]) for _ in piece]
        done = 0
        for begin, end, name in [*self.spans(text), (len(text), len(text), "")]:
            for at in range(done, begin):
                shown[token[at]] += text[at]
            for at in token[begin:end]:
                ids[at] = None
            if name:
                shown[token[begin]] += name
            done = end
        return sample | {"pieces": shown, "ids": ids}

    def _replaced(self, text: str) -> str:
        parts, done = [], 0
        for begin, end, name in self.spans(text):
            parts += [text[done:begin], name]
            done = end
        return "".join([*parts, text[done:]])

    def spans(self, text: str) -> list[Span]:
        """Return ``(begin, end, pseudonym)`` of every replacement in a text, in order."""
        entities, found, paired = list(_ENTITY.finditer(text := _unescaped(text))), [], set()
        for one, other in pairwise(entities):
            between = text[one.end() : other.start()]
            if self._pair(one, other) in self._pairs and re.fullmatch(r"[\s.,'’_-]{1,3}", between):
                paired |= {one, other}
        for entity in entities:
            if entity["domain"]:
                found.append((*entity.span(), self._address(entity)))
            elif entity["path"] and len(entity["path"]) > 1:
                last = "" if _HOME.fullmatch(entity["path"]) else self._replaced(entity["last"] or "")
                found.append((*entity.span(), f"…/{last}"))
            elif (word := entity["word"]) and (entity in paired or self._is_name(word)):
                found.append((*entity.span(), self._names[word.lower()]))
        return found

    @staticmethod
    def _pair(one: re.Match[str], other: re.Match[str]) -> tuple[str, str]:
        return (one["word"] or "").lower(), (other["word"] or "").lower()

    def _is_name(self, word: str) -> bool:
        """Whether a word that stands alone is a name."""
        name = word.lower()
        if name not in self._names or len(name) < 3 or _COMMON.fullmatch(name):
            return False
        if name in self._people:
            return not (word.islower() and _IN_LOWERCASE.fullmatch(name))
        return self._small[name] <= 0

    def _address(self, match: re.Match[str]) -> str:
        local, domain = (match["quoted"] or match["local"]).lower(), match["domain"].lower()
        if (known := self._addresses.get(f"{local}@{domain}")) is None:
            host = self._domains.setdefault(domain, f"org{len(self._domains) + 1}.example")
            names = [self._names[word].lower() for word in re.findall(_WORD, local) if word in self._names]
            known = f"{'.'.join(names) or 'address'}@{host}"
            if known in self._addresses.values():
                known = known.replace("@", f".{len(self._addresses)}@")
            self._addresses[f"{local}@{domain}"] = known
        return known


def _unescaped(text: str) -> str:
    """The text with each JSON escape replaced by as many characters: a quote, or a line break and spaces."""
    return _ESCAPE.sub(lambda match: ('"' if match[0] == '\\"' else "\n").ljust(len(match[0])), text)
