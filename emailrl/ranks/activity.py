"""What rollouts are doing while others wait for them, and how they failed: raised an error, or made no progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from emailrl.base.errors import EmailRLError
from emailrl.base.plain import first_line

CONTINUE: Final = "If a checkpoint was saved, continue from it with --resume latest."
"""What to do about a rank that is lost."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why rollouts must end."""

    message: str
    hint: str = ""
    seconds: float = math.inf
    """Without progress; infinite for an error, which takes precedence."""

    @classmethod
    def of(cls, rank: int, error: Exception) -> Failure:
        """An error of ``rank``, as the other ranks report it."""
        message, hint = said(error)
        return cls(f"Rank {rank}: {message}", hint)

    def as_error(self) -> EmailRLError:
        """The error to raise."""
        return EmailRLError(self.message, self.hint)


class Activity:
    """What a thread is working on, as noted by itself; other threads check whether it makes progress."""

    def __init__(self) -> None:
        self._noted: _Note | None = None

    def note(self, what: str, count: Callable[[], int] = lambda: 0) -> None:
        """There is progress; ``what`` comes next, as part of a sentence. While ``count`` grows, there is more."""
        self._noted = _Note(what, count)

    def end(self) -> None:
        """Nothing is under way."""
        self._noted = None

    @property
    def is_under_way(self) -> bool:
        """Whether any work is under way."""
        return self._noted is not None

    def stalled(self, who: str, limit: float) -> Failure | None:
        """The failure of ``who`` if there has been no progress for more than ``limit`` seconds. For one thread only."""
        if (noted := self._noted) is None or (seconds := noted.seconds()) <= limit:
            return None
        return Failure(
            f"{who} made no progress for {limit:g} s: {noted.what}.",
            f"If that may take longer, raise RANK_TIMEOUT. {CONTINUE}",
            seconds,
        )


class _Note:
    def __init__(self, what: str, count: Callable[[], int]) -> None:
        self.what, self._count = what, count
        self._last, self._since = count(), time.monotonic()

    def seconds(self) -> float:
        """Since the last progress."""
        if (now := self._count()) != self._last:
            self._last, self._since = now, time.monotonic()
        return time.monotonic() - self._since


def said(error: Exception) -> tuple[str, str]:
    """How the other ranks report an error: message and hint."""
    if isinstance(error, EmailRLError):
        return error.message, error.hint
    name, text = type(error).__name__, first_line(error)
    return (text if text == name else f"{name}: {text}"), ""
