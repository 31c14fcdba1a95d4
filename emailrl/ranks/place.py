"""Which of the ranks a process is, as torchrun tells it in its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Place:
    """One process among several; ranks are counted over all hosts, local ranks on one."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read the place of this process; without torchrun it is alone."""
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        return cls(*(int(environ.get(name, default)) for name, default in names.items()))
