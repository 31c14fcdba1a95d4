"""Parses one message: from the bytes of an email to a ``RawEmail``.

Most mail is one plain-text part under plain ASCII headers and takes a short path here; everything else (MIME trees,
encoded words, unusual charsets, odd lines) goes to ``parse_mime``. Tests require the same result from both paths.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping

from emailrl.mail.schema import clean_text
from emailrl.mail.sources.archive import BLOCK, is_tar_header
from emailrl.mail.sources.charsets import decode
from emailrl.mail.sources.headers import MAX_ADDRESS_CHARS, addresses_of, header_text, parse_date
from emailrl.mail.sources.markup import enriched_to_text, flowed_to_text, html_to_text
from emailrl.mail.sources.parts import Fields, Group, Part, part_of, read_headers, shown_parts
from emailrl.mail.sources.reading import RawEmail, Skipped, made_up_id

PEOPLE = ("from", "to", "cc", "bcc")
_ENVELOPE = re.compile(rb"From (?![ \t]*:)")
"""The envelope line of a message in an mbox."""
_COUNTED = re.compile(rb"(\d{1,12}) *\n")
"""The first line of Apple Mail's .emlx: the length of the message, which is followed by other data."""
_MAIL_HEADER = re.compile(rb"^(from|to|date|message-id|subject|received)[ \t]*:", re.IGNORECASE | re.MULTILINE)
_FIRST_LINE = re.compile(rb"(?:\d{1,12} *\r?\n)?(?:[!-9;-~]{1,200}[ \t]*:|From )")
_KEPT = frozenset(("message-id", "date", "subject", "content-type", "content-transfer-encoding", *PEOPLE))
_FOLD = re.compile(r"\n[ \t]+")
_CONTENT_TYPE = re.compile(r'text/plain(?:; *charset="?([\w.:-]+)"?)?;?', re.IGNORECASE)
_ASCII_CHARSETS = frozenset(("us-ascii", "ascii", "ansi_x3.4-1968", "utf-8", "utf8", "iso-8859-1", "windows-1252"))
_META_CHARSET = re.compile(rb"<meta[^>]{1,200}?charset\s{0,9}=\s{0,9}[\"']?([\w.:-]+)", re.IGNORECASE)
_META_BYTES = 4096
_PLAIN, _HTML, _OTHER, _DATA, _NO_TEXT = range(5)
"""Ranks of parts as an email's text, best first; data is used only if there is nothing else."""
_DATA_SUBTYPE = re.compile("calendar|css|csv|directory|javascript|rfc822-headers|rtf|(?:x-)?vcard|x-amp-html|xml")
_WORD = re.compile(r"\w+")
_SEEN = re.compile("[^\\s\u00ad\u034f\u200b-\u200f\u2060\ufeff]")


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
    if headers is not None and text is not None:
        return _assembled(raw, file_name, headers, headers, text, [])
    if not raw.strip():
        return Skipped("empty", file_name)
    if not _MAIL_HEADER.search(head) or is_tar_header(raw[:BLOCK]):  # in a tar, the headers are those of an email in it
        return Skipped("not_mail", file_name)
    return parse_mime(raw, file_name)


def _assembled(
    raw: bytes, file_name: str, headers: Mapping[str, str], people: Mapping[str, str], body: str, defects: list[str]
) -> RawEmail:
    """The email made of decoded headers, the values of its address headers, and its text.

    What is missing or cannot be read is added to ``defects``.
    """
    if any(len(value) > MAX_ADDRESS_CHARS for value in people.values()):
        defects.append("long_header")
    sender, to, cc, bcc = (addresses_of(people.get(name, "")[:MAX_ADDRESS_CHARS]) for name in PEOPLE)
    date = parse_date(headers.get("date", ""))
    if date is None:
        defects.append("bad_date" if "date" in headers else "no_date")
    message_id = headers.get("message-id", "")
    if not message_id:
        message_id = made_up_id(raw)
        defects.append("no_message_id")
    if "\0" in body or any("\0" in value for value in headers.values()):
        defects.append("nul_bytes")
    if not sender:
        defects.append("no_sender")
    return RawEmail(
        message_id=clean_text(message_id),
        subject=clean_text(headers.get("subject", "")),
        from_address=sender[0] if sender else "",
        to=to,
        cc=cc,
        bcc=bcc,
        date=date,
        body=clean_text(body),
        file_name=file_name,
        defects=tuple(sorted(set(defects))),
    )


def begins_mail(start: bytes) -> bool:
    """Whether a file that begins with ``start`` is a single message: an .eml, an .emlx or a file of a Maildir."""
    head = start.replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    return _FIRST_LINE.match(head) is not None and _MAIL_HEADER.search(head) is not None


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
        people = {name: clean_text(", ".join(values[name])) for name in PEOPLE if name in values}
        return _assembled(raw, file_name, headers, people, text, defects)
    except Exception:  # the library raises many kinds on hostile input; the message is counted, never lost
        return Skipped("unreadable", file_name)


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
    return {"plain": _PLAIN, "html": _HTML}.get(subtype, _DATA if _DATA_SUBTYPE.fullmatch(subtype) else _OTHER)


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
