"""Retry policy: which errors to retry, and how long to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

T = TypeVar("T")
LONGEST_WAIT: Final = 60.0
"""Seconds; waits double from one second up to this, even if the server asks for more."""
sleep = asyncio.sleep
_LATER: Final = (408, 409, 425, 429)


class Failed(Exception):
    """One attempt failed: why, the reply's HTTP status if there is one, and the seconds that the server asks for."""

    def __init__(self, why: str, status: int | None = None, wait: float = 0.0) -> None:
        super().__init__(why)
        self.why, self.status, self.wait = why, status, wait


async def retried(
    attempt: Callable[[], Awaitable[T]], retries: int, wait: Callable[[float], Awaitable[None]] | None = None
) -> T | Failed:
    """The result of ``attempt``, or its last failure after ``retries`` more attempts, or one that retries cannot mend.

    A failure is returned, since an error raised while it is handled would carry the request, and with it the key.
    """
    tries = 1
    while True:
        try:
            return await attempt()
        except Failed as error:
            failed = error
        if tries > retries or (failed.status is not None and not may_pass(failed.status)):
            return failed
        await (wait or sleep)(pause(tries, failed.wait))
        tries += 1


def may_pass(status: int) -> bool:
    """Whether a request that got this HTTP status may succeed on retry."""
    return status in _LATER or status >= 500


def pause(tries: int, asked_for: float = 0.0) -> float:
    """Seconds to wait after ``tries`` attempts: 1, 2, 4, … or what the server ``asked_for``, if longer."""
    return min(LONGEST_WAIT, max(asked_for, 2.0 ** min(tries - 1, 30)))


def pause_asked_for(headers: Mapping[str, str]) -> float:
    """The seconds in a reply's ``Retry-After``; 0 if missing or unreadable."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return 0.0
