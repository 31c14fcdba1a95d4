"""Defines what every source yields: a ``RawEmail``, or ``Skipped`` with a reason."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class Reading:
    """Options for reading a source."""

    allow_truncated: bool = False
    """Whether a truncated file just ends instead of raising an error."""
    max_message_bytes: int = 100 * 1024 * 1024
    """Larger messages are skipped as ``too_large``."""


@dataclass(slots=True)
class RawEmail:
    """A message as a source yields it, before any filter.

    Addresses are bare and in lower case, in the order of the header, including repeats.
    """

    message_id: str
    subject: str
    from_address: str
    to: list[str]
    cc: list[str]
    bcc: list[str]
    date: datetime | None
    """Aware, in UTC; None if the header is missing or cannot be read."""
    body: str
    file_name: str = ""
    defects: tuple[str, ...] = ()
    """Kinds of defects that were found in the message and repaired."""
    is_research: bool = field(default=True, compare=False)
    """Whether the message is from a research corpus rather than a person's own mail.

    ART-E's filters apply to a corpus unless the settings say otherwise.
    """


@dataclass(slots=True)
class Skipped:
    """A message that was seen but not yielded, and the reason."""

    reason: str
    file_name: str = ""


MADE_UP = "@made-up.emailrl>"
"""The end of a generated Message-ID."""


def made_up_id(content: bytes) -> str:
    """Return a Message-ID for a message without one, determined by its content.

    Trailing line ends do not count, because archives differ in them.
    """
    return f"<{hashlib.sha256(content.rstrip()).hexdigest()[:32]}{MADE_UP}"
