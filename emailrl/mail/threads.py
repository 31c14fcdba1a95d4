"""Threads: emails linked by Message-ID, References and In-Reply-To, and replies without these by their subject.

A reply that names no other email belongs to the emails with its subject, as in mutt; two emails that are no replies
are not joined by equal subjects unless such a reply follows. The number of a thread depends on its emails alone, not
on their order or on the build.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np

_Numbers = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
Row = tuple[int, str, str | None, str]
"""An email's id, Message-ID, subject, and the Message-IDs it refers to, separated by spaces."""

_PREFIXES = re.compile(r"(?:\s*(?:re|aw|sv|antw|fw|fwd|wg|tr)\s*(?:\[\d+\]|\(\d+\))?\s*:)+\s*", re.IGNORECASE)
_PREFIX_CHARS = 12  # in which a reply's first prefix ends


def threads_of(rows: Iterable[Row]) -> Iterator[tuple[int, int]]:
    """Yield (id of an email, number of its thread) for the emails of threads of two or more. Memory: 16 bytes for each
    email, for each reference and for each subject of an email without any."""
    links, ids, own = array("Q"), array("q"), array("Q")  # links are pairs of nodes: Message-IDs, topics after a NUL
    topical, replied = array("Q"), array("Q")  # links of emails without references to their topics; those of replies
    for email_id, message_id, subject, references in rows:
        node = _node(message_id)
        ids.append(email_id)
        own.append(node)
        if references:
            for reference in references.split(" "):
                links.extend((node, _node(reference)))
        elif subject:
            prefixes = _PREFIXES.match(subject) if ":" in subject[:_PREFIX_CHARS] else None
            topic = subject[prefixes.end() :] if prefixes else subject
            topical.extend((node, other := _node(f"\0{topic.strip().lower()}")))
            if prefixes and topic.strip():
                replied.append(other)
    by_topic = np.frombuffer(topical, np.uint64).reshape(-1, 2)
    by_topic = by_topic[np.isin(by_topic[:, 1], np.frombuffer(replied, np.uint64))]
    pairs = np.concatenate((np.frombuffer(links, np.uint64), by_topic.ravel()))
    nodes, numbered = np.unique(pairs, return_inverse=True)
    if not nodes.size:
        return
    first = _components(numbered[::2], numbered[1::2], nodes.size)
    places = np.minimum(np.searchsorted(nodes, own), nodes.size - 1)
    linked = np.flatnonzero(nodes[places] == np.frombuffer(own, np.uint64))
    thread = first[places[linked]]
    kept = np.bincount(thread, minlength=nodes.size)[thread] > 1
    numbers = nodes[thread[kept]] >> np.uint64(1)
    yield from zip(np.frombuffer(ids, np.int64)[linked[kept]].tolist(), numbers.tolist(), strict=True)


def _components(one: _Numbers, other: _Numbers, nodes: int) -> _Numbers:
    """The lowest node that each of so many nodes is linked with, through others too. Every round halves the number of
    trees that are not done, at least."""
    root = np.arange(nodes)
    while not np.array_equal(ones := root[one], others := root[other]):
        lower = np.minimum(ones, others)
        np.minimum.at(root, ones, lower)
        np.minimum.at(root, others, lower)
        while not np.array_equal(above := root[root], root):
            root = above
    return root


def _node(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
