"""An email's topic from its subject: cleaned, and checked for identifying the email."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_PREFIX = re.compile(r"^(?:\s*(?:re|fw|fwd|aw|wg|tr|sv|antw)\s*(?:\[\d+\]|\(\d+\))?\s*:\s*)+", re.IGNORECASE)
_REPLY = re.compile(r"^\s*(?:re|aw|sv|antw)\s*(?:\[\d+\]|\(\d+\))?\s*:", re.IGNORECASE)
_FORWARD = re.compile(r"^\s*(?:fw|fwd|wg|tr)\s*:", re.IGNORECASE)
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a about all am an and any are as at be been but by can do for from had has have hello here hi how i "
        "if in info is it its just me more my new no not note of off on or our out please question questions "
        "re fw fwd so some thanks thank that the their them there this to up us was we were what when where "
        "who will with would you your",
    )
)
MAX_CHARS = 70


@dataclass(frozen=True)
class Topic:
    """A subject without its prefixes."""

    text: str
    words: frozenset[str]
    """Its content words in lower case."""
    key: str
    """The same for every email of a thread."""
    is_reply: bool
    is_forward: bool

    @cached_property
    def is_telling(self) -> bool:
        """Whether the text could identify an email to a person: two content words, one of them a real word."""
        return (
            len(self.words) >= 2
            and len(self.text) <= MAX_CHARS
            and any(len(word) >= 4 and word.isalpha() for word in self.words)
            and self.text.isprintable()
            and not any(mark in self.text for mark in ('"', "=?", "<", ">", "{", "}", "|"))
        )


def topic_of(subject: str | None) -> Topic:
    """Return the topic of a subject line; a missing subject has no words."""
    raw = subject or ""
    text = " ".join(_PREFIX.sub("", raw).split()).strip(" -:;,.!?*#'")
    words = frozenset(
        word for word in (match.lower() for match in _WORD.findall(text)) if len(word) > 1 and word not in _STOP_WORDS
    )
    return Topic(text, words, text.lower(), bool(_REPLY.match(raw)), bool(_FORWARD.match(raw)))
