"""What the doctor says about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at, what was found, and what to do where it is not as it should be."""

    area: str
    name: str
    status: Status
    """``note`` works as it is, but may not be what was wanted."""
    found: str
    remedy: str = ""
    essential: bool = False
    """Without it no command works."""

    @property
    def fatal(self) -> bool:
        """Whether emailrl cannot work because of it."""
        return self.essential and self.status in ("missing", "broken")
