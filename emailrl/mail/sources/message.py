"""Parses one message: from the bytes of an email to a ``RawEmail``.

Most mail is one plain-text part under plain ASCII headers and takes a short path here (``_plain``); everything else
(MIME trees, encoded words, unusual charsets, odd lines) takes ``_mime``. Tests require the same result from both. The
tree is walked here, because the standard library's parser ends the headers at the first odd line, misses boundaries
whose header is broken, leaves encoded messages undecoded, and takes quadratic time on nested containers.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from email.message import Message
from email.utils import unquote
from itertools import islice, takewhile
from typing import cast

from emailrl.mail.database import clean_text
from emailrl.mail.sources.archive import BLOCK, KNOWN_HEADER, is_tar_header
from emailrl.mail.sources.headers import (
    LABEL,
    MACHINE_FIELDS,
    MAX_ADDRESS_CHARS,
    FieldNames,
    header_text,
    machine_of,
    message_ids,
    parse_date,
    people_in,
    shown_name,
)
from emailrl.mail.sources.reading import MAX_READ_BYTES, RawEmail, Skipped, made_up_id
from emailrl.mail.sources.text import as_text, beginning, codec_of, decode, from_base64

PEOPLE = ("from", "to", "cc", "bcc")
_FIELDS = tuple((kind, f"x-{kind}") for kind in reversed(PEOPLE))  # the sender's name counts most
"""Each with the header of CMU's Enron release that has its names; no other has any."""
THREAD = ("references", "in-reply-to")
DELIVERED = ("delivered-to", "x-original-to")  # name the owner where a list or a blind copy brought the mail
_ENVELOPE = re.compile(rb"From (?![ \t]*:)")  # of a message in an mbox
_COUNTED = re.compile(rb"(\d{1,12}) *\n")
"""The first line of Apple Mail's .emlx: the length of the message, which is followed by other data."""
_MAIL_HEADER = re.compile(rb"^(from|to|date|message-id|subject|received)[ \t]*:", re.IGNORECASE | re.MULTILINE)
_FIRST_LINE = re.compile(rb"(?:\d{1,12} *\r?\n)?(?:[!-9;-~]{1,200}[ \t]*:|From )")
_KEPT = MACHINE_FIELDS.union(
    ("message-id", "date", "subject", "content-type", "content-transfer-encoding"),
    (*PEOPLE, *THREAD, *DELIVERED, "x-from", "x-to", "x-cc", "x-gmail-labels"),
)
_kept_as = FieldNames(zip(_KEPT, _KEPT, strict=True))
_ENCODED_IN = re.compile(rb"=\?([\w.-]{1,40})(?:\*[\w-]+)?\?[bqBQ]\?")
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
_NOTICE_CHARS, _FULLER = 500, 3
"""A plain text up to this long may only say that there is HTML: one this many times as long is preferred."""
_FEW_WORDS = 3  # of which it is not told whether they are of another text
_FORWARDED = ("from", "to", "date", "subject")
_SEEN = re.compile("[^\\s\u00ad\u034f\u200b-\u200f\u2060\ufeff]")

_Fields = list[tuple[str, bytes]]  # header fields in order: name in lower case, value on one line
_FIELD = re.compile(rb"([!-9;-~]++)[ \t]*:(.*)", re.DOTALL)
_ODD_FIELD = re.compile(rb"[^\s:]++[ \t]*:")
_KNOWN_FIELD = re.compile(rb"^" + KNOWN_HEADER, re.IGNORECASE | re.MULTILINE)
_MAX_PARAMETERS = 2_048  # characters read from a header with parameters, which take the library quadratic time
_MAX_PARTS = 10_000  # read from one message
_MAX_DEPTH = 50  # of nested containers
_MESSAGES = tuple(f"message/{subtype}" for subtype in ("rfc822", "global", "news", "partial"))
"""Types of parts that hold a message; delivery reports and the like hold only fields, or else text."""
_SMIME = ("application/pkcs7-mime", "application/x-pkcs7-mime")
_DELIMITER = re.compile(rb"^--(\S[^\n]*+)\ncontent-[a-z-]+[ \t]*:", re.IGNORECASE | re.MULTILINE)
_SIGNED_DATA = bytes.fromhex("06092a864886f70d010701")
"""Object identifier of plain content; in signed data the content follows, in encrypted data a cipher."""
_CONTENT, _OCTETS, _PIECES = 0xA0, 0x04, 0x24


def parse_message(raw: bytes, file_name: str = "") -> RawEmail | Skipped:
    """Parse one message; returns ``Skipped`` if the bytes are empty, not an email or unreadable. A missing Message-ID
    is made from the hash of the bytes, and an unreadable date is None; both are listed in ``defects``."""
    defects: list[str] = []
    if raw[:1].isdigit() and (counted := _COUNTED.match(raw)):
        begin, size = counted.end(), int(counted[1])
        if len(raw) < begin + size:
            defects.append("cut_off")
        raw = raw[begin : begin + size]
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if raw[:1] in (b"\n", b"\xef"):
        raw = raw.removeprefix(b"\xef\xbb\xbf").lstrip(b"\n")
    if raw[:5] == b"From " and _ENVELOPE.match(raw):
        raw = raw.partition(b"\n")[2]
    head, end, _ = raw.partition(b"\n\n")
    try:
        files, kind = list[Part](), ""
        if plain := _plain(head, raw):
            headers, text = plain
        elif not raw.strip():
            return Skipped("empty", file_name)
        elif not _MAIL_HEADER.search(head) or is_tar_header(raw[:BLOCK]):  # a tar's headers are those of an email in it
            return Skipped("not_mail", file_name)
        else:
            headers, message = _mime(raw, defects)
            text, files, kind = _text_of(message, defects), [*message.files()], message.telling_kind()
        names, people = dict[str, str](), list[list[str]]()
        for field, listed in _FIELDS:
            value = headers.get(field, "")
            addresses, found = people_in(value, headers.get(listed, "")) if value else ((), {})
            people.append([*addresses])
            names |= found
            if len(value) > MAX_ADDRESS_CHARS:
                defects.append("long_header")
        bcc, cc, to, sender = people
        for value in filter(None, map(headers.get, DELIVERED)):
            if "@" in value and " " not in value:  # others name a list or a local mailbox
                bcc += [each for each in people_in(value)[0] if not any(each in those for those in people)]
        date = parse_date(headers.get("date", ""))
        refs = message_ids(" ".join([headers[name] for name in THREAD if name in headers]))
        machine = machine_of(headers, sender[0] if sender else "", kind)
    except Exception:  # the library raises many kinds on hostile input; the message is counted, never lost
        return Skipped("damaged", file_name)
    if not end and "bad_header" not in defects:  # whose text may follow without an empty line
        defects.append("cut_off")
    if date is None:
        defects.append("bad_date" if "date" in headers else "no_date")
    if not (message_id := headers.get("message-id", "")).strip("<> "):
        message_id = made_up_id(raw)
        defects.append("no_message_id")
    if "\0" in text or "\0" in "".join(headers.values()):
        defects.append("nul_bytes")
    if not sender:
        defects.append("no_sender")
    message_id, subject, text = map(clean_text, (message_id, headers.get("subject", ""), text.replace("\u00ad", "")))
    ids, kinds = (message_id, subject, sender[0] if sender else ""), tuple(sorted(set(defects))) if defects else ()
    shown = [name for part in files if (name := shown_name(part.name))]
    labels = [a or b for a, b in LABEL.findall(header_text(row, []))] if (row := headers.get("x-gmail-labels")) else []
    return RawEmail(*ids, to, cc, bcc, date, text, file_name, kinds, True, names, shown, refs, machine, labels, files)


def begins_mail(start: bytes) -> bool:
    """Whether a file that begins with ``start`` is a single message: an .eml, an .emlx or a file of a Maildir."""
    head = start.replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    return _FIRST_LINE.match(head) is not None and _MAIL_HEADER.search(head) is not None


def _plain(head: bytes, raw: bytes) -> tuple[dict[str, str], str] | None:
    """The headers to keep, by lower-case name, and the text of a message of one plain ASCII part; None for others."""
    is_special = not head.isascii() or b"=?" in head or b"\0" in head or b"\x1b" in head
    if is_special or len(raw) > MAX_READ_BYTES or not _MAIL_HEADER.search(head):
        return None
    text = head.decode("ascii")
    if "\n " in text or "\n\t" in text:
        text = _FOLD.sub(" ", text)
    headers: dict[str, str] = {}
    for line in text.split("\n"):
        name, colon, value = line.partition(":")
        if not colon or (kept := _kept_as[name]) is None:
            return None
        if kept and kept not in headers:
            headers[kept] = value.strip()
        elif kept in PEOPLE:
            headers[kept] += f", {value.strip()}"
    encoding, body = headers.get("content-transfer-encoding", "7bit").lower(), raw[len(head) + 2 :]
    if encoding == "quoted-printable":
        body = binascii.a2b_qp(body).replace(b"\r\n", b"\n")
    elif encoding not in ("7bit", "8bit", "binary"):
        return None
    if not body.isascii() or not _PLAIN_TYPE.fullmatch(headers.get("content-type", "text/plain")):
        return None
    return headers, body.decode("ascii")


def _mime(raw: bytes, defects: list[str]) -> tuple[dict[str, str], Part]:
    """The same headers of any message, and its parts. Non-ASCII bytes in headers are UTF-8 or the text's charset,
    escape sequences ISO-2022-JP."""
    fields, body = _read_headers(raw, defects)
    message = Part(fields, body)
    found, left = [message], MAX_READ_BYTES
    for part in found:
        part.inside = _parts_in(part, _MAX_PARTS - len(found), defects)
        found += part.inside or ()
        if part.inside:
            part.body = b""  # which its parts have
    for part in message.leaves() if len(raw) > left else ():
        if part.get_content_maintype() in ("text", "multipart"):
            if len(part.body) > left:
                defects.append("long_text")
            part.body = beginning(part.body, left)
            left -= len(part.body)
    named = [part.charset for part in message.leaves()]
    if not all(named):
        named += [each.decode("ascii") for _, value in fields for each in _ENCODED_IN.findall(value)]
    charset = next(filter(None, named), "windows-1252")
    for part in message.leaves():
        part.guess = next((each for each in named if codec_of(each) not in (None, "ascii", "utf_8")), "")
    values: dict[str, list[str]] = {}
    for name, value in fields:
        try:
            line = decode(value, "iso-2022-jp", []) if b"\x1b" in value else value.decode()
        except UnicodeDecodeError:
            line = decode(value, charset, [])
            if name in _KEPT:
                defects.append("bad_charset")
        values.setdefault(name, []).append(line)
    single = ("message-id", "date", "subject")
    headers = {name: header_text(values[name][0], defects) for name in single if name in values}
    headers |= {name: clean_text(", ".join(values[name])) for name in PEOPLE if name in values}
    return headers | {name: values[name][0] for name in _KEPT.intersection(values).difference(headers)}, message


# -- parts -------------------------------------------------------------------------------------------------------------


def _read_headers(raw: bytes, defects: list[str]) -> tuple[_Fields, bytes]:
    """Return the header fields of a message or part, and its body. A line that is not a field adds ``bad_header`` to
    ``defects``; it continues the address list above it, is left out if a known field follows, or else begins the
    body. Of longer headers, the first ``MAX_READ_BYTES`` are read (``long_header``)."""
    if raw[:1] == b"\n":
        return [], raw[1:]
    head, _, body = raw.partition(b"\n\n")
    if len(head) > MAX_READ_BYTES:
        head = beginning(head, MAX_READ_BYTES)
        defects.append("long_header")
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


class Part(Message):
    """A message or a part of one: its content headers and its still encoded body."""

    def __init__(self, fields: _Fields, body: bytes, depth: int = 0, default_type: str = "text/plain") -> None:
        super().__init__()
        self.set_default_type(default_type)
        self.body, self.depth = body, depth  # the number of its containers
        self.guess = ""  # the charset that another part or a header of the email names
        self.head = ""  # of a container of a message: who forwarded what
        self.inside: list[Part] | None = None  # of a container: the parts that may be shown
        for name, value in fields:
            if name.startswith("content-") and name not in self:
                self[name] = decode(value[:_MAX_PARAMETERS], "utf-8", [])

    def leaves(self) -> Iterator[Part]:
        """Yield all parts that are not containers."""
        if self.inside is None:
            yield self
        for part in self.inside or ():
            yield from part.leaves()

    def files(self) -> Iterator[Part]:
        """Yield every attached file and every invitation, but not the images that a text shows."""
        is_attached, kind = self.get_content_disposition() == "attachment", self.get_content_maintype()
        is_attached |= self.depth > 0 and self.get_content_type() == "text/calendar"
        is_shown = kind == "image" and "content-id" in self and not is_attached
        if is_attached or (self.name and kind != "multipart" and not is_shown):
            yield self
        for part in self.inside or ():
            yield from part.files()

    def telling_kind(self) -> str:
        """Return the type that says that a program made the message: an invitation or a report; or an empty string."""
        kind = self.get_content_type()
        if kind == "multipart/report" or (kind == "text/calendar" and self.parameter("method")):
            return kind
        inside = [] if self.get_content_maintype() == "message" else self.inside or ()
        return next(filter(None, (part.telling_kind() for part in inside)), "")

    def parameter(self, name: str, header: str = "content-type") -> str:
        """Return a parameter of a header, or an empty string."""
        value = self.get_param(name, "", header)
        if isinstance(value, tuple):  # with a charset (RFC 2231)
            value = decode(value[2].encode("latin-1", "replace"), value[0] or "us-ascii", [])
        return unquote(value).strip()

    @property
    def name(self) -> str:
        """The part's file name."""
        return self.parameter("filename", "content-disposition") or self.parameter("name")

    @property
    def charset(self) -> str:
        """The charset of a text part from its header or the HTML itself, or an empty string."""
        if self.get_content_maintype() != "text":
            return ""
        found = None if (label := self.parameter("charset")) else _META_CHARSET.search(self.body, 0, _META_BYTES)
        return found[1].decode("ascii", "replace") if found else label

    def decoded(self, defects: list[str]) -> bytes:
        """Return the body without its transfer encoding; if that is wrong, ``bad_encoding`` is added to ``defects``."""
        encoding = str(self.get("content-transfer-encoding", "")).strip("\"' \t").lower()
        if encoding.startswith("base64"):
            return from_base64(self.body, defects)
        if encoding.startswith("quoted"):
            return binascii.a2b_qp(self.body)
        if encoding.startswith(("x-uu", "uu")):
            self.replace_header("content-transfer-encoding", "uuencode")
            self.set_payload(self.body.decode("ascii", "replace"))
            return cast(bytes, self.get_payload(decode=True))  # as it promises for a part that is not a container
        return self.body


def _parts_in(part: Part, most: int, defects: list[str]) -> list[Part] | None:
    """The parts of a container, ``most`` of them, but none of an attached container or an attached file with a name;
    None for a part without any, also for a container in which none are found (``bad_mime`` in ``defects``)."""
    whole, kind = part.get_content_type(), part.get_content_maintype()
    is_attached, is_too_deep = part.get_content_disposition() == "attachment", part.depth >= _MAX_DEPTH or most < 1
    if whole in _SMIME and not is_too_deep:
        signed = _signed_content(part.decoded(defects))
        if signed is None:
            defects.append("encrypted" if part.parameter("smime-type").lower() == "enveloped-data" else "bad_mime")
            return []
        contents = [signed.replace(b"\r\n", b"\n")]
    elif kind not in ("multipart", "message"):
        return [] if is_attached and part.name else None
    elif kind == "multipart" and (is_attached or (part.depth and part.name)):
        return []
    elif is_too_deep:
        defects.append("bad_mime")
        return []
    elif kind == "multipart":
        if not (contents := _pieces(part, most, defects)):
            return None
    else:
        if whole == "message/partial":  # only the first fragment, with the headers, can be read alone
            defects.append("partial_message")
            if part.parameter("number") != "1":
                return []
        contents = [part.decoded(defects).replace(b"\r\n", b"\n").lstrip(b"\n")]
    if len(contents) > most:
        defects.append("bad_mime")
    if kind == "message":
        fields, body = _read_headers(contents[0], defects)
        if fields and whole not in _MESSAGES:
            return []
        if whole in _MESSAGES[:3]:
            told = [(name, header_text(decode(value, "utf-8", []), [])) for name, value in fields if name in _FORWARDED]
            part.head = "\n".join(f"{name.title()}: {value}" for name, value in told)
        return [Part(fields, body, part.depth + 1)]
    default = "message/rfc822" if whole == "multipart/digest" else "text/plain"
    return [Part(*_read_headers(content, defects), part.depth + 1, default) for content in contents[:most]]


def _pieces(container: Part, most: int, defects: list[str]) -> list[bytes]:
    """The content between a container's delimiters, as ``_split`` returns it. If the boundary as it was folded opens no
    part, it is searched with other spacing; then any line above a content header is a delimiter (``bad_mime``)."""
    boundary = container.parameter("boundary")
    words = boundary.split()
    for candidate in dict.fromkeys((boundary, " ".join(words), "".join(words))):
        if candidate and (pieces := _split(container.body, candidate.encode(), most, defects)):
            return pieces
    defects.append("bad_mime")
    found = _DELIMITER.search(container.body)
    return _split(container.body, found[1].rstrip(), most, defects) if found else []


def _split(body: bytes, boundary: bytes, most: int, defects: list[str]) -> list[bytes]:
    """The parts between delimiters, at most two more than ``most``; ``cut_off`` in ``defects`` if none is the last."""
    text = b"\n" + body
    marks = [*islice(re.finditer(rb"\n--%b(--)?[^\S\n]*+(?=\n|\Z)" % re.escape(boundary), text), most + 2)]
    if marks and len(marks) < most and not any(mark[1] for mark in marks):
        defects.append("cut_off")
    begins = [mark.end() + 1 for mark in takewhile(lambda mark: not mark[1], marks)]
    ends = [*(mark.start() for mark in marks[1:]), len(text) - text.endswith(b"\n")]
    return [text[begin:end] for begin, end in zip(begins, ends, strict=False)]


# -- opaque signatures -------------------------------------------------------------------------------------------------


def _signed_content(cms: bytes) -> bytes | None:
    """The content of signed data in DER or BER; None if it is encrypted, detached or truncated."""
    at = cms.find(_SIGNED_DATA)
    try:
        tag, begin, _ = _tagged(cms, at + len(_SIGNED_DATA))
        if at < 0 or tag != _CONTENT:
            return None
        tag, begin, end = _tagged(cms, begin)
        if tag == _OCTETS:
            return cms[begin:end]
        pieces = bytearray()
        while tag == _PIECES and begin != end and cms[begin : begin + 2] != b"\0\0":
            kind, inside, begin = _tagged(cms, begin)
            if kind != _OCTETS:
                return None
            pieces += cms[inside:begin]
        return bytes(pieces) or None
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


# -- the text ----------------------------------------------------------------------------------------------------------


def _text_of(message: Part, defects: list[str]) -> str:
    """The texts of the parts in order, joined by line ends; one of several alternatives, preferably plain text.
    Attachments and parts with a file name are used only if there is no other text (``named_text`` in ``defects``). HTML
    that repeats another kind word for word is left out: some programs send both as ``mixed``."""
    found = _texts(message, False, defects)
    if not found and (found := _texts(message, True, defects)):
        defects.append("named_text")
    if not found:
        defects.append("no_text")
    shown = [one for one in found if _SEEN.search(one[1])] or found
    ranks = {rank for rank, _ in shown}
    if ranks == {_HTML}:
        defects.append("html_only")
    words = [tuple(_WORD.findall(text)) if len(ranks) > 1 else None for _, text in shown]
    others = {each for each, (rank, _) in zip(words, shown, strict=True) if rank != _HTML}
    return "\n".join(text for own, (rank, text) in zip(words, shown, strict=True) if rank != _HTML or own not in others)


def _texts(part: Part, named: bool, defects: list[str]) -> list[tuple[int, str]]:
    """The texts of a part, or of those inside, with their ranks, including blank ones."""
    if part.inside is None:
        if (rank := _rank(part, named)) == _NO_TEXT:
            return []
        guess = "" if part.charset else part.guess
        text = decode(part.decoded(defects), part.charset or "us-ascii", defects, guess).replace("\r\n", "\n")
        return [(rank, as_text(part.get_content_type(), text, part.parameter, defects))]
    if part.get_content_type() != "multipart/alternative":
        found = [text for one in part.inside for text in _texts(one, named, defects)]
        found = [one for one in found if one[0] != _DATA] or found
        if found and part.head:
            found[0] = found[0][0], f"[Forwarded message]\n{part.head}\n\n{found[0][1]}"
        return found

    def worst(choice: Part) -> int:
        return max((rank for one in choice.leaves() if (rank := _rank(one, named)) < _NO_TEXT), default=_DATA)

    best, most = list[tuple[int, str]](), 0
    for choice in sorted(part.inside, key=worst):
        if most > _NOTICE_CHARS or (most and worst(choice) == _DATA):
            break
        found = _texts(choice, named, defects)
        size = sum(len(_SEEN.findall(text[: 4 * _NOTICE_CHARS])) for _, text in found)
        if not best or size > most * _FULLER:
            best, most = found, size
        elif _differ(best, found):
            best += found
    return best


def _differ(*texts: list[tuple[int, str]]) -> bool:
    """Whether two alternatives say different things: as a notice that there is HTML and the HTML do."""
    one, other = ({word for _, text in each for word in _WORD.findall(text.lower())} for each in texts)
    return 2 * len(one & other) < (fewest := min(len(one), len(other))) and fewest >= _FEW_WORDS


def _rank(part: Part, named: bool) -> int:
    """The rank of a part as an email's text; ``_NO_TEXT`` also for a file unless ``named``, else for all but files."""
    kind, subtype = part.get_content_maintype(), part.get_content_subtype()
    is_file = bool(part.name) or part.get_content_disposition() == "attachment"
    if is_file is not named or kind not in ("text", "multipart"):
        return _NO_TEXT
    if kind == "multipart" or subtype == "plain":  # a container in which no parts were found is shown as it is
        return _PLAIN
    if subtype == "html":
        return _HTML
    return (_NO_TEXT if named else _DATA) if _DATA_SUBTYPE.fullmatch(subtype) else _OTHER
