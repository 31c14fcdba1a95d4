"""Parses real-world mail: MIME trees, encoded headers, any charset, HTML only."""

from __future__ import annotations

import re

from emailrl.mail.parties import clean_text
from emailrl.mail.sources.addresses import MAX_ADDRESS_CHARS, addresses_of
from emailrl.mail.sources.charsets import decode
from emailrl.mail.sources.headers import Fields, header_text, read_headers
from emailrl.mail.sources.markup import enriched_to_text, flowed_to_text, html_to_text
from emailrl.mail.sources.parts import Group, Part, part_of, shown_parts
from emailrl.mail.sources.raw_email import PEOPLE, RawEmail, Skipped, assemble

_META_CHARSET = re.compile(rb"<meta[^>]{1,200}?charset\s{0,9}=\s{0,9}[\"']?([\w.:-]+)", re.IGNORECASE)
_META_BYTES = 4096
_PLAIN, _HTML, _OTHER, _DATA, _NO_TEXT = range(5)
"""Ranks of parts as an email's text, best first; data is used only if there is nothing else."""
_DATA_SUBTYPES = frozenset(
    (
        "calendar",
        "css",
        "csv",
        "directory",
        "javascript",
        "rfc822-headers",
        "rtf",
        "vcard",
        "x-amp-html",
        "x-vcard",
        "xml",
    )
)
_WORD = re.compile(r"\w+")
_SEEN = re.compile("[^\\s\u00ad\u034f\u200b-\u200f\u2060\ufeff]")


def parse_mime(raw: bytes, file_name: str = "") -> RawEmail | Skipped:
    """Parse one message of any form, with ``\\n`` line ends; returns ``Skipped("unreadable")`` if that fails."""
    defects: list[str] = []
    try:
        fields, body = read_headers(raw, defects)
        tree = shown_parts(part_of(fields, body), defects)
        text = _text_of(tree, defects)
        values = _values(fields, next(filter(None, map(_charset, tree.parts())), "windows-1252"))
        headers: dict[str, str] = {
            name: header_text(values[name][0], defects) for name in ("message-id", "date", "subject") if name in values
        }
        people = [_people(", ".join(values.get(name, ())), defects) for name in PEOPLE]
    except Exception:  # the library raises many kinds on hostile input; the message is counted, never lost
        return Skipped("unreadable", file_name)
    return assemble(raw, file_name, headers, people, text, sorted(set(defects)))


def _values(fields: Fields, charset: str) -> dict[str, list[str]]:
    """The values of each header; non-ASCII bytes are UTF-8 or the text's charset, escape sequences ISO-2022-JP."""
    values: dict[str, list[str]] = {}
    for name, value in fields:
        try:
            text = decode(value, "iso-2022-jp", []) if b"\x1b" in value else value.decode()
        except UnicodeDecodeError:
            text = decode(value, charset, [])
        values.setdefault(name, []).append(text)
    return values


def _people(value: str, defects: list[str]) -> list[str]:
    if len(value) > MAX_ADDRESS_CHARS:
        defects.append("long_header")
    return addresses_of(clean_text(value[:MAX_ADDRESS_CHARS]))


def _text_of(tree: Group, defects: list[str]) -> str:
    """The texts of the parts in order, joined by line ends; one of several alternatives, preferably plain text.

    Attachments and parts with a file name are used only if there is no other text (``named_text`` in ``defects``).
    """
    for named in (False, True):
        found = _texts(tree, named, defects)
        if found:
            if named:
                defects.append("named_text")
            shown = [one for one in found if _says(one)] or found
            if all(rank == _HTML for rank, _ in shown):
                defects.append("html_only")
            return "\n".join(_without_repeats(shown))
    defects.append("no_text")
    return ""


def _without_repeats(texts: list[tuple[int, str]]) -> list[str]:
    """The texts without HTML that repeats another kind word for word: some programs send both as ``mixed``."""
    if len({rank for rank, _ in texts}) == 1:
        return [text for _, text in texts]
    words = [tuple(_WORD.findall(text)) for _, text in texts]
    shown = {one for one, (rank, _) in zip(words, texts, strict=True) if rank != _HTML}
    return [text for one, (rank, text) in zip(words, texts, strict=True) if rank != _HTML or one not in shown]


def _texts(member: Part | Group, named: bool, defects: list[str]) -> list[tuple[int, str]]:
    """The texts of a part or group with their ranks, including blank ones."""
    if isinstance(member, Part):
        return [(_rank(member), _decoded(member, defects))] if _is_text(member, named) else []
    if not member.is_choice:
        found = [text for one in member.members for text in _texts(one, named, defects)]
        return [one for one in found if one[0] != _DATA] if any(rank != _DATA for rank, _ in found) else found
    best: list[tuple[int, str]] = []
    for one in sorted(member.members, key=lambda one: _highest_rank(one, named)):
        found = _texts(one, named, defects)
        best = best or found
        if any(map(_says, found)):
            return found
    return best


def _highest_rank(member: Part | Group, named: bool) -> int:
    parts = [member] if isinstance(member, Part) else member.parts()
    return max((_rank(part) for part in parts if _is_text(part, named)), default=_DATA)


def _is_text(part: Part, named: bool) -> bool:
    """Whether a part is text or a container shown as is; with ``named``, only if it is a file."""
    is_file = bool(part.name) or part.head.get_content_disposition() == "attachment"
    return is_file is named and _rank(part) < (_DATA if named else _NO_TEXT)


def _rank(part: Part) -> int:
    """The rank of a part as an email's text; lower is better."""
    kind, subtype = part.head.get_content_maintype(), part.head.get_content_subtype()
    if kind == "multipart":
        return _PLAIN
    if kind != "text":
        return _NO_TEXT
    return {"plain": _PLAIN, "html": _HTML}.get(subtype, _DATA if subtype in _DATA_SUBTYPES else _OTHER)


def _says(text: tuple[int, str]) -> bool:
    """Whether a text has a visible character."""
    return _SEEN.search(text[1]) is not None


def _charset(part: Part) -> str:
    """The charset of a text part from its header or the HTML itself, or an empty string."""
    if part.head.get_content_maintype() != "text":
        return ""
    label = part.parameter("charset")
    if not label and (found := _META_CHARSET.search(part.body, 0, _META_BYTES)):
        label = found[1].decode("ascii", "replace")
    return label


def _decoded(part: Part, defects: list[str]) -> str:
    text = decode(part.decoded(defects), _charset(part) or "us-ascii", defects).replace("\r\n", "\n")
    if _rank(part) == _HTML:
        return html_to_text(text, defects)
    if part.head.get_content_type() == "text/enriched":
        return enriched_to_text(text)
    if _rank(part) == _PLAIN and part.parameter("format").lower() == "flowed":
        return flowed_to_text(text, delete_spaces=part.parameter("delsp").lower() == "yes")
    return text
