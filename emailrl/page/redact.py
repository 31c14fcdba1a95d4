"""Consistent pseudonyms for the people and addresses of a mailbox in a page's data. ``learn`` collects the entities:
every address, and the names in addresses (``ann.lee@x.com`` names Ann and Lee) and in email headers. Then one pass over
every string replaces them: addresses and paths as a whole, names as words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final
from unicodedata import category, normalize

from emailrl.page.build import PageData
from emailrl.records import Record

NOTICE: Final = (
    "each address, and each name that stands in an address or an email's header, has one pseudonym throughout. Not "
    "covered are facts in prose, names that stand in no address and no English header, addresses spelled with spaces "
    "or (at), names in Thai and other scripts without spaces (but for Chinese, Japanese and Korean), names "
    "without their apostrophe, with other letters (oe for ö, o for ø), in encoded headers that a text quotes or across "
    "a line break, names run together (KenLay), lowercase words after a space in a path, paths without their start, "
    "parts of names of one or two letters and common words on their own: read it all before you share it."
)
Span = tuple[int, int, str]

_PART = r"""[^\s/\\"'<>|:*?,;()]++"""
_SPELLED = re.compile(
    rf"(?P<windows>(?:(?<![^\W_])[A-Za-z]:|\\{{2,4}}[\w.-]{{2,60}})(?P<slash>\\{{1,2}})"
    rf"(?:{_PART}(?: {_PART}){{0,3}}(?P=slash))*(?:{_PART})?)"
    r"|(?P<at>&(?:#x0*40|#0*64|commat)(?![0-9a-z]);?|%(?:25)*40|=40(?=[^\W\d_][\w-]*\.\w)|\ufe6b)|[\uff01-\uff5e]"
    r"|(?P<nothing>[\xad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe0f\ufeff])"
    r"|\\{1,4}u(?P<code>[0-9a-fA-F]{4})|\\(?P<escaped>[nrt\"/\\])",
    re.I,
)
"""What is not spelled as it is meant: Windows paths, @, full-width and zero-width characters, escapes of JSON."""
_LOCAL = r"\w.!#$%&'*+/=?^`{|}~\\\-"
_ADDRESS = (
    rf'(?:"(?P<quoted>[^"\n]{{1,200}}?)" ?|(?<![{_LOCAL}@])@*(?P<local>(?:(?:[{_LOCAL}]|(?<=\\) )++@+)*'
    rf"(?:[{_LOCAL}]|(?<=\\) )++))@+(?P<domain>\[[^]\s]{{1,60}}\]|[\w-]++(?:\.[\w-]++)*)"
    r"|(?P<x500>(?:/[A-Za-z]{1,2}=[^/=\n\"<>;,]{1,60}){0,9}/CN=[^\s/\"<>;,)]++)"
)
_ADDRESSES = re.compile(_ADDRESS)
_PATH = (
    r"(?<![\w./])(?<!http:)(?<!https:)(?<!ftp:)(?!(?<=<)/[\w:-]+\s*>)"
    rf"(?P<path>(?:~[\w.-]*)?/+(?:{_PART}(?: [^\W\d_a-z](?:{_PART})?){{0,3}}/+)*(?P<last>{_PART})?)"
)
"""An absolute path, but no web address or closing tag; a word of a folder's name after a space is capitalized."""
_HOME = re.compile(r".*/(?:home|Users)/+[^/]*|~[^/]*/?", re.I)
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_MARKS = "".join(chr(code) for code in range(0x300, 0x2E80) if category(chr(code)) in ("Mn", "Mc"))
_WORD = rf"(?:[{_UNSPACED}]|(?:[^\W_{_UNSPACED}]|[{_MARKS}])++(?!['’]t\b))"  # Don, but not the Don of Don't
"""Chinese, Japanese and Korean write names without spaces: each character is a word, and a name has several."""
_ENTITY = re.compile(rf"{_ADDRESS}|{_PATH}|(?P<word>{_WORD})")
_HEADER = re.compile(
    r"^[ \t>*]*(?:X-)?(?:From|To|Cc|Bcc|Sender|Reply-To|Sent by|Forwarded by)[ \t]*:"
    r"([^\n]{2,4000}(?:(?<=[,;])\n[ \t]+[^\n]{1,4000})*)",
    re.I | re.M,
)
_BEFORE = re.compile(
    r"(?<![\w.'-])([^\W\d_][\w.'-]*+(?:,?[ \t]++[^\W\d_][\w.'-]*+){0,3})\"?[ \t]*+[<\[(](?:mailto:)?"
    r"(?:[^\s<>\d][^\s<>]{0,98}@|/O=)"
)
"""The name in ``"Lee, Ann" <al@x.com>``."""
_SENDER = re.compile(r'"from" ?: ?"([^"<@\n]{1,200})"')  # of a hit, under ``SHOW_NAMES``
_COMMON = re.compile(
    r"the|and|for|from|with|not|you|your|this|that|are|sent|subject|date|(?:mon|tues|wednes|thurs|fri|satur|sun)day|"
    r"january|february|march|april|may|june|july|august|(?:sept|octo|novem|decem)+ber|jan|feb|mar|apr|jun|jul|aug|sep|"
    r"oct|nov|dec|mailto|com|org|net|edu|example|javamail|info|sales|support|admin|office|news|team|all|list|noreply|"
    r"reply|services?|help|contact|e?mail|message|marketing|press|group|desk|mailing|owner|request|subscribe|announce|"
    r"[pce]st|corp|inc|llc|users?|root|home|recipients"
)
"""Parts of addresses that are names only within a full name."""
_IN_LOWERCASE = re.compile(r"will|long|good|price|page|black|white|green|brown|young|hope|king|stone")
"""Names that are common words unless capitalized."""
_REASON = re.compile(r"(could not be read|not a training note|not a metrics record).*", re.DOTALL)
"""Read errors may quote the line."""
_TEXTS = ("id", "file", "group", "scenario", "inbox", "question", "gold", "answer")
_FIXED = ("role", "finish", "kind", "source", "reasons")


def redacted(data: PageData, mailbox: Iterable[str] = (), names: Iterable[str] = ()) -> PageData:
    """Return the page's data with pseudonyms; ``mailbox`` has all addresses of the database and ``names`` its display
    names, if they are at hand."""
    redactor = Redactor()
    for record in ({"run": data.run}, *data.details()):
        redactor.learn({name: value for name, value in record.items() if name != "samples"})
    redactor.learn_mailbox(mailbox)
    redactor.learn_names(names)
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
        self._pairs: set[tuple[str, str]] = set()  # Neighbors in full names, in both orders.

    def learn(self, value: Any) -> None:
        """Collect every address, and every name in an address or email header, from all texts of a record."""
        if isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                self.learn(each)
        elif isinstance(value, str):
            text, _ = _meant(value)
            self.learn_mailbox(_written(address) for address in _ADDRESSES.finditer(text))
            for line in _HEADER.findall(text):
                self.learn_names(re.split(r"[;<>()\[\]@]|,(?=[^,]*,)", _ADDRESSES.sub(";", line)))
            self.learn_names(_SENDER.findall(text))
            for name in _BEFORE.findall(text):
                words = re.findall(_WORD, name)
                self._note([word for word in words[:-2] if not word.islower()] + words[-2:])

    def learn_mailbox(self, mailbox: Iterable[str]) -> None:
        """Collect the names in addresses, also of people who may not occur."""
        for address in mailbox:
            self._note(re.findall(_WORD, address.rpartition("@")[0]))

    def learn_names(self, names: Iterable[str]) -> None:
        """Collect display names."""
        for words in (re.findall(_WORD, name) for name in names):
            self._note(words if len(words) <= 4 else [word for word in words if not word.islower()])

    def _note(self, words: list[str]) -> None:
        for word in (words := [_name(word) for word in words if not word.isdigit()]):
            self._names.setdefault(word, f"Name{len(self._names) + 1}")
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
        Without texts all ids are withheld, as anyone with the tokenizer could read them."""
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
        text, places = _meant(text)
        entities, found, paired = list(_ENTITY.finditer(text)), [], set()
        for one, other in pairwise(entities):
            pair = _name(one["word"] or ""), _name(other["word"] or "")
            if pair in self._pairs and re.fullmatch(r"[\s.,'’_-]{0,3}", text[one.end() : other.start()]):
                paired |= {one, other}
        for entity in entities:
            name = None
            if entity["domain"] or entity["x500"]:
                name = self._address(entity)
            elif entity["path"] and len(entity["path"]) > 1:
                last = "" if _HOME.fullmatch(entity["path"]) else self._replaced(entity["last"] or "")
                name = f"…/{last}"
            elif word := entity["word"]:
                known = _name(word)
                is_common = _COMMON.fullmatch(known) or (word.islower() and _IN_LOWERCASE.fullmatch(known))
                name = self._names.get(known) if entity in paired or not (len(known) < 3 or is_common) else None
            if name:
                found.append((places[entity.start()], places[entity.end()], name))
        return found

    def _address(self, match: re.Match[str]) -> str:
        local, _, domain = (written := _written(match).lower()).rpartition("@")
        if (known := self._addresses.get(written)) is None:
            host = self._domains.setdefault(domain, f"org{len(self._domains) + 1}.example")
            names = [self._names[name].lower() for name in map(_name, re.findall(_WORD, local)) if name in self._names]
            known = f"{'.'.join(names) or 'address'}@{host}"
            if known in self._addresses.values():
                known = known.replace("@", f".{len(self._addresses)}@")
            self._addresses[written] = known
        return known


def _written(address: re.Match[str]) -> str:
    """The address in its usual form; of ``/O=ACME/CN=ALEE``, the last value and the others are its two sides."""
    if path := address["x500"]:
        others, _, last = path.rpartition("=")
        return f"{last}@{others}"
    local = re.sub(r"^//.*[/?=&]", "", address["quoted"] or address["local"])  # of x.com/click?who=ann, only ann
    return f"{local}@{address['domain']}"


def _name(word: str) -> str:
    """The name in a word, in any case and without accents: klay in KLay42, muniz in Muñiz, but zq1 as it is."""
    plain = "".join(char for char in normalize("NFKD", word.casefold()) if category(char) != "Mn").replace("ı", "i")
    return name if len(name := plain.strip("0123456789")) > 2 else plain


def _meant(text: str) -> tuple[str, list[int]]:
    """The text as ``_SPELLED`` means it, never longer, and the place of each character and of the end in ``text``."""
    parts, places, done = [], [], 0
    for match in _SPELLED.finditer(text):
        if match["windows"]:
            meant = match[0].replace("\\", "/").replace(" ", "_")
        elif code := match["code"]:
            meant = chr(int(code, 16))
        elif escaped := match["escaped"]:
            meant = "\n" if escaped in "nrt" else escaped
        else:
            meant = "@" if match["at"] else "" if match["nothing"] else chr(ord(match[0]) - 0xFEE0)
        parts += [text[done : match.start()], meant]
        places += [*range(done, match.start() + len(meant))]
        done = match.end()
    return "".join([*parts, text[done:]]), [*places, *range(done, len(text) + 1)]
