"""What a build leaves out: ART-E's filters and its removal of repeats, every message counted by its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeGuard

from emailrl.settings import StoreSettings
from emailrl.store.sources.message import RawEmail, Skipped, made_up_id

DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
MAX_HEADER_CHARS = 1000
"""Longer subjects are cut, longer Message-IDs and addresses not kept: agents read them with every mail."""

Listing = Callable[[str, str, str], None]
"""Called for every message skipped or mended: which of the two, why, its name in the source."""


class Mail(NamedTuple):
    """A mail as it will be stored."""

    message_id: str
    subject: str
    from_address: str
    date: str | None
    """``DATE_FORMAT``, UTC."""
    body: str
    file_name: str
    people: str
    """A line ``to address``, ``cc address`` or ``bcc address`` each, repeats removed: one text, since mails come from
    other processes and lists are slow to send."""
    id_key: bytes
    """Stands for the Message-ID."""
    content_key: bytes
    """Stands for subject, body and sender."""
    digest: bytes
    """Stands for the whole mail."""
    defects: tuple[str, ...]


def sift(email: RawEmail | Skipped, settings: StoreSettings) -> Mail | Skipped:
    """Judge a message by itself, in ART-E's order: ``long_body`` (more than ``max_body_chars``), ``many_recipients``
    (more than ``max_recipients`` in to + cc + bcc, repeats counted). What passes has its long headers mended."""
    if isinstance(email, Skipped):
        return email
    if settings.max_body_chars and len(email.body) > settings.max_body_chars:
        return Skipped("long_body", email.file_name)
    if settings.max_recipients and len(email.to) + len(email.cc) + len(email.bcc) > settings.max_recipients:
        return Skipped("many_recipients", email.file_name)
    return as_mail(_bounded(email))


def _bounded(email: RawEmail) -> RawEmail:
    """The mail without text of more than ``MAX_HEADER_CHARS`` in its headers; each mend is among its defects.

    A cut Message-ID might be another mail's and a cut address another person's: the one is made up, the other left out.
    """
    changes: dict[str, Any] = {}
    defects = []
    if len(email.subject) > MAX_HEADER_CHARS:
        changes["subject"] = email.subject[:MAX_HEADER_CHARS]
        defects.append("long_subject")
    if len(email.message_id) > MAX_HEADER_CHARS:
        changes["message_id"] = made_up_id(email.message_id.encode())
        defects.append("long_message_id")
    if max(map(len, (email.from_address, *email.to, *email.cc, *email.bcc))) > MAX_HEADER_CHARS:
        changes["from_address"] = email.from_address if len(email.from_address) <= MAX_HEADER_CHARS else ""
        for kind in ("to", "cc", "bcc"):
            changes[kind] = [address for address in getattr(email, kind) if len(address) <= MAX_HEADER_CHARS]
        defects.append("long_address")
    return replace(email, **changes, defects=(*email.defects, *defects)) if defects else email


def keys_of(message_id: str, subject: str, from_address: str, body: str) -> tuple[bytes, bytes]:
    """``id_key`` and ``content_key`` of a mail, see ``Mail``."""
    return _id_key(message_id), _content(subject, from_address, body).digest()


def _id_key(message_id: str) -> bytes:
    return blake2b(message_id.encode(), digest_size=12).digest()


def _content(subject: str, from_address: str, body: str) -> blake2b:
    return blake2b(f"{subject}\0{from_address}\0{body}".encode(), digest_size=16)


def as_mail(email: RawEmail) -> Mail:
    """The form to store, without any judgement."""
    content = _content(email.subject, email.from_address, email.body)
    content_key = content.digest()
    date = None if email.date is None else email.date.isoformat(" ")[:19]
    people = "\n".join(
        dict.fromkeys([f"to {a}" for a in email.to] + [f"cc {a}" for a in email.cc] + [f"bcc {a}" for a in email.bcc])
    )
    content.update(f"\0{email.message_id}\0{date}\0{email.file_name}\0{people}".encode())
    return Mail(
        email.message_id, email.subject, email.from_address, date, email.body, email.file_name, people,
        _id_key(email.message_id), content_key, content.digest(), email.defects,
    )  # fmt: skip


class Sieve:
    """Lets each mail through once, and counts what does not pass.

    Turned away are those ``sift`` skipped, then ``duplicate`` (subject, body and sender of a mail before; the setting
    ``dedupe``), then ``duplicate_id`` (the Message-ID of a mail before, which its unique column has no room for).
    """

    def __init__(self, *, dedupe: bool, listing: Listing | None = None) -> None:
        self.skipped: dict[str, int] = {}
        """Messages turned away, by reason."""
        self.defects: dict[str, int] = {}
        """Messages let through that had something wrong, by kind."""
        self._dedupe = dedupe
        self._listing = listing
        self._contents: set[bytes] = set()
        self._ids: set[bytes] = set()

    def passes(self, mail: Mail | Skipped) -> TypeGuard[Mail]:
        """Whether the mail is to be stored; if not, it is counted."""
        if isinstance(mail, Skipped):
            reason = mail.reason
        elif self._dedupe and mail.content_key in self._contents:
            reason = "duplicate"
        elif mail.id_key in self._ids:
            reason = "duplicate_id"
        else:
            self.remember(mail.id_key, mail.content_key)
            for defect in mail.defects:
                self.defects[defect] = self.defects.get(defect, 0) + 1
                if self._listing:
                    self._listing("mended", defect, mail.file_name)
            return True
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if self._listing:
            self._listing("skipped", reason, mail.file_name)
        return False

    def remember(self, id_key: bytes, content_key: bytes) -> None:
        """Take a mail of these keys as seen."""
        self._contents.add(content_key)
        self._ids.add(id_key)
