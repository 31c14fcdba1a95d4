"""Building blocks of the settings sections: markers, constrained types and the base class."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator


class Env:
    """Environment names of a field, the main one first, if they do not follow from its own name."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Flag:
    """Command-line spellings of a field, if they do not follow from its own name."""

    def __init__(self, *spellings: str) -> None:
        self.spellings = spellings


class Address:
    """Marks a field that names a server: ``gets`` is the data it receives, ``key`` the setting with its key. If it is
    ``Code`` or something ``or_else`` too, only a URL does."""

    def __init__(self, gets: str, key: str, *, or_else: bool = False) -> None:
        self.gets, self.key, self.or_else = gets, key, or_else


def is_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


class Code:
    """Marks a field that may name code to run: any value that is not a plain word does."""


PLAIN_WORD: Final = re.compile(r"[\w-]*", re.ASCII)  # A value that names neither code nor a server.


class Written:
    """Marks an output path; ``read_mostly``: written only by commands that build it."""

    def __init__(self, *, read_mostly: bool = False) -> None:
        self.read_mostly = read_mostly


class Section(BaseModel):
    """A group of settings; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _fits_float32(cls, value: object) -> object:
        if isinstance(value, float) and abs(value) > 1e30:  # tensors cannot be multiplied or clamped by more than 3e38
            raise ValueError("at most 1e30 in magnitude")
        return value


def _on_or_off(value: object) -> object:
    """Map spellings of true and false to on and off; leave other values unchanged."""
    words = {"true": "on", "1": "on", "yes": "on", "false": "off", "0": "off", "no": "off"}
    return words.get(str(value).lower(), value)


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < 1e-3:  # dividing logits by it would overflow float32
        raise ValueError("0 (greedy) or at least 0.001")
    return temperature


Bool = BeforeValidator(_on_or_off)
_Conversations: Final = Address("conversations with the mail in them", "vllm_api_key", or_else=True)
Teacher = Annotated[str | None, Env("TEACHER"), _Conversations]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_greedy_or_warm)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(ge=1, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Price = Annotated[float, Field(ge=0)]
