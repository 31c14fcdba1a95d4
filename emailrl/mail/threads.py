"""Threads: emails linked by Message-ID, References and In-Reply-To, and replies without these by their subject.

A reply that names no other email belongs to the emails with its subject, as in mutt; two emails that are no replies
are not joined by equal subjects unless such a reply follows. The number of a thread depends on its emails alone, not
on their order or on the build.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

Row = tuple[int, str, str | None, str]
"""An email's id, Message-ID, subject, and the Message-IDs it refers to, separated by spaces."""

_PREFIXES = re.compile(r"(?:\s*(?:re|aw|sv|antw|fw|fwd|wg|tr)\s*(?:\[\d+\]|\(\d+\))?\s*:)+\s*", re.IGNORECASE)


def threads_of(rows: Callable[[], Iterable[Row]]) -> Iterator[tuple[int, int]]:
    """Yield (id of an email, number of its thread) for the emails of threads of two or more. ``rows`` is called three
    times. Memory: some numbers for each email that has references or a subject with replies."""
    parents: dict[int, int] = {}
    replied: set[int] = set()  # the topics of replies without references

    def root(node: int) -> int:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = node = parents[parent]
        return node

    def join(one: int, other: int) -> None:
        first, second = sorted((root(one), root(other)))
        parents[second] = first

    for _, message_id, subject, references in rows():
        if references:
            own = _number(message_id)
            for reference in references.split(" "):
                join(own, _number(reference))
        elif subject and _PREFIXES.match(subject) and (topic := _topic(subject)):
            replied.add(_number(topic))
    for _, message_id, subject, references in rows() if replied else ():
        if not references and subject and (key := _number(_topic(subject))) in replied:
            join(_number(message_id), key)
    members = [
        (email_id, root(own))
        for email_id, message_id, _, _ in (rows() if parents else ())
        if (own := _number(message_id)) in parents
    ]
    sizes = Counter(thread for _, thread in members)
    yield from (member for member in members if sizes[member[1]] > 1)


def _topic(subject: str) -> str:
    prefixes = _PREFIXES.match(subject)
    return subject[prefixes.end() if prefixes else 0 :].strip().lower()


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
