"""What the sections of the settings tree are made of."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Env:
    """The environment names of a field, the main one first, where the field's own name does not give them."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Flag:
    """The command-line spellings of a field, where its own name does not give them."""

    def __init__(self, *spellings: str) -> None:
        self.spellings = spellings


class Address:
    """Marks a field that may name a server: ``gets`` is what is sent there, ``key`` the setting of the key it gets."""

    def __init__(self, gets: str, key: str) -> None:
        self.gets, self.key = gets, key


class Code:
    """Marks a field that may name code to run: any value that is no plain word does."""


PLAIN_WORD: Final = re.compile(r"[\w-]*", re.ASCII)
"""What names no code, and no server."""


class Written:
    """Marks a field that says where files are written; ``read_mostly``: only by commands that build what is there."""

    def __init__(self, *, read_mostly: bool = False) -> None:
        self.read_mostly = read_mostly


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < 1e-3:  # logits divided by it leave the range of float32
        raise ValueError("0 (greedy) or at least 0.001")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_greedy_or_warm)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
