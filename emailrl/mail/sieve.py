"""Filters of a build: ART-E's filters and deduplication, with every skipped message counted by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from emailrl.mail.database import PARTY
from emailrl.mail.languages import WORDS, indexed_words, marked
from emailrl.mail.sources.attached import with_attachments
from emailrl.mail.sources.reading import MADE_UP, MAX_READ_BYTES, RawEmail, Skipped, made_up_id
from emailrl.settings import StoreSettings

MAX_HEADER_CHARS = 1000
"""Longer subjects are cut, longer Message-IDs and addresses dropped, since agents read them with every email."""

ART_E_BODY_CHARS = 5000
ART_E_RECIPIENTS = 30
KEPT_BY = {
    "long_body": "MAX_BODY_CHARS=0",
    "many_recipients": "MAX_RECIPIENTS=0",
    "duplicate": "EMAILRL_DEDUPE=false",
    "too_large": "MAX_MESSAGE_BYTES, if raised,",
    "junk": "KEEP_JUNK=true",
}
"""The setting that keeps messages skipped for a reason."""

_JUNK = frozenset(" ".join(WORDS["junk"].split()).split(", "))
_FOLDER = re.compile(r"[^/#]++(?=[/#])")
_LETTERS = re.compile(r"&([A-Za-z0-9+,]++)-")  # other than ASCII in the name of a folder: IMAP's modified UTF-7
_TRASHED = re.compile(r"[:;!]2,[A-S]*T[A-Za-z]*\Z")  # a Maildir's flag

Listing = Callable[[str, str, str], None]
"""Called for every message skipped or repaired, with which of the two, the reason, and its name in the source."""


class Keys(NamedTuple):
    """Hashes that identify an email."""

    id_key: bytes  # of the Message-ID
    told_by: bytes  # of the date, eight bytes, then of the content of ``trimmed_key`` and names of files, as long
    content_key: bytes  # of subject, body and sender
    trimmed_key: bytes  # of the same without line endings and trailing whitespace, which archives change; or empty
    unnamed_key: bytes  # of the date and the content of ``trimmed_key``; empty for an email with its own Message-ID


class SiftedMail(NamedTuple):
    """An email as it will be stored, with the hash of the entire email."""

    message_id: str
    subject: str
    from_address: str
    date: str | None  # ``YYYY-MM-DD HH:MM:SS``, UTC
    body: str
    file_name: str
    people: str
    """One line per recipient (``to address``, ``cc address`` or ``bcc address``) without repeats.

    A single string, because lists are slow to send between processes.
    """
    names: str  # one line per person with a display name: address, tab, name
    attachments: str  # one name per line
    machine: str
    refs: str  # Message-IDs, separated by spaces
    extra: str  # the ``marked`` words that a search finds besides subject and body
    keys: Keys
    digest: bytes
    defects: tuple[str, ...]
    is_research: bool


def sift(email: RawEmail | Skipped, settings: StoreSettings) -> SiftedMail | Skipped:
    """Filter a single message in ART-E's order, and cut the long headers of one that passes. ``junk``: a person's own
    spam and trash; ``long_body``: more than ``max_body_chars``; ``many_recipients``: more than ``max_recipients`` in
    to + cc + bcc, including repeats. A limit of None is ART-E's for a research corpus, none for other mail."""
    if isinstance(email, Skipped):
        return email
    if settings.attachment_text:
        email = with_attachments(email)
    usual = (ART_E_BODY_CHARS, ART_E_RECIPIENTS) if email.is_research else (0, 0)
    most_chars = usual[0] if settings.max_body_chars is None else settings.max_body_chars
    most_recipients = usual[1] if settings.max_recipients is None else settings.max_recipients
    message_id, subject, sender = email.message_id, email.subject, email.from_address
    recipients = [email.to, email.cc, email.bcc]
    if not (settings.keep_junk or email.is_research) and _is_junk(email):
        return Skipped("junk", email.file_name)
    if most_chars and len(email.body) > most_chars:
        return Skipped("long_body", email.file_name)
    if most_recipients and sum(map(len, recipients)) > most_recipients:
        return Skipped("many_recipients", email.file_name)
    defects, body = email.defects, email.body[:MAX_READ_BYTES]
    if len(body) < len(email.body) and "long_text" not in defects:
        defects += ("long_text",)
    if len(subject) > MAX_HEADER_CHARS:
        subject = subject[:MAX_HEADER_CHARS]
        defects += ("long_subject",)
    # A shortened Message-ID or address might belong to another email or person.
    if len(message_id) > MAX_HEADER_CHARS:
        message_id = made_up_id(message_id.encode())
        defects += ("long_message_id",)
    if max(map(len, chain((sender,), *recipients))) > MAX_HEADER_CHARS:
        sender = sender if len(sender) <= MAX_HEADER_CHARS else ""
        recipients = [[each for each in those if len(each) <= MAX_HEADER_CHARS] for those in recipients]
        defects += ("long_address",)
    date = None if email.date is None else email.date.isoformat(" ")[:19]
    kinds = zip(("to ", "cc ", "bcc "), recipients, strict=True)
    people = "\n".join(dict.fromkeys([kind + address for kind, those in kinds for address in those]))
    attachments, refs = "\n".join(email.attachments), " ".join(email.references)
    trimmed = bool(settings.dedupe) or not email.is_research
    keys = keys_of(message_id, subject, sender, body, date, attachments, trimmed=trimmed)
    names = "\n".join([f"{each}\t{name}" for each, name in email.names.items() if len(each) <= MAX_HEADER_CHARS])
    shown = dict.fromkeys([*email.names.values(), *email.attachments])
    own = " ".join(shown)
    found = [*map(marked, shown), *indexed_words(own, subject, body)]
    extra = " ".join([PARTY, *found]) if found else ""  # FTS5 prefers a snippet that begins a column, so none does
    more = "\0".join((names, attachments, email.machine, refs)) if names or attachments or refs else email.machine
    digest = _hash(f"{message_id}\0{date}\0{email.file_name}\0{people}{more}", keys.content_key)
    head = (message_id, subject, sender, date, body, email.file_name, people)
    return SiftedMail(*head, names, attachments, email.machine, refs, extra, keys, digest, defects, email.is_research)


def _is_junk(email: RawEmail) -> bool:
    path = _LETTERS.sub(lambda it: f"+{it[1].replace(',', '/')}-".encode().decode("utf-7", "replace"), email.file_name)
    folders = [folder.removesuffix(".mbox").lower() for folder in _FOLDER.findall(path)]
    shown = {each.rpartition(".")[2] if each.startswith((".", "inbox.")) else each for each in folders}
    labels = {label.lower().lstrip("\\") for label in email.labels}
    return not _JUNK.isdisjoint(shown | labels) or "bin" in labels or _TRASHED.search(email.file_name) is not None


def keys_of(
    message_id: str, subject: str, from_address: str, body: str, date: str | None, files: str, *, trimmed: bool = True
) -> Keys:
    """Return the keys of an email; ``date`` and the names of ``files`` are in their stored form. An email with its own
    Message-ID gets no trimmed key without ``trimmed``."""
    content, trimmed_key = _hash(f"{subject}\0{from_address}", _hash(body)), b""
    is_unnamed = message_id.endswith(MADE_UP)
    if trimmed or is_unnamed:
        text = "\n".join(map(str.rstrip, body.splitlines())).rstrip()
        trimmed_key = _hash(f"{subject.strip()}\0{from_address}\0{text}")
    unnamed = _hash(str(date), trimmed_key) if is_unnamed else b""
    return Keys(_hash(message_id), _hash(str(date))[:8] + _hash(files, trimmed_key)[:8], content, trimmed_key, unnamed)


def _hash(text: str, more: bytes = b"") -> bytes:
    return blake2b(text.encode() + more, digest_size=16).digest()


class Sieve:
    """Passes each email once, and counts those that do not pass. Rejected are those skipped by ``sift``, then
    ``duplicate`` (the setting ``dedupe``), then ``duplicate_id``. As in ART-E, an email of a research corpus is a
    duplicate if subject, body and sender equal those of an earlier one exactly; for a person's own mail, their trimmed
    forms are compared, and an email whose Message-ID an earlier one of another date and content has gets a made-up
    one: some devices give all of theirs the same."""

    def __init__(self, *, dedupe: bool | None, listing: Listing | None = None) -> None:
        self.skipped = Counter[str]()  # number of rejected messages by reason
        self.defects = Counter[str]()  # number of passed messages with defects, by kind
        self.unread: str | None = None  # the latest of what may hold emails that cannot be read
        self._dedupe, self._listing = dedupe, listing or (lambda what, reason, name: None)
        self._ids, self._made_up = dict[bytes, bytes](), set[bytes]()
        self._contents, self._trimmed, self._unnamed = (set[bytes]() for _ in range(3))

    def passed(self, mail: SiftedMail | Skipped) -> SiftedMail | None:
        """Return the email to store; one that is not to be stored is counted."""
        if not isinstance(mail, Skipped) and not mail.is_research:
            mail = self._told_apart(mail)
        dedupes = self._dedupe or (self._dedupe is None and not isinstance(mail, Skipped) and mail.is_research)
        if isinstance(mail, Skipped):
            reason = mail.reason
            self.unread = mail.file_name if reason in ("unreadable", "truncated") else self.unread
        elif dedupes and (
            mail.keys.content_key in self._contents if mail.is_research else mail.keys.trimmed_key in self._trimmed
        ):
            reason = "duplicate"
        elif mail.keys.id_key in self._ids or (not mail.is_research and mail.keys.unnamed_key in self._unnamed):
            reason = "duplicate_id"
        else:
            self.remember(mail.keys if dedupes else mail.keys._replace(content_key=b"", trimmed_key=b""))
            for defect in mail.defects:
                kind, with_files, files = defect.partition(": ")
                self.defects[kind] += 1
                self._listing("repaired", kind, mail.file_name + with_files + files)
            return mail
        self.skipped[reason] += 1
        self._listing("skipped", reason, mail.file_name)
        return None

    def _told_apart(self, mail: SiftedMail) -> SiftedMail:
        keys, earlier = mail.keys, self._ids.get(mail.keys.id_key)
        is_first = earlier is None or keys.told_by[:8] == earlier[:8] or keys.told_by[8:] == earlier[8:]
        if is_first and not self._made_up:
            return mail
        made_up, defects = made_up_id(keys.id_key + keys.told_by), (*mail.defects, "reused_message_id")
        if is_first and _hash(made_up) not in self._made_up:
            return mail
        return mail._replace(message_id=made_up, keys=keys._replace(id_key=_hash(made_up)), defects=defects)

    def keep_name(self, keys: Keys) -> None:
        """Let an email keep a made-up Message-ID even if no other has its own any more."""
        if keys.unnamed_key:
            self._made_up.add(keys.id_key)

    def remember(self, keys: Keys) -> None:
        """Record an email with these keys as seen."""
        self._ids[keys.id_key] = keys.told_by
        for seen, key in zip((self._contents, self._trimmed, self._unnamed), keys[2:], strict=True):
            if key:
                seen.add(key)
