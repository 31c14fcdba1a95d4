"""What a build leaves out: ART-E's filters and its removal of repeats, every message counted by its reason."""

from __future__ import annotations

from hashlib import blake2b

from emailrl.settings import StoreSettings
from emailrl.store.sources.message import RawEmail, Skipped


class Sieve:
    """Decides over one message after the other.

    In ART-E's order: body longer than ``max_body_chars`` (``long_body``), more than ``max_recipients`` in to + cc + bcc
    with repeats counted (``many_recipients``), same subject, body and sender as a mail before (``duplicate``); then a
    Message-ID of a mail before (``duplicate_id``), which its unique column has no room for.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.skipped: dict[str, int] = {}
        """Messages left out, by reason."""
        self.defects: dict[str, int] = {}
        """Messages let through that had something wrong, by kind."""
        self._settings = settings
        self._contents: set[bytes] = set()
        self._ids: set[bytes] = set()

    def take(self, email: RawEmail | Skipped) -> bytes | None:
        """The content key of a mail that is to be stored; None, and counted, for any other."""
        if isinstance(email, Skipped):
            reason: str | None = email.reason
        else:
            key = content_key(email)
            reason = self._reason_against(email, key)
            if reason is None:
                for defect in email.defects:
                    self.defects[defect] = self.defects.get(defect, 0) + 1
                return self._remember(email, key)
        assert reason is not None
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        return None

    def remember(self, email: RawEmail) -> bytes:
        """Take a mail that is already stored as seen; its content key."""
        return self._remember(email, content_key(email))

    def _remember(self, email: RawEmail, key: bytes) -> bytes:
        self._contents.add(key)
        self._ids.add(_id_key(email))
        return key

    def _reason_against(self, email: RawEmail, key: bytes) -> str | None:
        settings = self._settings
        if settings.max_body_chars and len(email.body) > settings.max_body_chars:
            return "long_body"
        if settings.max_recipients and len(email.to) + len(email.cc) + len(email.bcc) > settings.max_recipients:
            return "many_recipients"
        if settings.dedupe and key in self._contents:
            return "duplicate"
        if _id_key(email) in self._ids:
            return "duplicate_id"
        return None


def content_key(email: RawEmail) -> bytes:
    """16 bytes that stand for subject, body and sender."""
    return blake2b(f"{email.subject}\0{email.from_address}\0{email.body}".encode(), digest_size=16).digest()


def _id_key(email: RawEmail) -> bytes:
    return blake2b(email.message_id.encode(), digest_size=12).digest()
