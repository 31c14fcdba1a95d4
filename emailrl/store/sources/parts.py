"""A message taken apart: containers, the parts in them, and the bytes of each.

The library reads parameters and uuencode. The tree is walked here, since the library's parser ends the headers at the
first odd line, knows no boundary whose header was broken, leaves encoded messages as they are, and takes time squared
over nested containers.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from email.message import Message
from email.utils import unquote
from typing import NamedTuple

from emailrl.store.sources.charsets import decode
from emailrl.store.sources.headers import Fields, read_headers
from emailrl.store.sources.signed import signed_content

_MAX_PARAMETERS = 2_048
"""Characters that are read of a header with parameters: the library takes time squared over them."""
_MAX_PARTS = 10_000
"""Parts of one container that are read."""
_MAX_DEPTH = 50
"""Containers within containers that are opened."""
_SMIME = ("application/pkcs7-mime", "application/x-pkcs7-mime")
_MESSAGES = ("rfc822", "global", "news", "partial")
_DELIMITER = re.compile(rb"^--(\S[^\n]*+)\ncontent-[a-z-]+[ \t]*:", re.IGNORECASE | re.MULTILINE)
_NO_BASE64 = re.compile(rb"[^A-Za-z0-9+/]+")
_STRAY_SHARE = 20
"""Base64 has no more than one stray sign in so many; what has more is text as it stands."""

_BASE64_LINES = re.compile(rb"\s*+((?:[A-Za-z0-9+/]++={0,2}[ \t]*+(?:\n|\Z))++)")
_BASE64_LINE = 16
"""A first line so long, without a space, is no word."""


class Part(NamedTuple):
    """A message or a part of one."""

    head: Message
    """Its content headers."""
    body: bytes
    """As it stands there."""
    depth: int = 0
    """In how many containers it is."""

    @property
    def name(self) -> str:
        """The name of the file that the part is."""
        return self.parameter("filename", "content-disposition") or self.parameter("name")

    def parameter(self, name: str, header: str = "content-type") -> str:
        """A parameter of a header; empty where there is none."""
        value = self.head.get_param(name, "", header)
        if isinstance(value, tuple):  # with a charset (RFC 2231)
            value = decode(value[2].encode("latin-1", "replace"), value[0] or "us-ascii", [])
        return unquote(value).strip()

    def decoded(self, defects: list[str]) -> bytes:
        """The body without its transfer encoding; ``bad_encoding`` is noted where that does not fit."""
        encoding = str(self.head.get("content-transfer-encoding", "")).strip("\"' \t").lower()
        if encoding.startswith("base64"):
            content, footer = _without_footer(self.body)
            if footer:
                defects.append("bad_encoding")
                return _from_base64(content, defects).rstrip() + b"\n\n" + footer
            return _from_base64(content, defects)
        if encoding.startswith("quoted"):
            return binascii.a2b_qp(self.body)
        if encoding.startswith(("x-uu", "uu")):
            return _from_uuencode(self.body)
        return self.body


def part_of(fields: Fields, body: bytes, depth: int = 0, default_type: str = "text/plain") -> Part:
    """The part of these header fields and this body."""
    head = Message()
    head.set_default_type(default_type)
    for name, value in fields:
        if name.startswith("content-") and name not in head:
            head[name] = decode(value[:_MAX_PARAMETERS], "utf-8", [])
    return Part(head, body, depth)


class Group(NamedTuple):
    """The parts of a container that may be shown, in order."""

    members: list[Part | Group]
    is_choice: bool = False
    """Whether each of them says the same (``multipart/alternative``)."""

    def parts(self) -> Iterator[Part]:
        """All parts that are no containers."""
        for member in self.members:
            if isinstance(member, Part):
                yield member
            else:
                yield from member.parts()


def shown_parts(part: Part, defects: list[str]) -> Group:
    """The tree of a message's parts without what is attached: attached containers, and attached files with a name. A
    container without parts to be found (``bad_mime`` is noted) is itself a part."""
    if part.head.get_content_type() in _SMIME and part.depth < _MAX_DEPTH:
        return Group([shown_parts(one, defects) for one in _signed_in(part, defects)])
    kind = part.head.get_content_maintype()
    attached = part.head.get_content_disposition() == "attachment"
    if kind not in ("multipart", "message"):
        return Group([] if attached and part.name else [part])
    if attached or (part.depth and part.name and part.depth < _MAX_DEPTH):
        return Group([])
    if part.depth >= _MAX_DEPTH:
        defects.append("bad_mime")
        return Group([])
    inside = _parts_in(part, defects) if kind == "multipart" else _message_in(part, defects)
    if inside is None:
        return Group([part])
    members = [shown_parts(one, defects) for one in inside]
    return Group(list(members), part.head.get_content_type() == "multipart/alternative")


def _parts_in(container: Part, defects: list[str]) -> list[Part] | None:
    default_type = "message/rfc822" if container.head.get_content_subtype() == "digest" else "text/plain"
    pieces = _pieces(container, defects)
    if pieces is None:
        return None
    if len(pieces) > _MAX_PARTS:
        defects.append("bad_mime")
    return [part_of(*read_headers(piece, defects), container.depth + 1, default_type) for piece in pieces[:_MAX_PARTS]]


def _message_in(container: Part, defects: list[str]) -> list[Part]:
    """The message in a part that holds one. Of a message in fragments the first is read, which has its headers; what is
    in the others cannot be told from one alone. Reports on delivery and the like have only fields, or else text."""
    subtype = container.head.get_content_subtype()
    if subtype == "partial":
        defects.append("partial_message")
        if container.parameter("number") != "1":
            return []
    content = container.decoded(defects).replace(b"\r\n", b"\n").lstrip(b"\n")
    fields, body = read_headers(content, defects)
    if fields and subtype not in _MESSAGES:
        return []
    return [part_of(fields, body, container.depth + 1)]


def _signed_in(part: Part, defects: list[str]) -> list[Part]:
    """The message that an opaque signature wraps; none where it is ``encrypted`` or cannot be read, as is noted."""
    content = signed_content(part.decoded(defects))
    if content is None:
        defects.append("encrypted" if part.parameter("smime-type").lower() == "enveloped-data" else "bad_mime")
        return []
    return [part_of(*read_headers(content.replace(b"\r\n", b"\n"), defects), part.depth + 1)]


def _pieces(container: Part, defects: list[str]) -> list[bytes] | None:
    """What stands between a container's delimiters; None where it has none. Where none opens a part by its boundary as
    it was folded, it is looked for in other spacing, and then any line above a content header is taken for one
    (``bad_mime`` is noted)."""
    boundary = container.parameter("boundary")
    words = boundary.split()
    pieces = None
    for candidate in dict.fromkeys((boundary, " ".join(words), "".join(words))):
        if candidate and (pieces := _split(container.body, candidate.encode())):
            return pieces
    defects.append("bad_mime")
    found = _DELIMITER.search(container.body)
    return _split(container.body, found[1].rstrip()) if found else pieces


def _split(body: bytes, boundary: bytes) -> list[bytes] | None:
    """The parts between delimiters; None where there is none."""
    text, mark = b"\n" + body, b"\n--" + boundary
    pieces: list[bytes] | None = None
    begin = None
    at = text.find(mark)
    while at >= 0:
        end = text.find(b"\n", at + len(mark))
        end = len(text) if end < 0 else end
        rest = text[at + len(mark) : end].rstrip()
        if rest in (b"", b"--"):
            pieces = [] if pieces is None else pieces
            if begin is not None:
                pieces.append(text[begin:at])
            begin = None if rest else end + 1
            if rest:
                break
        at = text.find(mark, end)
    if pieces is not None and begin is not None:
        pieces.append(text[begin:].removesuffix(b"\n"))
    return pieces


def _without_footer(body: bytes) -> tuple[bytes, bytes]:
    """Base64, and the plain text that a mailing list has put below it, if it has."""
    found = _BASE64_LINES.match(body)
    if not found or not (footer := body[found.end() :].strip()):
        return body, b""
    words = b"".join(footer.split())
    is_text = _STRAY_SHARE * (len(words) - len(_NO_BASE64.sub(b"", words))) > len(words)
    lines = found[1].split()
    is_base64 = len(lines[0]) >= _BASE64_LINE or lines[-1].endswith(b"=")
    return (found[1], footer) if is_text and is_base64 else (body, b"")


def _from_base64(body: bytes, defects: list[str]) -> bytes:
    try:
        return binascii.a2b_base64(body)
    except binascii.Error:
        defects.append("bad_encoding")
    content = b"".join(body.replace(b"=", b"").split())
    letters = _NO_BASE64.sub(b"", content)
    if _STRAY_SHARE * (len(content) - len(letters)) > len(content):
        return body
    return binascii.a2b_base64(letters[: len(letters) - (len(letters) % 4 == 1)] + b"==")


def _from_uuencode(body: bytes) -> bytes:
    part = Message()
    part["Content-Transfer-Encoding"] = "uuencode"
    part.set_payload(body.decode("ascii", "replace"))
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)  # as decode=True promises for a part that is no container
    return payload
