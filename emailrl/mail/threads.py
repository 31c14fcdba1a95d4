"""Threads: emails linked by Message-ID, References and In-Reply-To, and replies without these by their subject.

A reply that names no other email continues the latest of its subject that is at most ``_DAYS`` older and has two
people in common with it, as Gmail asks for sender and recipient of such a reply, and nearness in time; mutt and JWZ's
algorithm join all of a subject, which would make one thread of years of ``Re: Invoice``. Two emails that are no replies
are never joined by equal subjects. The number of a thread depends on its emails alone, not on the build.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from datetime import date
from hashlib import blake2b

from emailrl.mail.database import FILLER

Row = tuple[int, str, str | None, str, str | None, str]
"""An email's id, Message-ID, subject, the Message-IDs it refers to, separated by spaces, date, and ``parties``."""

_PREFIXES = re.compile(r"(?:\s*(?:re|aw|sv|antw|fw|fwd|wg|tr)\s*(?:\[\d+\]|\(\d+\))?\s*:)+\s*", re.IGNORECASE)
_PREFIX_CHARS = 12  # in which a reply's first prefix ends
_DAYS = 30
_MOST = 30  # emails of a subject with which a reply is compared, and people of each


def threads_of(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Return (id of an email, number of its thread) for the emails of threads of two or more; rows are oldest first."""
    lower = dict[int, int]()  # from each linked node to one of its thread with a lower number, or to itself
    ids, own = array("q"), array("Q")
    recent, since = dict[str, list[tuple[int, int, str]]](), 0  # day, node and parties of emails, by subject

    def lowest(node: int) -> int:
        while (below := lower.setdefault(node, node)) != node:
            lower[node] = node = lower[below]
        return node

    def join(one: int, other: int) -> None:
        low, high = sorted((lowest(one), lowest(other)))
        lower[high] = low

    for email_id, message_id, subject, references, sent, parties in rows:
        node = _node(message_id)
        ids.append(email_id)
        own.append(node)
        for reference in references.split(" ") if references else ():
            join(node, _node(reference))
        prefixes = _PREFIXES.match(subject) if subject and ":" in subject[:_PREFIX_CHARS] else None
        topic = (subject or "")[prefixes.end() if prefixes else 0 :].strip().lower()
        if not topic or not sent:
            continue
        if (day := date.fromisoformat(sent[:10]).toordinal()) > since + _DAYS:
            recent, since = {each: those for each, those in recent.items() if those[-1][0] >= day - _DAYS}, day
        earlier = recent.setdefault(topic, [])
        if prefixes and not references and (people := _people(parties)):
            for their_day, other, theirs in earlier[: -_MOST - 1 : -1]:
                if their_day >= day - _DAYS and len(people & _people(theirs)) >= min(len(people), 2):
                    join(node, other)
                    break
        earlier.append((day, node, parties))
    threads = [(email_id, lowest(node)) for email_id, node in zip(ids, own, strict=True) if node in lower]
    emails = Counter(thread for _, thread in threads)
    return [(email_id, thread >> 1) for email_id, thread in threads if emails[thread] > 1]


def _people(parties: str) -> set[str]:
    return {*parties.removeprefix(FILLER).split(" ", _MOST)[:_MOST]} - {""}


def _node(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
