"""What every source hands on, and how a message's parts are put together to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from emailrl.store.parties import clean_text
from emailrl.store.sources.dates import parse_date

PEOPLE = ("from", "to", "cc", "bcc")


@dataclass(frozen=True)
class Reading:
    """How a source is to be read."""

    allow_truncated: bool = False
    """A file that breaks off ends there, and is no error."""
    max_message_bytes: int = 100 * 1024 * 1024
    """Larger messages are skipped as ``too_large``."""


@dataclass(slots=True)
class RawEmail:
    """A message as a source hands it on, before any filter.

    Addresses are bare and in lower case, in the order of the header, repeats included.
    """

    message_id: str
    subject: str
    from_address: str
    to: list[str]
    cc: list[str]
    bcc: list[str]
    date: datetime | None
    """Aware, in UTC; None where the header is missing or cannot be read."""
    body: str
    file_name: str = ""
    defects: tuple[str, ...] = ()
    """What was wrong with the message and has been mended, by kind."""
    is_research: bool = field(default=True, compare=False)
    """Whether it comes from a research corpus, to which ART-E's filters apply unless the settings say otherwise; False
    for a person's own mail."""


@dataclass(slots=True)
class Skipped:
    """A message that was seen and is not handed on, and why."""

    reason: str
    file_name: str = ""


def assemble(
    raw: bytes, file_name: str, headers: Mapping[str, str], people: list[list[str]], body: str, defects: list[str]
) -> RawEmail:
    """Make the ``RawEmail`` of decoded headers, the address lists of ``PEOPLE`` and the text; note what is missing."""
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
"""How a made-up Message-ID ends."""


def made_up_id(content: bytes) -> str:
    """A Message-ID for a message without one, the same whenever the same content is read: archives differ in the empty
    lines that end it."""
    return f"<{hashlib.sha256(content.rstrip()).hexdigest()[:32]}{MADE_UP}"
