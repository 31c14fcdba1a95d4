"""Takes a message apart: containers, their parts, and the bytes of each.

The tree is walked here, because the standard library's parser ends the headers at the first odd line, misses boundaries
whose header is broken, leaves encoded messages undecoded, and takes quadratic time on nested containers.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Sequence
from email.message import Message
from email.utils import unquote
from typing import NamedTuple

from emailrl.mail.sources.text import decode

Fields = list[tuple[str, bytes]]  # header fields in order: name in lower case, value on one line

_FIELD = re.compile(rb"([!-9;-~]++)[ \t]*:(.*)", re.DOTALL)
_ODD_FIELD = re.compile(rb"[^\s:]++[ \t]*:")
_KNOWN_FIELD = re.compile(
    rb"^(?:from|to|cc|bcc|date|subject|message-id|received|return-path|reply-to|in-reply-to|references|sender"
    rb"|delivered-to|mime-version|content-[a-z-]+|x-[a-z0-9-]+|dkim-signature|list-[a-z]+)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_MAX_PARAMETERS = 2_048  # characters read from a header with parameters, which take the library quadratic time
_MAX_PARTS = 10_000  # read from one container
_MAX_DEPTH = 50  # of nested containers
_SMIME = ("application/pkcs7-mime", "application/x-pkcs7-mime")
_DELIMITER = re.compile(rb"^--(\S[^\n]*+)\ncontent-[a-z-]+[ \t]*:", re.IGNORECASE | re.MULTILINE)
_NO_BASE64 = re.compile(rb"[^A-Za-z0-9+/]+")
_STRAY_SHARE = 20  # Base64 has at most one stray character in this many; content with more is plain text
_BASE64_LINES = re.compile(rb"\s*+((?:[A-Za-z0-9+/]++={0,2}[ \t]*+(?:\n|\Z))++)")
_BASE64_LINE = 16  # a first line of this length without a space is Base64, not a word
_DATA = bytes.fromhex("06092a864886f70d010701")
"""Object identifier of plain content; in signed data the content follows, in encrypted data a cipher."""
_CONTENT, _OCTETS, _PIECES = 0xA0, 0x04, 0x24


def read_headers(raw: bytes, defects: list[str]) -> tuple[Fields, bytes]:
    """Return the header fields of a message or part, and its body.

    A line that is not a field adds ``bad_header`` to ``defects``; it continues the address list above it, is left out
    if a known field follows, or else begins the body.
    """
    if raw[:1] == b"\n":
        return [], raw[1:]
    head, _, body = raw.partition(b"\n\n")
    last_field = max((match.start() for match in _KNOWN_FIELD.finditer(head)), default=-1)
    fields: list[tuple[str, list[bytes]]] = []
    at, dropping = 0, False
    for line in head.split(b"\n"):
        if line[:1] in (b" ", b"\t"):
            if fields and not dropping:
                fields[-1][1].append(line.lstrip(b" \t"))
        elif field := _FIELD.fullmatch(line):
            fields.append((field[1].decode("ascii").lower(), [field[2]]))
            dropping = False
        elif line and not line.startswith((b"From ", b">From ")):
            defects.append("bad_header")
            if at > last_field and not _ODD_FIELD.match(line):
                body = raw[at:]
                break
            dropping = not (fields and fields[-1][1][-1].rstrip().endswith((b",", b";")))
            if not dropping:
                fields[-1][1].append(line)
        at += len(line) + 1
    return [(name, b" ".join(lines).strip()) for name, lines in fields], body


class Part(NamedTuple):
    """A message or a part of one: its content headers, its still encoded body, and the number of its containers."""

    head: Message
    body: bytes
    depth: int = 0

    @property
    def name(self) -> str:
        """The part's file name."""
        return self.parameter("filename", "content-disposition") or self.parameter("name")

    def parameter(self, name: str, header: str = "content-type") -> str:
        """Return a parameter of a header, or an empty string."""
        value = self.head.get_param(name, "", header)
        if isinstance(value, tuple):  # with a charset (RFC 2231)
            value = decode(value[2].encode("latin-1", "replace"), value[0] or "us-ascii", [])
        return unquote(value).strip()

    def decoded(self, defects: list[str]) -> bytes:
        """Return the body without its transfer encoding; if that is wrong, ``bad_encoding`` is added to ``defects``."""
        encoding = str(self.head.get("content-transfer-encoding", "")).strip("\"' \t").lower()
        if encoding.startswith("base64"):
            encoded, footer = _without_footer(self.body)
            content = _from_base64(encoded, defects)
            if footer:
                defects.append("bad_encoding")
                return content.rstrip() + b"\n\n" + footer
            return content
        if encoding.startswith("quoted"):
            return binascii.a2b_qp(self.body)
        if encoding.startswith(("x-uu", "uu")):
            part = Message()
            part["Content-Transfer-Encoding"] = "uuencode"
            part.set_payload(self.body.decode("ascii", "replace"))
            payload = part.get_payload(decode=True)
            assert isinstance(payload, bytes)  # as decode=True promises for a part that is not a container
            return payload
        return self.body


def part_of(fields: Fields, body: bytes, depth: int = 0, default_type: str = "text/plain") -> Part:
    """Return the part made of these header fields and this body."""
    head = Message()
    head.set_default_type(default_type)
    for name, value in fields:
        if name.startswith("content-") and name not in head:
            head[name] = decode(value[:_MAX_PARAMETERS], "utf-8", [])
    return Part(head, body, depth)


class Group(NamedTuple):
    """The displayable parts of a container, in order; ``is_choice`` if they are alternatives of the same content."""

    members: Sequence[Part | Group]
    is_choice: bool = False

    def parts(self) -> Iterator[Part]:
        """Yield all parts that are not containers."""
        for member in self.members:
            if isinstance(member, Part):
                yield member
            else:
                yield from member.parts()


def shown_parts(part: Part, defects: list[str]) -> Group:
    """Return the tree of a message's parts without attached containers and attached files with a name. A container in
    which no parts are found counts as a part (``bad_mime`` in ``defects``)."""
    whole, kind = part.head.get_content_type(), part.head.get_content_maintype()
    is_attached, is_too_deep = part.head.get_content_disposition() == "attachment", part.depth >= _MAX_DEPTH
    if whole in _SMIME and not is_too_deep:
        inside = _signed_in(part, defects)
    elif kind not in ("multipart", "message"):
        return Group([] if is_attached and part.name else [part])
    elif is_attached or (part.depth and part.name and not is_too_deep):
        return Group([])
    elif is_too_deep:
        defects.append("bad_mime")
        return Group([])
    elif kind == "message":
        inside = _message_in(part, defects)
    else:
        pieces = _pieces(part, defects)
        if pieces is None:
            return Group([part])
        if len(pieces) > _MAX_PARTS:
            defects.append("bad_mime")
        inner = "message/rfc822" if whole == "multipart/digest" else "text/plain"
        read = (read_headers(piece, defects) for piece in pieces[:_MAX_PARTS])
        inside = [part_of(*each, part.depth + 1, inner) for each in read]
    return Group([shown_parts(one, defects) for one in inside], whole == "multipart/alternative")


def _message_in(container: Part, defects: list[str]) -> list[Part]:
    """The message in a part that holds one; delivery reports and the like have only fields, or else text. Only the
    first fragment of a fragmented message, with the headers, can be read alone."""
    subtype = container.head.get_content_subtype()
    if subtype == "partial":
        defects.append("partial_message")
        if container.parameter("number") != "1":
            return []
    content = container.decoded(defects).replace(b"\r\n", b"\n").lstrip(b"\n")
    fields, body = read_headers(content, defects)
    if fields and subtype not in ("rfc822", "global", "news", "partial"):
        return []
    return [part_of(fields, body, container.depth + 1)]


def _pieces(container: Part, defects: list[str]) -> list[bytes] | None:
    """The content between a container's delimiters, or None if there are none.

    If the boundary as it was folded opens no part, it is searched with other spacing; after that, any line above a
    content header counts as a delimiter (``bad_mime`` in ``defects``).
    """
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
    """The parts between delimiters, or None if there are none."""
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
    """Base64 content, and the plain-text footer that a mailing list may have added."""
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


def _signed_in(part: Part, defects: list[str]) -> list[Part]:
    """The message in an opaque signature; none if it cannot be read, which is a defect."""
    content = _signed_content(part.decoded(defects))
    if content is None:
        defects.append("encrypted" if part.parameter("smime-type").lower() == "enveloped-data" else "bad_mime")
        return []
    return [part_of(*read_headers(content.replace(b"\r\n", b"\n"), defects), part.depth + 1)]


def _signed_content(cms: bytes) -> bytes | None:
    """The content of signed data in DER or BER; None if it is encrypted, detached or truncated."""
    at = cms.find(_DATA)
    try:
        tag, begin, _ = _tagged(cms, at + len(_DATA))
        if at < 0 or tag != _CONTENT:
            return None
        tag, begin, end = _tagged(cms, begin)
        if tag == _OCTETS:
            return cms[begin:end]
        pieces = []
        while tag == _PIECES and begin != end and cms[begin : begin + 2] != b"\0\0":
            kind, inside, begin = _tagged(cms, begin)
            if kind != _OCTETS:
                return None
            pieces.append(cms[inside:begin])
        return b"".join(pieces) or None
    except (IndexError, ValueError):
        return None


def _tagged(data: bytes, at: int) -> tuple[int, int, int]:
    """The tag at ``at``, and the start and end of its content (-1: ends at a marker)."""
    tag, length, begin = data[at], data[at + 1], at + 2
    if length == 0x80:
        if tag == _OCTETS:
            raise ValueError("pieces alone end at a mark")
        return tag, begin, -1
    if length > 0x80:
        begin += length & 0x7F
        length = int.from_bytes(data[at + 2 : begin], "big")
    if begin + length > len(data):
        raise ValueError("cut off")
    return tag, begin, begin + length
