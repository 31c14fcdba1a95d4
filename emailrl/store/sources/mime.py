"""Mail as it is in the wild: MIME trees, encoded headers, any charset, HTML only."""

from __future__ import annotations

import re

from emailrl.store.parties import clean_text
from emailrl.store.sources.addresses import MAX_ADDRESS_CHARS, addresses_of
from emailrl.store.sources.charsets import decode
from emailrl.store.sources.headers import Fields, header_text, read_headers
from emailrl.store.sources.markup import html_to_text
from emailrl.store.sources.message import PEOPLE, RawEmail, Skipped, assemble
from emailrl.store.sources.parts import Part, part_of, shown_parts

_META_CHARSET = re.compile(rb"<meta[^>]{1,200}?charset\s{0,9}=\s{0,9}[\"']?([\w.:-]+)", re.IGNORECASE)
_META_BYTES = 4096


def parse_mime(raw: bytes, file_name: str = "") -> RawEmail | Skipped:
    """Read one message (line ends already ``\\n``) of any form; ``Skipped("unreadable")`` if that fails."""
    defects: list[str] = []
    try:
        fields, body = read_headers(raw, defects)
        parts = list(shown_parts(part_of(fields, body), defects))
        text = _text_of(parts, defects)
        values = _values(fields, next(filter(None, map(_charset, parts)), "windows-1252"))
        headers: dict[str, str] = {
            name: header_text(values[name][0], defects) for name in ("message-id", "date", "subject") if name in values
        }
        people = [_people(", ".join(values.get(name, ())), defects) for name in PEOPLE]
    except Exception:  # the library raises many kinds over hostile input; the message is counted, never lost
        return Skipped("unreadable", file_name)
    return assemble(raw, file_name, headers, people, text, sorted(set(defects)))


def _values(fields: Fields, charset: str) -> dict[str, list[str]]:
    """The values of each header; bytes outside ASCII are read as UTF-8 or else in the charset of the text."""
    values: dict[str, list[str]] = {}
    for name, value in fields:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = decode(value, charset, [])
        values.setdefault(name, []).append(text)
    return values


def _people(value: str, defects: list[str]) -> list[str]:
    if len(value) > MAX_ADDRESS_CHARS:
        defects.append("long_header")
    return addresses_of(clean_text(value[:MAX_ADDRESS_CHARS]))


def _text_of(parts: list[Part], defects: list[str]) -> str:
    """The plain-text parts, joined by a line end; where they say nothing, the HTML parts as text. Parts with a file's
    name are attachments, unless there is no other text (``named_text`` is noted)."""
    for named in (False, True):
        chosen = [part for part in parts if bool(part.name) is named]
        plain = [_decoded(part, defects) for part in chosen if _is_plain(part)]
        html = [part for part in chosen if part.head.get_content_type() == "text/html"]
        if named and (plain or html):
            defects.append("named_text")
        if html and not any(text.strip() for text in plain):
            defects.append("html_only")
            return "\n".join(html_to_text(_decoded(part, defects), defects) for part in html)
        if plain:
            return "\n".join(plain)
    defects.append("no_text")
    return ""


def _is_plain(part: Part) -> bool:
    """Whether a part is plain text, or a container shown as it stands."""
    return part.head.get_content_type() == "text/plain" or part.head.get_content_maintype() == "multipart"


def _charset(part: Part) -> str:
    """The charset of a text part, as its header or the HTML itself says; empty where neither does."""
    if part.head.get_content_maintype() != "text":
        return ""
    label = part.parameter("charset")
    if not label and (found := _META_CHARSET.search(part.body, 0, _META_BYTES)):
        label = found[1].decode("ascii", "replace")
    return label


def _decoded(part: Part, defects: list[str]) -> str:
    return decode(part.decoded(defects), _charset(part) or "us-ascii", defects).replace("\r\n", "\n")
