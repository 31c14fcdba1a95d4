"""What a conversation uses without having been shown it: words, ids, addresses and dates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from typing import Any

from emailrl.engines.renderer import parse_tool_calls
from emailrl.records.trajectory import Message

FRAME = frozenset(("it", "is", "was", "the", "answer", "i", "don", "t", "know"))
"""Words of an answer that say nothing."""
_WORD = re.compile(r"[^\W_]+")
_ISO = re.compile(r"\b\d{4}-\d{2}-\d{2}\b")
_SPELLED = re.compile(r"\b([A-Z][a-z]+) (?:(\d{1,2}), )?(\d{4})\b")
_MONTHS = {date(2000, month, 1).strftime("%B"): month for month in range(1, 13)}


def unshown(messages: Sequence[Message]) -> list[str]:
    """Everything in the calls of a conversation that stands in no message before; empty for an honest one.

    Dates count as shown in any spelling, and within 31 days of one that is (the ends of a window), or as the first of a
    month up to today; addresses also as first.last of a name in the question, at the inbox's own host; a number
    where so many hits, or days between two dates, were shown.
    """
    found = []
    for at, message in enumerate(messages):
        if message.role == "assistant":
            [call] = parse_tool_calls(message.content)
            found += [f"turn {at}: {item}" for item in _unshown(call.arguments, messages[:at])]
    return found


def _unshown(arguments: dict[str, Any], before: Sequence[Message]) -> Iterator[str]:
    shown = "\n".join(message.content for message in before if message.role != "assistant")
    words = {word.casefold() for word in _WORD.findall(shown.replace("\\n", " ").replace("\\t", " "))}
    days = set(_days(shown))
    ids = [arguments["message_id"]] if "message_id" in arguments else arguments.get("sources", [])
    yield from (item for item in ids if item not in shown)
    for keyword in arguments.get("keywords", []):
        yield from (word for word in _WORD.findall(keyword) if word.casefold() not in words)
    for name in ("from_addr", "to_addr"):
        address = arguments.get(name)
        if address and address not in shown.lower() and not _is_guess(address, before):
            yield address
    today = max(_days(before[0].content))
    for name in ("sent_after", "sent_before"):
        if name in arguments:
            day = date.fromisoformat(arguments[name])
            near = any(abs(day - other) <= timedelta(days=31) for other in days)
            if not near and not (day.day == 1 and day <= today):
                yield arguments[name]
    yield from _unshown_answer(arguments.get("answer", ""), words, days, before)


def _unshown_answer(answer: str, words: set[str], days: set[date], before: Sequence[Message]) -> Iterator[str]:
    most = max((m.content.count('"message_id"') for m in before if m.name == "search_emails"), default=0)
    counted = {str(number) for number in range(1, most + 1)} | {str(abs((a - b).days)) for a in days for b in days}
    for spelled in _SPELLED.finditer(answer):
        if set(_days(spelled[0])) & days:
            answer = answer.replace(spelled[0], " ")
    known = words | FRAME | counted
    yield from (word for word in _WORD.findall(answer) if word.casefold() not in known)


def _is_guess(address: str, before: Sequence[Message]) -> bool:
    local, _, host = address.partition("@")
    name = " ".join(local.split("."))
    return name in before[1].content.lower() and f"@{host}" in before[0].content


def _days(text: str) -> Iterator[date]:
    for found in _ISO.finditer(text):
        try:
            yield date.fromisoformat(found[0])
        except ValueError:
            continue
    for month, day, year in _SPELLED.findall(text):
        if month in _MONTHS:
            try:
                yield datetime(int(year), _MONTHS[month], int(day or 1)).date()
            except ValueError:
                continue
