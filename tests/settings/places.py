"""Where a setting stands in the tree."""

from __future__ import annotations

from typing import Any

from emailrl.settings import Settings


def at(settings: Settings, place: str) -> Any:
    section, field = place.split(".")
    return getattr(getattr(settings, section), field)
