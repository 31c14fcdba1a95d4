"""Reads a tar archive of mail, plain or compressed, as a stream; nothing is extracted to disk.

Headers are read here rather than by ``tarfile``, which spends more time on a member than parsing its mail takes and
accepts an archive truncated between two members as complete.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from emailrl.mail.sources.mbox import is_mbox, messages_of
from emailrl.mail.sources.reading import Reading, Skipped, decompressed, until_broken

BLOCK = 512
_END = bytes(BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_EXTENSIONS = (b"L", b"K", b"x", b"g")  # GNU long names, pax records: they describe the next member
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_MAX_EXTENSION = 1024 * 1024
_START_BYTES = 128 * BLOCK
"""A larger member is read in pieces if it is an mbox."""
_Header = tuple[str, int, bytes]
"""Name, size in bytes, kind of member."""


def is_tar_header(block: bytes) -> bool:
    """Whether a block of 512 bytes is a tar header with a correct checksum."""
    return len(block) == BLOCK and block != _END and _checksum_holds(block)


def _checksum_holds(block: bytes) -> bool:
    """Whether the sum of a header's bytes, with the checksum field as spaces, equals that field.

    The lower half of Adler-32 is the sum of the bytes plus one, modulo 65521, and much faster than a loop.
    """
    try:
        checksum = int(block[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        return False
    return (
        zlib.adler32(block[156:], zlib.adler32(b"        ", zlib.adler32(block[:148]))) & 0xFFFF
        == (checksum + 1) % 65521
    )


def _number(field: bytes) -> int:
    if field[0] >= 0x80:  # GNU's base-256 form of large numbers
        return int.from_bytes(field, "big") & ~(1 << (8 * len(field) - 1))
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise EOFError("a member's header is damaged") from None


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the archive ends inside a member")
    return data


def _skip(stream: IO[bytes], size: int) -> None:
    while size > 0:
        size -= len(_read(stream, min(size, 1 << 20)))


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", "replace")


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    records = {}
    while data and data[0]:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            raise EOFError("a member's header is damaged")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key] = value
        data = data[int(length) :]
    return records


def _headers(stream: IO[bytes]) -> Iterator[_Header]:
    """The members' headers; the caller reads a member's data before asking for the next header."""
    name, size = None, None
    while True:
        block = stream.read(BLOCK)
        if not block or block == _END:
            while stream.read(1 << 20):  # to the end, which holds the checksum of the stream
                continue
            return
        if len(block) < BLOCK or not _checksum_holds(block):
            raise EOFError("a member's header is damaged")
        kind, own_size = block[156:157], _number(block[124:136])
        if kind in _EXTENSIONS:
            if own_size > _MAX_EXTENSION:
                raise EOFError("a member's header is damaged")
            data = _read(stream, _padded(own_size))[:own_size]
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
        yield name, own_size if size is None else size, kind
        name, size = None, None


class _Member:
    """A member of which the first bytes are already read."""

    def __init__(self, stream: IO[bytes], start: bytes, size: int) -> None:
        self._stream, self._start, self.left = stream, start, size - len(start)

    def read1(self, size: int) -> bytes:
        """Return the first bytes, then up to ``size`` of the following ones."""
        data, self._start = self._start, b""
        if not data and self.left:
            data = self._stream.read(min(size, self.left))
            if not data:
                raise EOFError("the archive ends inside a member")
            self.left -= len(data)
        return data


def _members(stream: IO[bytes], largest: int) -> Iterator[tuple[str, bytes] | Skipped]:
    for name, size, kind in _headers(stream):
        if kind not in _REGULAR or name.endswith("/"):
            if kind not in _WITHOUT_DATA:
                _skip(stream, _padded(size))
            if kind != b"5" and not name.endswith("/"):  # links, devices, pipes, sparse files
                yield Skipped("not_a_file", name)
            continue
        start = _read(stream, min(_padded(size), _START_BYTES))
        if size <= len(start):
            start = start[:size]
        member = _Member(stream, start, size)
        if is_mbox(start):
            yield from messages_of(member, name, largest)
        elif size > largest:
            yield Skipped("too_large", name)
        else:
            yield name, start + _read(stream, member.left) if member.left else start
            member.left = 0
        if size > _START_BYTES:
            _skip(stream, member.left + _padded(size) - size)


def read_archive(path: Path, file: IO[bytes], reading: Reading) -> Iterator[tuple[str, bytes] | Skipped]:
    """Yield the messages of an archive in order as (name, bytes); an mbox member yields all of its messages.

    A truncated or damaged archive ends as in ``until_broken``.
    """

    def where() -> str:
        return f"{file.tell():,} of its {path.stat().st_size:,} bytes read"

    members = _members(decompressed(file), reading.max_message_bytes)
    return until_broken(members, path, reading, unit="messages", where=where)
