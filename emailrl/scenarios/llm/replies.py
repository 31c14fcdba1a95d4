"""Parses a model's reply as a list of JSON objects: plain, fenced, wrapped, inside text or truncated."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_REPLY_CHARS = 100_000
"""A longer reply is read up to here."""
MAX_ITEMS = 100
"""Maximum questions read per prompt."""
MAX_TRIES = 200
"""Brackets that begin nothing readable, after which a reply is given up: each may cost as long as it nests."""

_DECODER = json.JSONDecoder()
_BEGINNING = re.compile(r'\[\s*[{\]]|\{\s*["}]')


def read_reply(text: str) -> list[Any] | None:
    """The objects of a reply that may be questions, none of them checked; None where there is no JSON to be read.

    A truncated reply gives its complete objects.
    """
    text = re.sub(r"(?s)^.*</think>", "", text)[:MAX_REPLY_CHARS]
    items: list[Any] = []
    is_json = False
    failed = 0
    at = _next(text, 0)
    while at >= 0 and len(items) < MAX_ITEMS and failed < MAX_TRIES:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            failed += 1
            at = _next(text, at + 1)
            continue
        is_json = True
        items += _items(value)
        at = _next(text, end)
    return items[:MAX_ITEMS] if is_json else None


def _next(text: str, start: int) -> int:
    """Where the next JSON list or object may begin; -1 where none does."""
    found = _BEGINNING.search(text, start)
    return found.start() if found else -1


def _items(value: Any) -> list[Any]:
    """A list's members, the members of the list that an object wraps, or the object itself."""
    if isinstance(value, list):
        return value
    lists = [inner for inner in value.values() if isinstance(inner, list) and all(isinstance(i, dict) for i in inner)]
    if "question" not in value and lists:
        return lists[0]
    return [value] if value else []
