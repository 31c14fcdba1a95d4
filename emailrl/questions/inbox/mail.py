"""One email as both question generators see it: its topic, its own text, and the facts stated in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from functools import cached_property

from emailrl.facts.mentions import Extractor, Mention

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
_QUOTE_BEGINS = re.compile(
    r"""^[ \t]*(?:
        -{2,}\s*original\ message          # Outlook
      | -{4,}\s*forwarded                  # Lotus Notes
      | -{4,}\s*$ (?=\s*from:)
      | >                                  # quoted line
      | (?:from|to|sent|cc|subject):[ \t]  # headers of a quoted mail
      | .{6,100}\b(?:wrote|writes):\s*$
      | .{0,80}\d{1,2}/\d{1,2}/\d{2,4}\ \d{1,2}:\d{2}(?::\d{2})?(?:\ ?[ap]m)?\s*$   # Lotus Notes: who wrote it when
      | (?:please\ )?respond\ to\ \S+@
    )""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
MAX_TOPIC_CHARS = 70


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
            and len(self.text) <= MAX_TOPIC_CHARS
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


def own_text(body: str) -> str:
    """Return the text above the first quoted or forwarded part."""
    found = _QUOTE_BEGINS.search(body)
    return body[: found.start()] if found else body


def spell_day(day: date) -> str:
    """Return a date as ``May 3, 2001``."""
    return f"{day:%B} {day.day}, {day.year}"


@dataclass(eq=False)
class Mail:
    """One email; derived parts are computed once, even if several mailboxes hold it."""

    message_id: str
    subject: str
    sender: str
    sent_at: str
    """``YYYY-MM-DD HH:MM:SS`` UTC."""
    body: str
    to: list[str]
    cc: list[str]
    bcc: list[str]

    @cached_property
    def day(self) -> date:
        """The date, UTC."""
        return date.fromisoformat(self.sent_at[:10])

    @property
    def addresses(self) -> set[str]:
        """All addresses of the email, including the sender."""
        return {self.sender, *self.to, *self.cc, *self.bcc}

    @cached_property
    def topic(self) -> Topic:
        return topic_of(self.subject)

    @cached_property
    def own(self) -> str:
        """The body without what it quotes."""
        return own_text(self.body)

    def only_fact(self, extractor: Extractor) -> Mention | None:
        """Return the only fact of a kind in the body if the email itself states it, else None."""
        if extractor not in self._facts:
            self._facts[extractor] = extractor.only(self.own, self.body)
        return self._facts[extractor]

    @cached_property
    def _facts(self) -> dict[Extractor, Mention | None]:
        return {}
