"""Reads an mbox as a stream: messages, each under an envelope line ``From sender date`` (RFC 4155).

In practice the end of a message is ambiguous, since bodies also contain lines that begin with ``From ``. A line is
taken as an envelope if it ends in a date and the next line is a header, or if it has no date but a sender, a dash or
nothing (as Thunderbird writes it) and the next line is a header that every mail program knows. All other lines stay in
the body. The empty line that RFC 4155 requires before an envelope is only required for a sender without a date, since
some programs omit it. One ``>`` is removed from lines such as ``>From`` (mboxrd).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from emailrl.mail.sources.reading import BROKEN, Reading, Skipped, decompressed, until_broken

_READ_BYTES = 1 << 20
_TIME = rb" +\d{1,2}:\d\d(?::\d\d)?"
_ZONE = rb"(?: +(?:[A-Z]{1,5}|[+-]\d{4}))"
_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
# asctime, with a zone before or after the year as some write it, or a date as in mail headers.
_DATE = (
    rb"(?:%(month)b +\d{1,2}%(time)b%(zone)b{0,2} +\d{4}%(zone)b?|\d{1,2} +%(month)b +\d{4}%(time)b%(zone)b{0,2})"
    % {b"month": _MONTH, b"time": _TIME, b"zone": _ZONE}
)
_HEADER = rb">?From |[!-9;-~]{1,200}[ \t]{0,9}:"
_KNOWN_HEADER = (
    rb"(?:from|to|cc|bcc|date|subject|message-id|received|return-path|reply-to|sender|delivered-to|mime-version"
    rb"|content-[a-z-]{1,40}|x-[a-z0-9-]{1,80}|status|dkim-signature|list-[a-z]{1,40}|in-reply-to|references)"
    rb"[ \t]{0,9}:"
)
_FROM = rb"From (?![ \t]{0,9}:)"
"""Not the header ``From :``, which may have spaces before its colon."""
_DATED = (
    rb"%b[^\r\n]{0,900}?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? +%b(?: remote from [^\s]{1,200})?[ \t]{0,9}\r?\n(?:%b)"
    % (_FROM, _DATE, _HEADER)
)
_BARE = _FROM + rb"-?[ \t]{0,9}\r?\n(?i:" + _KNOWN_HEADER + rb")"
_UNDATED = (
    rb"(?:(?<=\n\n)|(?<=\r\n\r\n))%b\S{1,300}(?<!:)(?:[ \t][^\r\n]{0,200}\d:\d\d[\d:. +A-Z-]{0,40})?"
    rb"[ \t]{0,9}\r?\n(?i:%b)" % (_FROM, _KNOWN_HEADER)
)
_ENVELOPE = re.compile(_DATED + rb"|" + _BARE + rb"|" + _UNDATED)
_START = re.compile(rb"(?:\xef\xbb\xbf)?" + _FROM + rb"[^\r\n]{0,900}\r?\n(?:" + _HEADER + rb")")
MBOX_STARTS = (b"From ", b"\xef\xbb\xbfFrom ")
_ENVELOPE_BYTES = 2048
"""Maximum length of a match of ``_ENVELOPE``."""
_STATUS = b"\nX-Mozilla-Status:"
_EXPUNGED = 0x0008
"""Thunderbird's flag for an email that will be removed when its folder is compacted."""
_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)


def is_mbox(start: bytes) -> bool:
    """Whether content is an mbox, by its start: an envelope line and a header."""
    return start.startswith(MBOX_STARTS) and _START.match(start) is not None


def read_mbox(path: Path, file: IO[bytes], name: str, reading: Reading) -> Iterator[tuple[str, bytes] | Skipped]:
    """Yield the messages of an mbox, plain or compressed, as (``name#number``, bytes).

    A truncated compressed file ends as in ``until_broken``. A truncated plain file cannot be detected: its last message
    is shorter.
    """
    stream: Stream = decompressed(file)  # type: ignore[assignment]  # a BufferedReader either way
    messages = messages_of(stream, name, reading.max_message_bytes)
    return until_broken(messages, path, reading, unit="messages", name=name)


class Stream(Protocol):
    """The byte stream that an mbox is read from."""

    def read1(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes as soon as there are any, and none at the end."""
        ...


def messages_of(stream: Stream, name: str, largest: int) -> Iterator[tuple[str, bytes] | Skipped]:
    """Yield the messages of a decompressed mbox as (``name#number``, bytes).

    Messages of more than ``largest`` bytes are ``Skipped("too_large")``; those that Thunderbird has deleted but not yet
    removed from the file are ``Skipped("deleted")``.
    """
    for number, piece in enumerate(_pieces(stream, largest), 1):
        if piece is None:
            yield Skipped("too_large", f"{name}#{number}")
        elif _is_deleted(piece):
            yield Skipped("deleted", f"{name}#{number}")
        else:
            yield f"{name}#{number}", _message(piece)


def _pieces(stream: Stream, largest: int) -> Iterator[bytes | None]:
    """The content from one envelope line to the next, or None if it exceeds ``largest`` bytes.

    If the stream raises an error, complete pieces are yielded first. Holds at most ``largest`` bytes and one block.
    """
    buffer = bytearray()
    looked = 0  # no envelope begins before it except the first
    dropped = False  # whether bytes of the first message in the buffer were discarded
    ended, broken = False, None
    while not ended:
        try:
            block = stream.read1(_READ_BYTES)
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
    if at < 0 or any(piece.find(end, 0, at + 1) >= 0 for end in (b"\n\n", b"\r\n\r\n")):  # in the body
        return False
    try:
        return bool(int(piece[at + len(_STATUS) :].split(None, 1)[0], 16) & _EXPUNGED)
    except (ValueError, IndexError):
        return False


def _message(piece: bytes) -> bytes:
    """The message below its envelope line, without the final empty line and with ``>From`` unquoted."""
    message = piece.partition(b"\n")[2]
    for ending in (b"\r\n\r\n", b"\n\n"):
        if message.endswith(ending):
            message = message[: -len(ending) // 2]
            break
    return _QUOTED_FROM.sub(rb"\1", message) if b">From " in message else message
