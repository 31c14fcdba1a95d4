"""Consistent pseudonyms for people and addresses in a page's data.

Names come from the addresses in the data (``ann.lee@x.com`` names Ann and Lee) and from the headers of emails quoted in
bodies. Each name is replaced by the same ``Name7`` wherever it is a separate word, each domain by ``org3.example``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from emailrl.inspection.page.build import PageData
from emailrl.recording import Record

NOTICE: Final = (
    "each person and address has one pseudonym throughout. Names found in no address and no email header, phone "
    "numbers and what the emails say are unchanged: read the page before you share it."
)
Span = tuple[int, int, str]

_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)")
"""Tool results and calls are JSON in text: the n of an escaped line break is not part of the next name."""
_ADDRESS = re.compile(r"([\w+'&/=-][\w.+'&/=-]{0,63})@([\w-]+(?:\.[\w-]+)*)")
"""At most 64 characters before the @ (RFC 5321), to avoid quadratic time on one long word."""
_HEADER = re.compile(r"^[ \t>*]*(?:From|To|Cc|Bcc|Sent by|Forwarded by)[ \t]*:([^\n]{2,300})", re.I | re.M)
_CAPITALISED = re.compile(r"\b[^\W\d_a-z][^\W\d_]{2,}\b")
_WORD = re.compile(r"[^\W\d_]++(?!['’]t\b)")  # Don, but not the Don of Don't
_FOLDERS = re.compile(r"(?:^|(?<=\s))~?/(?:[^/\s]+/)*")
_SHORTEST = 3
_NO_NAMES = frozenset(
    re.findall(
        r"\w+",
        """the and for from with sent subject date monday tuesday wednesday thursday friday saturday sunday january
        february march april may june july august september october november december jan feb mar apr jun jul aug sep
        oct nov dec mailto com org net edu example javamail info sales support admin office news team all list noreply
        reply service services help contact mail email marketing press group desk mailing owner request subscribe
        announce pst cst est corp inc llc""",
    )
)
_REASON = re.compile(r"(could not be read|not a training note|not a metrics record).*", re.DOTALL)
"""Read errors may quote the line."""
_ROW_TEXTS = ("id", "group", "scenario", "question", "gold", "answer")


def redacted(data: PageData) -> PageData:
    """Return the page's data with pseudonyms; paths in the settings are cut to their last part."""
    redactor = Redactor()
    for record in data.details():
        redactor.learn({name: value for name, value in record.items() if name != "samples"})
    run = data.run | {
        name: redactor.record(_without_folders(data.run[name])) for name in ("run", "settings", "results")
    }
    run["left_out"] = [_REASON.sub(r"\1", each) for each in data.run["left_out"]]
    rows = [row | {name: redactor.record(row[name]) for name in _ROW_TEXTS} for row in data.rows]

    def details() -> Iterator[Record]:
        for record in data.details():
            yield redactor.detail(record)

    return PageData(data.run | run | {"redacted": NOTICE}, rows, details)


class Redactor:
    """Collects names with ``learn``; the other methods replace them."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._domains: dict[str, str] = {}
        self._small: Counter[str] = Counter()
        """How often a word is lowercase, minus how often it is capitalized."""

    def learn(self, value: Any) -> None:
        """Collect every address, and every name in an address or email header, from all texts of a record."""
        if isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                self.learn(each)
        elif isinstance(value, str):
            text = _unescaped(value)
            for local, domain in _ADDRESS.findall(text):
                self._domains.setdefault(domain.lower(), f"org{len(self._domains) + 1}.example")
                self._note(_WORD.findall(local))
            for line in _HEADER.findall(text):
                self._note(_CAPITALISED.findall(line))
            for word in _WORD.findall(_ADDRESS.sub(" ", text)):
                self._small[word.lower()] += 1 if word.islower() else -1

    def record(self, value: Any) -> Any:
        """Return the value with pseudonyms in all its text; field names are kept."""
        if isinstance(value, dict):
            return {key: self.record(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.record(item) for item in value]
        return _replaced(value, self.spans(value)) if isinstance(value, str) else value

    def detail(self, record: Record) -> Record:
        """Return a whole trajectory with pseudonyms."""
        texts = {name: value for name, value in record.items() if name not in ("conversation", "samples")}
        return self.record(texts) | {
            "conversation": [self._message(item) for item in record["conversation"]],
            "samples": [self.sample(sample) for sample in record["samples"]],
        }

    def sample(self, sample: Record) -> Record:
        """Return a token sequence with pseudonyms: a name's first token shows its pseudonym, and its ids are withheld.

        Without texts all ids are withheld, as anyone with the tokenizer could read them.
        """
        pieces: list[str] | None = sample["pieces"]
        if pieces is None:
            return sample | {"ids": None}
        shown, ids = list(pieces), list(sample["ids"])
        spans, next_span, begin = self.spans("".join(pieces)), 0, 0
        for at, piece in enumerate(pieces):
            end = begin + len(piece)
            while next_span < len(spans) and spans[next_span][1] <= begin:
                next_span += 1
            touched = _clipped(spans[next_span:], begin, end)
            if touched:
                ids[at], shown[at] = None, _replaced(piece, touched)
            begin = end
        return sample | {"pieces": shown, "ids": ids}

    def spans(self, text: str) -> list[Span]:
        """Return ``(begin, end, pseudonym)`` of every replacement in a text, in order."""
        text = _unescaped(text)
        addresses = [(*match.span(), self._address(match)) for match in _ADDRESS.finditer(text)]
        found, following = list(addresses), iter(addresses)
        begin, end, _ = next(following, (len(text), len(text), ""))
        for match in _WORD.finditer(text):
            while match.start() >= end < len(text):
                begin, end, _ = next(following, (len(text), len(text), ""))
            if match.start() < begin and (name := self._name(match[0])):
                found.append((*match.span(), name))
        return sorted(found)

    def _message(self, item: Record) -> Record:
        if item["role"] == "tool":
            return item | {"name": self.record(item["name"]), "text": self._result(item["text"])}
        arguments = [self._arguments(call) for call in item.get("calls", ())]
        replaced = self.record({name: value for name, value in item.items() if name not in ("role", "finish", "calls")})
        return item | replaced | ({"calls": arguments} if "calls" in item else {})

    def _result(self, text: str) -> str:
        """A tool result with pseudonyms; JSON field names are kept."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict | list):
            return str(self.record(text))
        return json.dumps(self.record(value), ensure_ascii=False, separators=(",", ":"))

    def _arguments(self, call: Record) -> Record:
        """A call as the model wrote it, with pseudonyms, also in argument names."""
        given = call["arguments"]
        if isinstance(given, dict):
            given = {self.record(key): self.record(value) for key, value in given.items()}
        return {"name": self.record(call["name"]), "arguments": given}

    def _note(self, words: Iterable[str]) -> None:
        for word in map(str.lower, words):
            if len(word) >= _SHORTEST and word not in _NO_NAMES:
                self._names.setdefault(word, f"Name{len(self._names) + 1}")

    def _name(self, word: str) -> str | None:
        """The pseudonym of a word; a name that is mostly lowercase in the text (will, mark) must be capitalized to
        match."""
        is_word = word.islower() and self._small[word] > 0
        return None if is_word else self._names.get(word.lower())

    def _address(self, match: re.Match[str]) -> str:
        local = _WORD.sub(lambda word: self._names.get(word[0].lower(), word[0]).lower(), match[1])
        return f"{local}@{self._domains.get(match[2].lower(), 'org.example')}"


def _unescaped(text: str) -> str:
    """The text with each JSON escape replaced by a line break and spaces of the same length."""
    return _ESCAPE.sub(lambda match: "\n".ljust(len(match[0])), text)


def _clipped(spans: list[Span], begin: int, end: int) -> list[Span]:
    """The spans that touch a token, relative to its start; the name is shown only where a span begins."""
    found = []
    for start, stop, name in spans:
        if start >= max(end, begin + 1):
            break
        found.append((max(start - begin, 0), min(stop, end) - begin, name if begin <= start < end else ""))
    return found


def _replaced(text: str, spans: Iterable[Span]) -> str:
    parts, done = [], 0
    for begin, end, name in spans:
        parts += [text[done:begin], name]
        done = end
    return "".join([*parts, text[done:]])


def _without_folders(value: Any) -> Any:
    """The value with every absolute path cut to its last part: folders name people too."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return _FOLDERS.sub("…/", value) if isinstance(value, str) else value
