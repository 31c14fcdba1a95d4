"""What the sections of the settings tree are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Env:
    """The environment names of a field, the main one first, where the field's own name does not give them."""

    def __init__(self, *names: str) -> None:
        self.names = names


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
