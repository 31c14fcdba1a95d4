"""A reply's body, bounded: a server may send without end, or a byte at a time."""

from __future__ import annotations

import time


class EndlessReply(Exception):
    """A body longer, or slower, than any that is waited for."""


class Body:
    """Takes a body's pieces, ``max_bytes`` and ``seconds`` at most, counted from the first moment."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self, piece: bytes) -> None:
        """Keep a piece; EndlessReply where it is one too many."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > self._max_bytes:
            raise EndlessReply(f"the reply is longer than {self._max_bytes >> 20} MiB")
        if time.monotonic() > self._deadline:
            raise EndlessReply(f"no whole reply within {self._seconds:g} s")

    def whole(self) -> bytes:
        """What was taken."""
        return b"".join(self._pieces)
