"""Reads files of many messages as streams, nothing being extracted to disk: mboxes and tar archives.

An mbox has each message under an envelope line ``From sender date`` (RFC 4155), but bodies too contain lines that begin
with ``From ``. A line is taken as an envelope if it ends in a date and the next line is a header, or if it has no date
but a sender, a dash or nothing (as Thunderbird writes it) and the next line is a header that every mail program knows.
Only a sender without a date needs the empty line before it that RFC 4155 requires, since some programs omit it. One
``>`` is removed from lines such as ``>From`` (mboxrd).

Headers of archives are read here rather than by ``tarfile``, which spends more time on a member than parsing its mail
takes and accepts an archive truncated between two members as complete.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import IO

from emailrl.mail.sources.reading import BROKEN, Skipped

READ_BYTES = 1 << 20
_TIME = rb" +\d{1,2}:\d\d(?::\d\d)?"
_ZONE = rb"(?: +(?:[A-Z]{1,5}|[+-]\d{4}))"
_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
# asctime, with a zone before or after the year as some write it, or a date as in mail headers.
_DATE = (
    rb"(?:%(month)b +\d{1,2}%(time)b%(zone)b{0,2} +\d{4}%(zone)b?|\d{1,2} +%(month)b +\d{4}%(time)b%(zone)b{0,2})"
    % {b"month": _MONTH, b"time": _TIME, b"zone": _ZONE}
)
_HEADER = rb">?From |[!-9;-~]{1,200}[ \t]{0,9}:"
KNOWN_HEADER = (
    rb"(?:from|to|cc|bcc|date|subject|message-id|received|return-path|reply-to|sender|delivered-to|mime-version"
    rb"|content-[a-z-]{1,40}|x-[a-z0-9-]{1,80}|status|dkim-signature|list-[a-z]{1,40}|in-reply-to|references)"
    rb"[ \t]{0,9}:"
)
_FROM = rb"From (?![ \t]{0,9}:)"  # not the header ``From :``, which may have spaces before its colon
_DATED = (
    rb"%b[^\r\n]{0,900}?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? +%b(?: remote from [^\s]{1,200})?[ \t]{0,9}\r?\n(?:%b)"
    % (_FROM, _DATE, _HEADER)
)
_BARE = _FROM + rb"-?[ \t]{0,9}\r?\n(?i:" + KNOWN_HEADER + rb")"
_UNDATED = (
    rb"(?:(?<=\n\n)|(?<=\r\n\r\n))%b\S{1,300}(?<!:)(?:[ \t][^\r\n]{0,200}\d:\d\d[\d:. +A-Z-]{0,40})?"
    rb"[ \t]{0,9}\r?\n(?i:%b)" % (_FROM, KNOWN_HEADER)
)
_ENVELOPE = re.compile(_DATED + rb"|" + _BARE + rb"|" + _UNDATED)
_START = re.compile(rb"(?:\xef\xbb\xbf)?" + _FROM + rb"[^\r\n]{0,900}\r?\n(?:" + _HEADER + rb")")
MBOX_STARTS = (b"From ", b"\xef\xbb\xbfFrom ")
_ENVELOPE_BYTES = 2048  # maximum length of a match of ``_ENVELOPE``
_STATUS = b"\nX-Mozilla-Status:"
_EXPUNGED = re.compile(rb"[ \t]*[0-9a-fA-F]*[89a-fA-F]\s")  # Thunderbird's flag 8: removed when it compacts the folder
_HEADERS_END = re.compile(rb"\n\r?\n")
_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)

BLOCK = 512
_END = bytes(BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_EXTENSIONS = (b"L", b"K", b"x", b"g")  # GNU long names, pax records: they describe the next member
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_UNFINISHED = re.compile(r"(?:.*/)?tmp/\d+\.[^/.]+\.[^/]+", re.DOTALL)  # a delivery to a Maildir
_MAX_EXTENSION = 1024 * 1024
_DAMAGED, _CUT_OFF = "a member's header is damaged", "the archive ends inside a member"


def is_mbox(start: bytes) -> bool:
    """Whether content is an mbox, by its start: an envelope line and a header."""
    return start.startswith(MBOX_STARTS) and _START.match(start) is not None


def messages_of(blocks: Iterator[bytes], name: str, largest: int) -> Iterator[tuple[str, bytes] | Skipped]:
    """Yield the messages of a decompressed mbox as (``name#number``, bytes), or ``Skipped``: those of more than
    ``largest`` bytes, and those that Thunderbird has deleted. Of a truncated one, the last message is shorter."""
    for number, piece in enumerate(_pieces(blocks, largest), 1):
        if piece is None:
            yield Skipped("too_large", f"{name}#{number}")
        elif _is_deleted(piece):
            yield Skipped("deleted", f"{name}#{number}")
        else:
            message = piece.partition(b"\n")[2]  # without the envelope line and the final empty line
            if message.endswith((b"\n\n", b"\r\n\r\n")):
                message = message[:-1].removesuffix(b"\r")
            yield f"{name}#{number}", _QUOTED_FROM.sub(rb"\1", message) if b">From " in message else message


def _pieces(blocks: Iterator[bytes], largest: int) -> Iterator[bytes | None]:
    """The content from one envelope line to the next, or None if it exceeds ``largest`` bytes. If reading fails,
    complete pieces are yielded first. Holds at most ``largest`` bytes and one block."""
    buffer = bytearray()
    looked = 0  # no envelope begins before it except the first
    dropped = False  # whether bytes of the first message in the buffer were discarded
    ended, broken = False, None
    while not ended:
        try:
            block = next(blocks, b"")
        except BROKEN as error:
            block, broken = b"", error
        ended = not block
        buffer += block
        last = len(buffer) if ended else max(len(buffer) - _ENVELOPE_BYTES, 0)
        start = 0
        while (at := buffer.find(b"\nFrom ", looked, last)) >= 0:
            looked = at + 1
            if _ENVELOPE.match(buffer, looked):
                yield None if dropped or looked - start > largest else bytes(buffer[start:looked])
                start, dropped = looked, False
        looked = max(looked, last - 8, 0)  # an empty line and "From" may straddle two blocks
        if looked - start > largest:
            start, dropped = looked, True
        del buffer[:start]
        looked -= start
    if broken is not None:
        raise broken
    yield None if dropped or len(buffer) > largest else bytes(buffer)


def _is_deleted(piece: bytes) -> bool:
    at = piece.find(_STATUS)
    return at >= 0 and bool(_EXPUNGED.match(piece, at + len(_STATUS)) and not _HEADERS_END.search(piece, 0, at + 1))


def is_tar_header(block: bytes) -> bool:
    """Whether a block of 512 bytes is a tar header with a correct checksum: the sum of its bytes with that field as
    spaces. The lower half of Adler-32 is that sum plus one, modulo 65521, and much faster than a loop."""
    if len(block) != BLOCK or block == _END:
        return False
    try:
        checksum = int(block[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        return False
    adler = zlib.adler32(block[156:], zlib.adler32(b"        ", zlib.adler32(block[:148])))
    return adler & 0xFFFF == (checksum + 1) % 65521


def _number(field: bytes) -> int:
    if field[0] >= 0x80:  # GNU's base-256 form of large numbers
        return int.from_bytes(field, "big") & ~(1 << (8 * len(field) - 1))
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise EOFError(_DAMAGED) from None


def _blocks(stream: IO[bytes], size: int) -> Iterator[bytes]:
    """A member's data in pieces, without the padding after it; none if the size is negative."""
    while size > 0:
        padded = min(size + -size % BLOCK, READ_BYTES)
        data = stream.read(padded)
        if data:
            yield data[:size]
        if len(data) < padded:
            raise EOFError(_CUT_OFF)
        size -= padded


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", "replace")


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    records = {}
    while data and data[0]:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            raise EOFError(_DAMAGED)
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key] = value
        data = data[int(length) :]
    return records


def _members(stream: IO[bytes]) -> Iterator[tuple[str, int, bytes, Iterator[bytes]]]:
    """The members' names, sizes, kinds and data; what the caller does not read of it is passed over."""
    name, size = None, None
    while (block := stream.read(BLOCK)) and block != _END:
        if not is_tar_header(block):
            raise EOFError(_DAMAGED)
        kind, own_size = block[156:157], _number(block[124:136])
        if kind in _EXTENSIONS:
            if own_size > _MAX_EXTENSION:
                raise EOFError(_DAMAGED)
            data = b"".join(_blocks(stream, own_size))
            if kind == b"L":
                name = _text(data)
            elif kind == b"x":
                records = _pax_records(data)
                name = _text(records[b"path"]) if b"path" in records else name
                size = int(records[b"size"]) if records.get(b"size", b"").isdigit() else size
            continue
        if name is None:
            name = _text(block[:100])
            if block[257:263] == b"ustar\0" and block[345]:
                name = f"{_text(block[345:500])}/{name}"
        size = own_size if size is None else size
        blocks = _blocks(stream, 0 if kind in _WITHOUT_DATA else size)
        yield name, size, kind, blocks
        for _ in blocks:
            continue
        name, size = None, None
    while stream.read(1 << 20):  # to the end, which holds the checksum of the stream
        continue


def read_archive(stream: IO[bytes], inside: str, largest: int) -> Iterator[tuple[str, bytes] | Skipped]:
    """Yield the messages of an archive, and of mboxes in it, as (name after ``inside``, bytes); ``EOFError`` if cut."""
    for member, size, kind, blocks in _members(stream):
        name = inside + member
        if name.endswith("/"):
            continue
        if kind not in _REGULAR:
            if kind != b"5":  # links, devices, pipes, sparse files
                yield Skipped("not_a_file", name)
        elif _UNFINISHED.fullmatch(member):
            yield Skipped("not_mail", name)
        elif is_mbox(start := next(blocks, b"")):
            yield from messages_of(chain((start,), blocks), name, largest)
        elif size > largest:
            yield Skipped("too_large", name)
        else:
            yield name, b"".join([start, *blocks]) if size > len(start) else start
