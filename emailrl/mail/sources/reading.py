"""Defines what every source yields (a ``RawEmail``, or ``Skipped`` with a reason), and opens compressed files."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class RawEmail:
    """A message before any filter. Addresses are bare and in lower case, in the order of the header, including
    repeats."""

    message_id: str
    subject: str
    from_address: str
    to: list[str]
    cc: list[str]
    bcc: list[str]
    date: datetime | None  # aware, in UTC; None if the header is missing or cannot be read
    body: str
    file_name: str = ""
    defects: tuple[str, ...] = ()  # kinds of defects that were found in the message and repaired
    is_research: bool = field(default=True, compare=False)
    """Whether it is from a research corpus, to which ART-E's filters apply, rather than a person's own mail."""
    names: dict[str, str] = field(default_factory=dict)  # display names as written, by address
    attachments: list[str] = field(default_factory=list)  # names of the attached files
    references: list[str] = field(default_factory=list)  # Message-IDs of References and In-Reply-To
    machine: str = ""  # what kind of program sent it (``headers.machine_of``); empty if a person did
    labels: list[str] = field(default_factory=list, compare=False)  # Gmail's
    files: list[Any] = field(default_factory=list, compare=False, repr=False)  # ``message.Part`` of each attached file


@dataclass(slots=True)
class Skipped:
    """A message that was seen but not yielded, and the reason."""

    reason: str
    file_name: str = ""


MADE_UP = "@made-up.emailrl>"  # the end of a generated Message-ID
MAX_MESSAGE_BYTES = 50 * 1024 * 1024  # larger messages are skipped as ``too_large``
ROW_SHARE = 4
"""How many times less a row may have: it holds text alone, and a list in it takes twenty times its bytes of memory."""
MAX_READ_BYTES = 4 * 1024 * 1024  # of the headers of a message or part, and of all texts of a message; more is cut
BROKEN = (EOFError, zlib.error, lzma.LZMAError, OSError)  # errors raised by reading a truncated or damaged file
COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\0": lzma.open, b"BZh": bz2.open}


def made_up_id(content: bytes) -> str:
    """Return a Message-ID determined by the content without trailing line ends, in which archives differ."""
    return f"<{hashlib.sha256(content.rstrip()).hexdigest()[:32]}{MADE_UP}"


def decompressed(file: io.BufferedReader) -> io.BufferedReader:
    """Return the decompressed content of a gzip, xz or bzip2 file (by its first bytes), or the file itself."""
    magic = file.read(6)
    file.seek(0)
    for start, opener in COMPRESSED.items():
        if magic.startswith(start):
            stream = opener(file, "rb")
            stream.readinto = stream.readinto1  # as it comes: reading ahead must not lose data before a truncation
            return io.BufferedReader(stream, 1 << 20)
    return file


def start_of(path: Path, size: int, *, line: bool = False) -> bytes:
    """Return the first bytes, or the first ``line``, of a file's decompressed content; less of a damaged file."""
    start = b""
    with path.open("rb") as file, suppress(*BROKEN):
        stream = decompressed(file)
        if line:
            return stream.readline(size)
        while len(start) < size and (piece := stream.read(min(512, size - len(start)))):
            start += piece
    return start
