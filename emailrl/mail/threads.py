"""Threads: emails linked by Message-ID, References and In-Reply-To, and replies without these by their subject.

A reply that names no other email belongs to the emails with its subject, as in mutt; two emails that are no replies
are not joined by equal subjects unless such a reply follows. The number of a thread depends on its emails alone, not
on their order or on the build.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

Row = tuple[int, str, str | None, str]
"""An email's id, Message-ID, subject, and the Message-IDs it refers to, separated by spaces."""

_PREFIXES = re.compile(r"(?:\s*(?:re|aw|sv|antw|fw|fwd|wg|tr)\s*(?:\[\d+\]|\(\d+\))?\s*:)+\s*", re.IGNORECASE)
_PREFIX_CHARS = 12  # in which a reply's first prefix ends


def threads_of(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Return (id of an email, number of its thread) for the emails of threads of two or more."""
    lower = dict[int, int]()  # from each linked node to one of its thread with a lower number, or to itself
    ids, own, topical, replied = array("q"), array("Q"), array("Q"), set[int]()

    def lowest(node: int) -> int:
        while (below := lower.setdefault(node, node)) != node:
            lower[node] = node = lower[below]
        return node

    def join(one: int, other: int) -> None:
        low, high = sorted((lowest(one), lowest(other)))
        lower[high] = low

    for email_id, message_id, subject, references in rows:
        node = _node(message_id)
        ids.append(email_id)
        own.append(node)
        if references:
            for reference in references.split(" "):
                join(node, _node(reference))
        elif subject:
            prefixes = _PREFIXES.match(subject) if ":" in subject[:_PREFIX_CHARS] else None
            topic = subject[prefixes.end() :] if prefixes else subject
            topical.extend((node, shared := _node(f"\0{topic.strip().lower()}")))
            if prefixes and topic.strip():
                replied.add(shared)
    for node, shared in zip(topical[::2], topical[1::2], strict=True):
        if shared in replied:
            join(node, shared)
    threads = [(email_id, lowest(node)) for email_id, node in zip(ids, own, strict=True) if node in lower]
    emails = Counter(thread for _, thread in threads)
    return [(email_id, thread >> 1) for email_id, thread in threads if emails[thread] > 1]


def _node(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
