"""What the sections of the settings tree are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Env:
    """The environment names of a field, the main one first, where the field's own name does not give them."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
