"""One flag of OpenRLHF, and how flags are found by name; the table itself is in ``table``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from emailrl.errors import UsageError
from emailrl.openrlhf.table import ROWS
from emailrl.settings.names import Leaf, by_name, nearest

Takes = Literal["nothing", "one", "two", "some"]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of OpenRLHF 0.9.2, by the name it had there and the dotted one it has since 2026-04."""

    name: str
    dotted: str
    takes: Takes
    group: str
    settings: tuple[str, ...]
    """The settings here that it sets; empty where there is none."""
    default: str
    """OpenRLHF's own."""
    note: str
    """What differs, or why there is no setting."""
    is_built: bool = True
    """False: what it asks for does not exist here yet."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Its settings' places in the tree."""
        return tuple(by_name()[key] for key in self.settings)


_TAKES: Final[Mapping[str, Takes]] = {"": "nothing", "X": "one", "L H": "two", "X …": "some"}


def _flags() -> tuple[Flag, ...]:
    found = []
    for group, rows in ROWS.items():
        for written, dotted, settings, default, note in rows:
            name, _, value = written.partition(" ")
            built = settings != "not built yet"
            keys = tuple(settings.split()) if built else ()
            found.append(Flag(name, dotted, _TAKES[value], group, keys, default, note, built))
    return tuple(found)


FLAGS: Final = _flags()
"""Every flag this knows, in the order of the page."""

NAMES: Final[Mapping[str, Flag]] = {alias: flag for flag in FLAGS for alias in (flag.name, flag.dotted) if alias}


def find_flag(name: str) -> Flag:
    """The flag of a name with or without ``--``, old or dotted; raises UsageError naming the nearest for another."""
    bare = re.sub("^-+", "", name).replace("-", "_")
    if bare in NAMES:
        return NAMES[bare]
    near = nearest(bare, NAMES)
    hint = f"Did you mean --{near}?" if near else "docs/openrlhf.md lists those known."
    raise UsageError(f"Unknown flag of OpenRLHF: {name}.", hint)
