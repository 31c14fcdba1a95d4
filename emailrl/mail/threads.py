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
    times. Memory: two texts for each email that has references or a subject with replies."""
    parents: dict[str, str] = {}  # of Message-IDs, and of topics after a NUL
    replied: set[str] = set()  # the topics of replies without references

    def root(node: str) -> str:
        while (parent := parents.setdefault(node, node)) != node:
            parents[node] = node = parents[parent]
        return node

    def join(one: str, other: str) -> None:
        first, second = sorted((root(one), root(other)))
        parents[second] = first

    for _, message_id, subject, references in rows():
        if references:
            for reference in references.split(" "):
                join(message_id, reference)
        elif subject and (prefixes := _PREFIXES.match(subject)):
            replied.add(subject[prefixes.end() :].strip().lower())
    replied.discard("")
    for _, message_id, subject, references in rows() if replied else ():
        if not references and subject:
            prefixes = _PREFIXES.match(subject)
            topic = subject[prefixes.end() if prefixes else 0 :].strip().lower()
            if topic in replied:
                join(message_id, f"\0{topic}")
    own = ((email_id, message_id) for email_id, message_id, _, _ in (rows() if parents else ()))
    members = [(email_id, root(message_id)) for email_id, message_id in own if message_id in parents]
    sizes = Counter(node for _, node in members)
    numbers = {
        node: int.from_bytes(blake2b(node.encode(), digest_size=8).digest(), "big") >> 1
        for node, size in sizes.items()
        if size > 1
    }
    yield from ((email_id, numbers[node]) for email_id, node in members if node in numbers)
