"""The result of converting an OpenRLHF command line: settings, their sources, and notes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from emailrl.openrlhf.flags import Given


@dataclass(slots=True)
class Conversion:
    """A command line converted to settings."""

    values: dict[str, Any] = field(default_factory=dict)
    """Setting (by its unique name) → value."""
    flags: dict[str, str] = field(default_factory=dict)
    """Setting → the flag it came from, or another comment for its line."""
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, why: str) -> None:
        """Set a value; an infinite bound of the reward clip is left unset."""
        if key in ("reward_clip_low", "reward_clip_high") and math.isinf(value):
            self.notes.append(f"{why}: an infinite bound is no bound ({key} omitted)")
        else:
            self.values[key], self.flags[key] = value, why

    def drop(self, keys: Iterable[str], note: str) -> None:
        """Remove settings, and note why for those present."""
        present = [key for key in keys if key in self.values]
        for key in present:
            self.notes.append(f"{self.flags.pop(key)}: {note}")
            del self.values[key]


Special = Callable[[list[str], Given, Conversion], None]
