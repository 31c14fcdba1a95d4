"""Defines what every source yields, and opens compressed files: a ``RawEmail``, or ``Skipped`` with a reason."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from emailrl.base.errors import EmailRLError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer


@dataclass(frozen=True)
class Reading:
    """Options for reading a source."""

    allow_truncated: bool = False
    """Whether a truncated file just ends instead of raising an error."""
    max_message_bytes: int = 100 * 1024 * 1024
    """Larger messages are skipped as ``too_large``."""


@dataclass(slots=True)
class RawEmail:
    """A message as a source yields it, before any filter.

    Addresses are bare and in lower case, in the order of the header, including repeats.
    """

    message_id: str
    subject: str
    from_address: str
    to: list[str]
    cc: list[str]
    bcc: list[str]
    date: datetime | None
    """Aware, in UTC; None if the header is missing or cannot be read."""
    body: str
    file_name: str = ""
    defects: tuple[str, ...] = ()
    """Kinds of defects that were found in the message and repaired."""
    is_research: bool = field(default=True, compare=False)
    """Whether the message is from a research corpus rather than a person's own mail.

    ART-E's filters apply to a corpus unless the settings say otherwise.
    """


@dataclass(slots=True)
class Skipped:
    """A message that was seen but not yielded, and the reason."""

    reason: str
    file_name: str = ""


MADE_UP = "@made-up.emailrl>"
"""The end of a generated Message-ID."""


def made_up_id(content: bytes) -> str:
    """Return a Message-ID for a message without one, determined by its content.

    Trailing line ends do not count, because archives differ in them.
    """
    return f"<{hashlib.sha256(content.rstrip()).hexdigest()[:32]}{MADE_UP}"


BROKEN = (EOFError, zlib.error, lzma.LZMAError, OSError)
"""Errors raised by reading a truncated or damaged file."""

COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}

T = TypeVar("T")


class _AsItComes(io.RawIOBase):
    """Decompressed data as it arrives: reading ahead must not lose data before a truncation."""

    def __init__(self, stream: gzip.GzipFile | lzma.LZMAFile | bz2.BZ2File) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        data = self._stream.read1(len(view))
        view[: len(data)] = data
        return len(data)


def decompressed(file: IO[bytes]) -> IO[bytes]:
    """Return the decompressed content of a gzip, xz or bzip2 file (by its first bytes), or the file itself."""
    magic = file.read(6)
    file.seek(0)
    for start, opener in COMPRESSED.items():
        if magic.startswith(start):
            return io.BufferedReader(_AsItComes(opener(file, "rb")), 1 << 20)
    return file


def start_of(path: Path, size: int) -> bytes:
    """Return the first bytes of a file's decompressed content; fewer if it is shorter or damaged."""
    start = b""
    with path.open("rb") as file:
        try:
            stream = decompressed(file)
            while len(start) < size and (piece := stream.read(min(512, size - len(start)))):
                start += piece
        except BROKEN:
            return start
    return start


def until_broken(
    items: Iterator[T],
    path: Path,
    reading: Reading,
    *,
    unit: str,
    name: str = "",
    where: Callable[[], str] | None = None,
) -> Iterator[T | Skipped]:
    """Yield the items of a file until it breaks off with one of ``BROKEN``.

    Raises ``EmailRLError`` there, which counts the complete items by their ``unit`` and says ``where``, or why, reading
    ended. With ``allow_truncated`` the last item is ``Skipped("truncated")`` instead, named after the file's ``name``.
    """
    seen = 0
    try:
        for item in items:
            yield item
            seen += 1
    except BROKEN as error:
        if not reading.allow_truncated:
            raise EmailRLError(
                f"{path} is truncated or damaged after {seen:,} complete {unit} ({where() if where else error}).",
                "Nothing was written. Download the file again, or keep the readable part with --allow-truncated.",
            ) from error
        yield Skipped("truncated", name and f"{name}#{seen + 1}")
