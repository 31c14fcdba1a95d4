"""Filters of a build: ART-E's filters and deduplication, with every skipped message counted by reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeGuard

from emailrl.settings import StoreSettings
from emailrl.store.sources.raw_email import MADE_UP, RawEmail, Skipped, made_up_id

DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
MAX_HEADER_CHARS = 1000
"""Longer subjects are cut, longer Message-IDs and addresses not kept: agents read them with every mail."""

ART_E_BODY_CHARS = 5000
ART_E_RECIPIENTS = 30
KEPT_BY = {
    "long_body": "MAX_BODY_CHARS=0",
    "many_recipients": "MAX_RECIPIENTS=0",
    "duplicate": "EMAILRL_DEDUPE=false",
    "too_large": "a larger MAX_MESSAGE_BYTES",
}
"""The setting that keeps messages skipped for a reason."""

Listing = Callable[[str, str, str], None]
"""Called for every message skipped or mended: which of the two, why, its name in the source."""


class Keys(NamedTuple):
    """The keys that identify an email."""

    id_key: bytes
    """Stands for the Message-ID."""
    content_key: bytes
    """Stands for subject, body and sender."""
    trimmed_key: bytes
    """The same without what archives add to a mail or take from it as they pass it on: line ends, and white space at
    the ends of lines and of the whole."""
    unnamed_key: bytes
    """Stands for the date and what ``trimmed_key`` stands for; empty for a mail with a Message-ID of its own."""


class SiftedMail(NamedTuple):
    """An email as it will be stored."""

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
    keys: Keys
    digest: bytes
    """Stands for the whole mail."""
    defects: tuple[str, ...]
    is_research: bool


def sift(email: RawEmail | Skipped, settings: StoreSettings) -> SiftedMail | Skipped:
    """Judge a message by itself, in ART-E's order: ``long_body`` (more than ``max_body_chars``), ``many_recipients``
    (more than ``max_recipients`` in to + cc + bcc, repeats counted). Where a setting is None, ART-E's numbers hold for
    a research corpus, and none for a person's own mail. What passes has its long headers mended."""
    if isinstance(email, Skipped):
        return email
    max_body_chars = _limit(settings.max_body_chars, ART_E_BODY_CHARS, email)
    if max_body_chars and len(email.body) > max_body_chars:
        return Skipped("long_body", email.file_name)
    max_recipients = _limit(settings.max_recipients, ART_E_RECIPIENTS, email)
    if max_recipients and len(email.to) + len(email.cc) + len(email.bcc) > max_recipients:
        return Skipped("many_recipients", email.file_name)
    return as_mail(_bounded(email))


def _limit(setting: int | None, of_art_e: int, email: RawEmail) -> int:
    """The limit that holds for a mail; 0 is none."""
    if setting is not None:
        return setting
    return of_art_e if email.is_research else 0


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


def keys_of(message_id: str, subject: str, from_address: str, body: str, date: str | None) -> Keys:
    """The keys of a mail; the date as it is stored."""
    trimmed_body = "\n".join(map(str.rstrip, body.splitlines())).rstrip()
    trimmed = f"{subject.strip()}\0{from_address}\0{trimmed_body}"
    return Keys(
        blake2b(message_id.encode(), digest_size=12).digest(),
        _hash(f"{subject}\0{from_address}\0{body}"),
        _hash(trimmed),
        _hash(f"{date}\0{trimmed}") if message_id.endswith(MADE_UP) else b"",
    )


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def as_mail(email: RawEmail) -> SiftedMail:
    """The form to store, without any judgement."""
    date = None if email.date is None else email.date.isoformat(" ")[:19]
    people = "\n".join(
        dict.fromkeys([f"to {a}" for a in email.to] + [f"cc {a}" for a in email.cc] + [f"bcc {a}" for a in email.bcc])
    )
    keys = keys_of(email.message_id, email.subject, email.from_address, email.body, date)
    content = f"{email.subject}\0{email.from_address}\0{email.body}"
    digest = _hash(f"{content}\0{email.message_id}\0{date}\0{email.file_name}\0{people}")
    return SiftedMail(
        email.message_id, email.subject, email.from_address, date, email.body, email.file_name, people, keys,
        digest, email.defects, email.is_research,
    )  # fmt: skip


class Sieve:
    """Lets each mail through once, and counts what does not pass.

    Turned away are those ``sift`` skipped, then ``duplicate`` (the setting ``dedupe``), then ``duplicate_id`` (the
    Message-ID of a mail before, which its unique column has no room for). A mail of a research corpus is a duplicate,
    as for ART-E, where subject, body and sender of a mail before are the same to the letter; a person's own mail, which
    comes twice from two archives, where their trimmed forms are.
    """

    def __init__(self, *, dedupe: bool | None, listing: Listing | None = None) -> None:
        self.skipped: dict[str, int] = {}
        """Messages turned away, by reason."""
        self.defects: dict[str, int] = {}
        """Messages let through that had something wrong, by kind."""
        self._dedupe = dedupe
        self._listing = listing
        self._contents: set[bytes] = set()
        self._trimmed: set[bytes] = set()
        self._unnamed: set[bytes] = set()
        self._ids: set[bytes] = set()

    def passes(self, mail: SiftedMail | Skipped) -> TypeGuard[SiftedMail]:
        """Whether to store the email; if not, it is counted."""
        if isinstance(mail, Skipped):
            reason = mail.reason
        elif self._is_repeat(mail):
            reason = "duplicate"
        elif mail.keys.id_key in self._ids or self._came_unnamed(mail):
            reason = "duplicate_id"
        else:
            self.remember(mail.keys)
            for defect in mail.defects:
                self.defects[defect] = self.defects.get(defect, 0) + 1
                if self._listing:
                    self._listing("mended", defect, mail.file_name)
            return True
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if self._listing:
            self._listing("skipped", reason, mail.file_name)
        return False

    def remember(self, keys: Keys) -> None:
        """Take a mail of these keys as seen."""
        self._ids.add(keys.id_key)
        self._contents.add(keys.content_key)
        self._trimmed.add(keys.trimmed_key)
        if keys.unnamed_key:
            self._unnamed.add(keys.unnamed_key)

    def _is_repeat(self, mail: SiftedMail) -> bool:
        if not (mail.is_research if self._dedupe is None else self._dedupe):
            return False
        keys = mail.keys
        return keys.content_key in self._contents if mail.is_research else keys.trimmed_key in self._trimmed

    def _came_unnamed(self, mail: SiftedMail) -> bool:
        return not mail.is_research and mail.keys.unnamed_key in self._unnamed
