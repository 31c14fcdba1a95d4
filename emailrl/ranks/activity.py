"""What a rank is doing while it works on its own, and how that failed: raised an error, or made no progress."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from emailrl.errors import EmailRLError


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the work of one rank ends that of all."""

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
        """The error to raise on rank 0."""
        return EmailRLError(self.message, self.hint)


class Activity:
    """What this rank is doing, noted by the thread that works and read by the one that exchanges pulses."""

    def __init__(self) -> None:
        self._noted: tuple[str, float] | None = ("starting", time.monotonic())

    def note(self, what: str) -> None:
        """There is progress; ``what`` comes next, as part of a sentence."""
        self._noted = what, time.monotonic()

    def end(self) -> None:
        """The work is done."""
        self._noted = None

    def stalled(self, who: str, limit: float) -> Failure | None:
        """The failure of ``who`` if its last progress is more than ``limit`` seconds ago."""
        if (noted := self._noted) is None or (seconds := time.monotonic() - noted[1]) <= limit:
            return None
        return Failure(
            f"{who} made no progress in its rollouts for {limit:g} s: {noted[0]}.",
            "Raise RANK_TIMEOUT if a turn may take longer. Continue from the last checkpoint with --resume latest.",
            seconds,
        )


def said(error: Exception) -> tuple[str, str]:
    """How the other ranks report an error: message and hint."""
    if isinstance(error, EmailRLError):
        return error.message, error.hint
    return f"{type(error).__name__}: {first_line(error)}", ""


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).strip().partition("\n")[0]
