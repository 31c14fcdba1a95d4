"""Mail as it is in the wild, by the standard library's parser: MIME trees, encoded headers, any charset, HTML only."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
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


_MAX_PARAMETERS, _MAX_ENCODED = 2_048, 65_536
"""Characters that are read of a header with parameters (how to read a part) and of one with encoded words: the library
takes time squared over both."""


class _Bounded(policy.Compat32):
    """The library's way with headers, parameters without end cut."""

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        name, value = super().header_source_parse(sourcelines)
        return name, value[:_MAX_PARAMETERS] if name[:8].lower() == "content-" else value


_POLICY = _Bounded()


def parse_mime(raw: bytes, file_name: str = "") -> RawEmail | Skipped:
    """Read one message (line ends already ``\\n``) by the standard library; ``Skipped("unreadable")`` if that fails."""
    defects: list[str] = []
    try:
        message = message_from_bytes(raw, policy=_POLICY)
        values = _values(message)
        headers: dict[str, str] = {
            name: _header_text(values[name][0], defects) for name in ("message-id", "date", "subject") if name in values
        }
        people = [_addresses(", ".join(values.get(name, ()))) for name in PEOPLE]
        body = _body(message, defects)
    except Exception:  # the library raises many kinds over hostile input; the message is counted, never lost
        return Skipped("unreadable", file_name)
    return assemble(raw, file_name, headers, people, body, sorted(set(defects)))


_FOLD = re.compile(r"\n[ \t]+")


def _values(message: Message) -> dict[str, list[str]]:
    """The values of each header by lower-case name, on one line; bytes outside ASCII read as UTF-8 or else Windows-1252
    (the library, asked for them by name, would put a mark in their place)."""
    values: dict[str, list[str]] = {}
    for name, value in message.raw_items():
        raw = value.encode("utf-8", "surrogateescape")
        text = _FOLD.sub(" ", decode(raw, "utf-8", [])).replace("\n", " ").strip()
        values.setdefault(name.lower(), []).append(text)
    return values


def _header_text(text: str, defects: list[str]) -> str:
    if "=?" not in text:
        return text
    if len(text) > _MAX_ENCODED:
        defects.append("long_header")
    try:
        parts = decode_header(text[:_MAX_ENCODED])
    except HeaderParseError:
        defects.append("bad_encoded_word")
        return text
    words = [part if isinstance(part, str) else decode(part, charset or "utf-8", defects) for part, charset in parts]
    return re.sub(r"[\r\n]+", " ", "".join(words)).strip()


def _addresses(value: str) -> list[str]:
    pairs = getaddresses([clean_text(value)], **_LENIENT)
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
    """The plain-text parts that are no attachments, joined by a line end; where they say nothing, the HTML parts as
    text."""
    plain: list[str] = []
    html: list[str] = []
    for part in _shown(message):
        kind = part.get_content_type()
        if kind not in ("text/plain", "text/html"):
            if part.get_content_maintype() != "multipart":
                continue
            defects.append("bad_mime")  # without a boundary, or none of its parts to be found
            kind = "text/plain"
        payload = part.get_payload(decode=True)
        assert isinstance(payload, bytes)  # as decode=True promises for a part that is not multipart
        text = decode(payload, part.get_content_charset() or "us-ascii", defects)
        (plain if kind == "text/plain" else html).append(text)
    if html and not any(text.strip() for text in plain):
        defects.append("html_only")
        return "\n".join(html_to_text(text, defects) for text in html)
    if not plain:
        defects.append("no_text")
    return "\n".join(plain)


def _shown(message: Message) -> Iterator[Message]:
    """The parts of a message that are no containers and neither attached nor in something attached."""
    waiting = [message]
    while waiting:
        part = waiting.pop()
        if part.get_content_disposition() == "attachment" or part.get_filename():
            continue
        if part.is_multipart():
            waiting += reversed(part.get_payload())  # type: ignore[arg-type]
        else:
            yield part
