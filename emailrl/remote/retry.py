"""Asking a server again: after what, and how long after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LONGEST_WAIT: Final = 60.0
"""Seconds; waits double from one second up to this, and a server that asks for more is asked sooner."""
_LATER: Final = (408, 409, 425, 429)


def may_pass(status: int) -> bool:
    """Whether a server that answers with this HTTP status may answer otherwise soon."""
    return status in _LATER or status >= 500


def pause(tries: int, asked_for: float = 0.0) -> float:
    """Seconds to wait after so many ``tries``: 1, 2, 4, … or as many as the server ``asked_for``, whichever is more."""
    return min(LONGEST_WAIT, max(asked_for, 2.0 ** min(tries - 1, 30)))


def pause_asked_for(headers: Mapping[str, str]) -> float:
    """The seconds that a reply's ``Retry-After`` names; 0 where it says nothing readable."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return 0.0
