"""A guard against work that does not end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GENEROUS = 300
"""Seconds: work in proportion to the text ends in a tenth of it on a busy machine, time squared would take hours."""


@contextmanager
def must_end(seconds: float = GENEROUS) -> Iterator[None]:
    """Fail where the block has not ended after so many seconds by the clock; in the main thread."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
