"""One result of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """One item checked, what was found, and the remedy if something is wrong."""

    area: str
    name: str
    status: Status
    """``note`` works, but may not be what was intended."""
    found: str
    remedy: str = ""
    essential: bool = False
    """Whether every command needs it."""

    @property
    def fatal(self) -> bool:
        """Whether it prevents emailrl from working."""
        return self.essential and self.status in ("missing", "broken")
