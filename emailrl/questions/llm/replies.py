"""Parses a model's reply as a list of JSON objects: plain, fenced, wrapped, inside text or truncated."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_REPLY_CHARS = 100_000
"""Maximum characters read from a reply."""
MAX_ITEMS = 100
"""Maximum questions read per prompt."""
MAX_TRIES = 200
"""Maximum unreadable brackets in a reply, as each may take time proportional to its nesting."""

_DECODER = json.JSONDecoder()
_BEGINNING = re.compile(r'\[\s*[{\]]|\{\s*["}]')


def read_reply(text: str) -> list[Any] | None:
    """Return the unchecked objects of a reply, or None if it contains no readable JSON.

    A truncated reply yields its complete objects.
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
    """The position where the next JSON list or object may begin, or -1."""
    found = _BEGINNING.search(text, start)
    return found.start() if found else -1


def _items(value: Any) -> list[Any]:
    """The items of a list, of the list that an object wraps, or the object itself."""
    if isinstance(value, list):
        return value
    lists = [inner for inner in value.values() if isinstance(inner, list) and all(isinstance(i, dict) for i in inner)]
    if "question" not in value and lists:
        return lists[0]
    return [value] if value else []
