"""Defines ``RawEmail``, which every source yields, and assembles it from a message's parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from emailrl.mail.parties import clean_text
from emailrl.mail.sources.dates import parse_date

PEOPLE = ("from", "to", "cc", "bcc")


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


def assemble(
    raw: bytes, file_name: str, headers: Mapping[str, str], people: list[list[str]], body: str, defects: list[str]
) -> RawEmail:
    """Assemble a ``RawEmail`` from decoded headers, the address lists of ``PEOPLE`` and the text.

    Missing headers and NUL bytes are added to ``defects``.
    """
    date = parse_date(headers.get("date", ""))
    if date is None:
        defects.append("bad_date" if "date" in headers else "no_date")
    message_id = headers.get("message-id", "")
    if not message_id:
        message_id = made_up_id(raw)
        defects.append("no_message_id")
    if "\0" in body or any("\0" in value for value in headers.values()):
        defects.append("nul_bytes")
    sender, to, cc, bcc = people
    if not sender:
        defects.append("no_sender")
    return RawEmail(
        clean_text(message_id), clean_text(headers.get("subject", "")), sender[0] if sender else "", to, cc, bcc,
        date, clean_text(body), file_name, tuple(defects),
    )  # fmt: skip


MADE_UP = "@made-up.emailrl>"
"""The end of a generated Message-ID."""


def made_up_id(content: bytes) -> str:
    """Return a Message-ID for a message without one, determined by its content.

    Trailing line ends do not count, because archives differ in them.
    """
    return f"<{hashlib.sha256(content.rstrip()).hexdigest()[:32]}{MADE_UP}"
