"""Splits a message or a part into its header fields and its body."""

from __future__ import annotations

import re
from email.errors import HeaderParseError
from email.header import decode_header

from emailrl.mail.sources.charsets import decode

Fields = list[tuple[str, bytes]]
"""Header fields in order: name in lower case, value on one line."""

_FIELD = re.compile(rb"([!-9;-~]++)[ \t]*:(.*)", re.DOTALL)
_ODD_FIELD = re.compile(rb"[^\s:]++[ \t]*:")
_KNOWN_FIELD = re.compile(
    rb"^(?:from|to|cc|bcc|date|subject|message-id|received|return-path|reply-to|in-reply-to|references|sender"
    rb"|delivered-to|mime-version|content-[a-z-]+|x-[a-z0-9-]+|dkim-signature|list-[a-z]+)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_ENVELOPES = (b"From ", b">From ")
_LIST_GOES_ON = (b",", b";")
_MAX_ENCODED = 65_536
"""Maximum characters read from a header with encoded words, which take the library quadratic time."""


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
    at = 0
    dropping = False
    for line in head.split(b"\n"):
        field = None
        if line[:1] in (b" ", b"\t"):
            if fields and not dropping:
                fields[-1][1].append(line)
        elif field := _FIELD.fullmatch(line):
            fields.append((field[1].decode("ascii").lower(), [field[2]]))
            dropping = False
        elif line and not line.startswith(_ENVELOPES):
            defects.append("bad_header")
            if at > last_field and not _ODD_FIELD.match(line):
                return _unfolded(fields), raw[at:]
            dropping = not (fields and fields[-1][1][-1].rstrip().endswith(_LIST_GOES_ON))
            if not dropping:
                fields[-1][1].append(b" " + line)
        at += len(line) + 1
    return _unfolded(fields), body


def _unfolded(fields: list[tuple[str, list[bytes]]]) -> Fields:
    return [
        (name, b" ".join([lines[0], *(line.lstrip(b" \t") for line in lines[1:])]).strip()) for name, lines in fields
    ]


def header_text(text: str, defects: list[str]) -> str:
    """Return a header's value with its encoded words decoded."""
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
