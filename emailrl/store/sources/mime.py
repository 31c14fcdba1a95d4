"""Mail as it is in the wild, by the standard library's parser: MIME trees, encoded headers, any charset, HTML only."""

from __future__ import annotations

import inspect
import re
from email import message_from_bytes, policy
from email.errors import HeaderParseError
from email.header import decode_header
from email.message import Message
from email.utils import getaddresses

from emailrl.store.parties import clean_text
from emailrl.store.sources.markup import html_to_text
from emailrl.store.sources.message import PEOPLE, RawEmail, Skipped, assemble

# Newer patch releases give up on a whole header over one odd name unless told not to; older ones know no such option.
_LENIENT = {"strict": False} if "strict" in inspect.signature(getaddresses).parameters else {}


def parse_mime(raw: bytes, file_name: str = "") -> RawEmail | Skipped:
    """Read one message (line ends already ``\\n``) by the standard library; ``Skipped("unreadable")`` if that fails."""
    defects: list[str] = []
    try:
        message = message_from_bytes(raw, policy=policy.compat32)
        headers = {
            name: _header_text(message[name], defects) for name in ("message-id", "date", "subject") if name in message
        }
        people = [_addresses(message[name]) if name in message else [] for name in PEOPLE]
        body = _body(message, defects)
    except Exception:  # the library raises many kinds over hostile input; the message is counted, never lost
        return Skipped("unreadable", file_name)
    return assemble(raw, file_name, headers, people, body, sorted(set(defects)))


_FOLD = re.compile(r"\n[ \t]+")


def _plain(value: object) -> str:
    """A header's value on one line; bytes outside ASCII read as UTF-8 or else Windows-1252."""
    raw = str(value).encode("utf-8", "surrogateescape")
    return _FOLD.sub(" ", decode(raw, "utf-8", [])).replace("\n", " ").strip()


def _header_text(value: object, defects: list[str]) -> str:
    text = _plain(value)
    if "=?" not in text:
        return text
    try:
        parts = decode_header(text)
    except HeaderParseError:
        defects.append("bad_encoded_word")
        return text
    words = [part if isinstance(part, str) else decode(part, charset or "utf-8", defects) for part, charset in parts]
    return re.sub(r"[\r\n]+", " ", "".join(words)).strip()


def _addresses(value: object) -> list[str]:
    pairs = getaddresses([clean_text(_plain(value))], **_LENIENT)
    return ["".join(address.lower().split()) for _, address in pairs if address]


def decode(raw: bytes, charset: str, defects: list[str]) -> str:
    """Bytes to text: as the charset says, else (noted in ``defects``) as UTF-8, else as Windows-1252."""
    try:
        return raw.decode(charset)
    except (LookupError, ValueError):
        defects.append("bad_charset")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("cp1252", "replace")


def _body(message: Message, defects: list[str]) -> str:
    """The plain-text parts that are no attachments, joined by a line end; without any, the HTML parts as text."""
    plain: list[str] = []
    html: list[str] = []
    for part in message.walk():
        kind = part.get_content_type()
        if part.is_multipart() or kind not in ("text/plain", "text/html"):
            continue
        if part.get_content_disposition() == "attachment" or part.get_filename():
            continue
        payload = part.get_payload(decode=True)
        assert isinstance(payload, bytes)  # as decode=True promises for a part that is not multipart
        text = decode(payload, part.get_content_charset() or "us-ascii", defects)
        (plain if kind == "text/plain" else html).append(text)
    if plain or not html:
        return "\n".join(plain)
    defects.append("html_only")
    return "\n".join(html_to_text(text, defects) for text in html)
