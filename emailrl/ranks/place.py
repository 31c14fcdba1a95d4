"""A process's rank, from torchrun's environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from emailrl.base.errors import UsageError

UNSET: Final = "torchrun sets these variables; unset them to train without it."


@dataclass(frozen=True, slots=True)
class Place:
    """A process's rank: ranks are counted over all hosts, local ranks per host."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read this process's place from the environment; without torchrun it is alone.

        Raises UsageError for values that torchrun does not set.
        """
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        given = {name: environ.get(name, str(default)) for name, default in names.items()}
        for name, text in given.items():
            if not (text.isascii() and text.isdecimal()):
                raise UsageError(f"The environment has {name}={text}, which is not a number.", UNSET)
        place = cls(*map(int, given.values()))
        if place.rank >= place.world:
            unset = "" if "WORLD_SIZE" in environ else " (not set)"
            raise UsageError(f"The environment has RANK={place.rank}, but WORLD_SIZE={place.world}{unset}.", UNSET)
        if place.world > 1 and "RANK" not in environ:
            raise UsageError(f"The environment has WORLD_SIZE={place.world}, but no RANK.", UNSET)
        return place
