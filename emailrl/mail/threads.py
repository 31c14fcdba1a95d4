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
_PREFIX_CHARS = 12  # in which a reply's first prefix ends


def threads_of(rows: Callable[[], Iterable[Row]]) -> Iterator[tuple[int, int]]:
    """Yield (id of an email, number of its thread) for the emails of threads of two or more. ``rows`` is called
    twice. Memory: two texts for each email that has references or a subject with replies."""
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
        elif subject and ":" in subject[:_PREFIX_CHARS] and _PREFIXES.match(subject):
            replied.add(_topic(subject))
    replied.discard("")
    found = []
    for email_id, message_id, subject, references in rows() if parents or replied else ():
        if subject and not references and (topic := _topic(subject)) in replied:
            join(message_id, f"\0{topic}")
        if message_id in parents:
            found.append((email_id, message_id))
    members = [(email_id, root(message_id)) for email_id, message_id in found]
    sizes = Counter(node for _, node in members)
    numbers = {
        node: int.from_bytes(blake2b(node.encode(), digest_size=8).digest(), "big") >> 1
        for node, size in sizes.items()
        if size > 1
    }
    yield from ((email_id, numbers[node]) for email_id, node in members if node in numbers)


def _topic(subject: str) -> str:
    if ":" in subject[:_PREFIX_CHARS] and (prefixes := _PREFIXES.match(subject)):
        subject = subject[prefixes.end() :]
    return subject.strip().lower()
