"""A process's rank, from torchrun's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Place:
    """A process's rank: ranks are counted over all hosts, local ranks per host."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read this process's place from the environment; without torchrun it is alone."""
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        return cls(*(int(environ.get(name, default)) for name, default in names.items()))
