"""Retry policy: which errors to retry, and how long to wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LONGEST_WAIT: Final = 60.0
"""Seconds; waits double from one second up to this, even if the server asks for more."""
_LATER: Final = (408, 409, 425, 429)


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
