"""Parses one message: from the bytes of an email to a ``RawEmail``.

Most mail is one plain-text part under plain ASCII headers and takes a short path here; everything else (MIME trees,
encoded words, quoted names, unusual charsets, odd lines) goes to ``emailrl.mail.sources.mime``. Tests require the same
result from both paths.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping

from emailrl.mail.sources.archive import BLOCK, is_tar_header
from emailrl.mail.sources.mime import parse_mime
from emailrl.mail.sources.raw_email import PEOPLE, RawEmail, Skipped, assemble


def parse_message(raw: bytes, file_name: str = "") -> RawEmail | Skipped:
    """Parse one message; returns ``Skipped`` if the bytes are empty or not an email.

    A missing Message-ID is made from the hash of the bytes, and an unreadable date is None; both are listed in
    ``defects``.
    """
    if raw[:1].isdigit() and (counted := _COUNTED.match(raw)):
        raw = raw[counted.end() : counted.end() + int(counted[1])]
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if raw[:1] in (b"\n", b"\xef"):
        raw = raw.removeprefix(b"\xef\xbb\xbf").lstrip(b"\n")
    if raw[:5] == b"From " and _ENVELOPE.match(raw):
        raw = raw.partition(b"\n")[2]
    head, _, body = raw.partition(b"\n\n")
    headers = _plain_headers(head)
    text = None if headers is None else _plain_body(headers, body)
    if headers is None or text is None:
        return _parse_any(raw, file_name)
    people = [_plain_addresses(headers.get(name, "")) for name in PEOPLE]
    if None in people:
        return _parse_any(raw, file_name)
    return assemble(raw, file_name, headers, people, text, [])  # type: ignore[arg-type]


def begins_mail(start: bytes) -> bool:
    """Whether a file that begins with ``start`` is a single message: an .eml, an .emlx or a file of a Maildir."""
    head = start.replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    return _FIRST_LINE.match(head) is not None and _MAIL_HEADER.search(head) is not None


_ENVELOPE = re.compile(rb"From (?![ \t]*:)")
"""The envelope line of a message in an mbox."""
_COUNTED = re.compile(rb"(\d{1,12}) *\n")
"""The first line of Apple Mail's .emlx: the length of the message, which is followed by other data."""


def _parse_any(raw: bytes, file_name: str) -> RawEmail | Skipped:
    if not raw.strip():
        return Skipped("empty", file_name)
    if not _MAIL_HEADER.search(raw.partition(b"\n\n")[0]):
        return Skipped("not_mail", file_name)
    if is_tar_header(raw[:BLOCK]):  # the headers found are those of an email in the archive
        return Skipped("not_mail", file_name)
    return parse_mime(raw, file_name)


_MAIL_HEADER = re.compile(rb"^(from|to|date|message-id|subject|received)[ \t]*:", re.IGNORECASE | re.MULTILINE)
_FIRST_LINE = re.compile(rb"(?:\d{1,12} *\r?\n)?(?:[!-9;-~]{1,200}[ \t]*:|From )")
_KEPT = frozenset(
    ("message-id", "date", "subject", "content-type", "content-transfer-encoding", *PEOPLE),
)
_FOLD = re.compile(r"\n[ \t]+")


def _plain_headers(head: bytes) -> dict[str, str] | None:
    """The headers to keep, by lower-case name.

    None unless they are plain ASCII without encoded words or escape sequences and the block looks like an email's.
    """
    if not head.isascii() or b"=?" in head or b"\0" in head or b"\x1b" in head or not _MAIL_HEADER.search(head):
        return None
    text = head.decode("ascii")
    if "\n " in text or "\n\t" in text:
        text = _FOLD.sub(" ", text)
    headers: dict[str, str] = {}
    for line in text.split("\n"):
        name, colon, value = line.partition(":")
        if not colon or " " in name or "\t" in name:
            return None
        if name[:2] == "X-":  # half of all headers; none is kept
            continue
        name = name.lower()
        if name in _KEPT:
            if name not in headers:
                headers[name] = value.strip()
            elif name in PEOPLE:
                headers[name] += f", {value.strip()}"
    return headers


_CONTENT_TYPE = re.compile(r'text/plain(?:; *charset="?([\w.:-]+)"?)?;?', re.IGNORECASE)
_ASCII_CHARSETS = frozenset(("us-ascii", "ascii", "ansi_x3.4-1968", "utf-8", "utf8", "iso-8859-1", "windows-1252"))


def _plain_body(headers: Mapping[str, str], body: bytes) -> str | None:
    """The text of a single plain part whose decoded bytes are ASCII; None for anything else."""
    content_type = headers.get("content-type", "text/plain")
    match = _CONTENT_TYPE.fullmatch(content_type)
    if match is None or (match[1] or "us-ascii").lower() not in _ASCII_CHARSETS:
        return None
    encoding = headers.get("content-transfer-encoding", "7bit").lower()
    if encoding == "quoted-printable":
        body = binascii.a2b_qp(body).replace(b"\r\n", b"\n")
    elif encoding not in ("7bit", "8bit", "binary"):
        return None
    return body.decode("ascii") if body.isascii() else None


_ADDRESS = r"[^\s,;:<>()\[\]\"\\@]+@[^\s,;:<>()\[\]\"\\@]+"
_BARE = re.compile(rf"{_ADDRESS}(?:, *{_ADDRESS})*")
# A name does not begin with a space: otherwise spaces after a comma match in two ways and backtracking explodes.
_ITEM = rf"(?:(?:[\w.'&/-][\w .'&/-]*)?<{_ADDRESS}>|{_ADDRESS})"
_NAMED = re.compile(rf"{_ITEM}(?:, *{_ITEM})*", re.ASCII)
_ENDINGS = re.compile(r"[.'] *(?:[,>]|\Z)")
"""Characters at the end of an address that may not belong to it."""
_NAME = re.compile(r"[^,<]*<|>")


def _plain_addresses(value: str) -> list[str] | None:
    """The addresses of a header of bare addresses, or of ``plain name <address>``; None for anything else."""
    if not value:
        return []
    value = value.lower()
    if _ENDINGS.search(value):
        return None
    if "<" in value:
        if _NAMED.fullmatch(value) is None:
            return None
        value = _NAME.sub("", value)
    elif _BARE.fullmatch(value) is None:
        return None
    return value.replace(" ", "").split(",")
