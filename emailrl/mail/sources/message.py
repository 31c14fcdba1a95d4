"""Parses one message: from the bytes of an email to a ``RawEmail``.

Most mail is one plain-text part under plain ASCII headers and takes a short path here (``_plain``); everything else
(MIME trees, encoded words, unusual charsets, odd lines) takes ``_mime``. Tests require the same result from both.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping

from emailrl.mail.schema import clean_text
from emailrl.mail.sources.archive import BLOCK, is_tar_header
from emailrl.mail.sources.headers import MAX_ADDRESS_CHARS, addresses_of, header_text, parse_date
from emailrl.mail.sources.parts import Group, Part, part_of, read_headers, shown_parts
from emailrl.mail.sources.reading import RawEmail, Skipped, made_up_id
from emailrl.mail.sources.text import decode, enriched_to_text, flowed_to_text, html_to_text

PEOPLE = ("from", "to", "cc", "bcc")
_ENVELOPE = re.compile(rb"From (?![ \t]*:)")  # of a message in an mbox
_COUNTED = re.compile(rb"(\d{1,12}) *\n")
"""The first line of Apple Mail's .emlx: the length of the message, which is followed by other data."""
_MAIL_HEADER = re.compile(rb"^(from|to|date|message-id|subject|received)[ \t]*:", re.IGNORECASE | re.MULTILINE)
_FIRST_LINE = re.compile(rb"(?:\d{1,12} *\r?\n)?(?:[!-9;-~]{1,200}[ \t]*:|From )")
_KEPT = frozenset(("message-id", "date", "subject", "content-type", "content-transfer-encoding", *PEOPLE))
_FOLD = re.compile(r"\n[ \t]+")
_PLAIN_TYPE = re.compile(
    r'text/plain(?:; *charset="?(?:us-ascii|ascii|ansi_x3\.4-1968|utf-?8|iso-8859-1|windows-1252)"?)?;?', re.IGNORECASE
)
_META_CHARSET = re.compile(rb"<meta[^>]{1,200}?charset\s{0,9}=\s{0,9}[\"']?([\w.:-]+)", re.IGNORECASE)
_META_BYTES = 4096
_PLAIN, _HTML, _OTHER, _DATA, _NO_TEXT = range(5)
"""Ranks of parts as an email's text, best first; data is used only if there is nothing else."""
_DATA_SUBTYPE = re.compile("calendar|css|csv|directory|javascript|rfc822-headers|rtf|(?:x-)?vcard|x-amp-html|xml")
_WORD = re.compile(r"\w+")
_SEEN = re.compile("[^\\s\u00ad\u034f\u200b-\u200f\u2060\ufeff]")


def parse_message(raw: bytes, file_name: str = "") -> RawEmail | Skipped:
    """Parse one message; returns ``Skipped`` if the bytes are empty, not an email or unreadable. A missing Message-ID
    is made from the hash of the bytes, and an unreadable date is None; both are listed in ``defects``."""
    if raw[:1].isdigit() and (counted := _COUNTED.match(raw)):
        raw = raw[counted.end() : counted.end() + int(counted[1])]
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if raw[:1] in (b"\n", b"\xef"):
        raw = raw.removeprefix(b"\xef\xbb\xbf").lstrip(b"\n")
    if raw[:5] == b"From " and _ENVELOPE.match(raw):
        raw = raw.partition(b"\n")[2]
    head, _, body = raw.partition(b"\n\n")
    defects: list[str] = []
    people: Mapping[str, str]
    try:
        if plain := _plain(head, body):
            headers, text = plain
            people = headers
        elif not raw.strip():
            return Skipped("empty", file_name)
        elif not _MAIL_HEADER.search(head) or is_tar_header(raw[:BLOCK]):  # a tar's headers are those of an email in it
            return Skipped("not_mail", file_name)
        else:
            headers, people, text = _mime(raw, defects)
        if any(len(value) > MAX_ADDRESS_CHARS for value in people.values()):
            defects.append("long_header")
        sender, to, cc, bcc = (addresses_of(people.get(name, "")[:MAX_ADDRESS_CHARS]) for name in PEOPLE)
        date = parse_date(headers.get("date", ""))
    except Exception:  # the library raises many kinds on hostile input; the message is counted, never lost
        return Skipped("unreadable", file_name)
    if date is None:
        defects.append("bad_date" if "date" in headers else "no_date")
    message_id = headers.get("message-id", "")
    if not message_id:
        message_id = made_up_id(raw)
        defects.append("no_message_id")
    if "\0" in text or any("\0" in value for value in headers.values()):
        defects.append("nul_bytes")
    if not sender:
        defects.append("no_sender")
    subject, body_text = clean_text(headers.get("subject", "")), clean_text(text)
    from_address, kinds = sender[0] if sender else "", tuple(sorted(set(defects)))
    return RawEmail(clean_text(message_id), subject, from_address, to, cc, bcc, date, body_text, file_name, kinds)


def begins_mail(start: bytes) -> bool:
    """Whether a file that begins with ``start`` is a single message: an .eml, an .emlx or a file of a Maildir."""
    head = start.replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    return _FIRST_LINE.match(head) is not None and _MAIL_HEADER.search(head) is not None


def _plain(head: bytes, body: bytes) -> tuple[dict[str, str], str] | None:
    """The headers to keep, by lower-case name, and the text of a message of one plain ASCII part; None for others."""
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
    encoding = headers.get("content-transfer-encoding", "7bit").lower()
    if encoding == "quoted-printable":
        body = binascii.a2b_qp(body).replace(b"\r\n", b"\n")
    elif encoding not in ("7bit", "8bit", "binary"):
        return None
    if not body.isascii() or not _PLAIN_TYPE.fullmatch(headers.get("content-type", "text/plain")):
        return None
    return headers, body.decode("ascii")


def _mime(raw: bytes, defects: list[str]) -> tuple[dict[str, str], dict[str, str], str]:
    """The decoded headers of any message, the values of its address headers, and its text. Non-ASCII bytes in headers
    are UTF-8 or the text's charset, escape sequences ISO-2022-JP."""
    fields, body = read_headers(raw, defects)
    tree = shown_parts(part_of(fields, body), defects)
    text = _text_of(tree, defects)
    charset = next(filter(None, map(_charset, tree.parts())), "windows-1252")
    values: dict[str, list[str]] = {}
    for name, value in fields:
        try:
            line = decode(value, "iso-2022-jp", []) if b"\x1b" in value else value.decode()
        except UnicodeDecodeError:
            line = decode(value, charset, [])
        values.setdefault(name, []).append(line)
    single = ("message-id", "date", "subject")
    headers = {name: header_text(values[name][0], defects) for name in single if name in values}
    return headers, {name: clean_text(", ".join(values[name])) for name in PEOPLE if name in values}, text


def _text_of(tree: Group, defects: list[str]) -> str:
    """The texts of the parts in order, joined by line ends; one of several alternatives, preferably plain text.

    Attachments and parts with a file name are used only if there is no other text (``named_text`` in ``defects``).
    HTML that repeats another kind word for word is left out: some programs send both as ``mixed``.
    """
    found = _texts(tree, False, defects)
    if not found and (found := _texts(tree, True, defects)):
        defects.append("named_text")
    if not found:
        defects.append("no_text")
        return ""
    shown = [one for one in found if _SEEN.search(one[1])] or found
    ranks = {rank for rank, _ in shown}
    if ranks == {_HTML}:
        defects.append("html_only")
    if len(ranks) == 1:
        return "\n".join(text for _, text in shown)
    words = [tuple(_WORD.findall(text)) for _, text in shown]
    others = {each for each, (rank, _) in zip(words, shown, strict=True) if rank != _HTML}
    return "\n".join(
        text for each, (rank, text) in zip(words, shown, strict=True) if rank != _HTML or each not in others
    )


def _texts(member: Part | Group, named: bool, defects: list[str]) -> list[tuple[int, str]]:
    """The texts of a part or group with their ranks, including blank ones."""
    if isinstance(member, Part):
        rank = _rank(member, named)
        return [(rank, _decoded(member, defects))] if rank < _NO_TEXT else []
    if not member.is_choice:
        found = [text for one in member.members for text in _texts(one, named, defects)]
        return [one for one in found if one[0] != _DATA] or found
    best: list[tuple[int, str]] = []
    for one in sorted(member.members, key=lambda one: _highest_rank(one, named)):
        found = _texts(one, named, defects)
        best = best or found
        if any(_SEEN.search(text) for _, text in found):
            return found
    return best


def _highest_rank(member: Part | Group, named: bool) -> int:
    parts = [member] if isinstance(member, Part) else member.parts()
    return max((rank for part in parts if (rank := _rank(part, named)) < _NO_TEXT), default=_DATA)


def _rank(part: Part, named: bool) -> int:
    """The rank of a part as an email's text; ``_NO_TEXT`` also for a file unless ``named``, else for all but files."""
    kind, subtype = part.head.get_content_maintype(), part.head.get_content_subtype()
    is_file = bool(part.name) or part.head.get_content_disposition() == "attachment"
    if is_file is not named or kind not in ("text", "multipart"):
        return _NO_TEXT
    if kind == "multipart" or subtype == "plain":  # a container in which no parts were found is shown as it is
        return _PLAIN
    if subtype == "html":
        return _HTML
    if not _DATA_SUBTYPE.fullmatch(subtype):
        return _OTHER
    return _NO_TEXT if named else _DATA


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
    match part.head.get_content_type():
        case "text/html":
            return html_to_text(text, defects)
        case "text/enriched":
            return enriched_to_text(text)
        case "text/plain" if part.parameter("format").lower() == "flowed":
            return flowed_to_text(text, delete_spaces=part.parameter("delsp").lower() == "yes")
    return text
