"""``confirmed.json``: accuracy of a run's best model on validation questions that played no part in selecting it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints.reading import Checkpoint

CONFIRMED = "confirmed.json"


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The part of ``confirmed.json`` that describes the accuracy, with its 95 % interval."""

    step: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    num_questions: int


_CONFIRMED: Final = TypeAdapter(Confirmed)


def confirmed_of(checkpoint: Checkpoint) -> Confirmed | None:
    """Return the measurement that the checkpoint's run made of its weights; None if it measured another step or none.

    Raises EmailRLError for a damaged file.
    """
    file = checkpoint.path.absolute().parent / CONFIRMED
    if not file.is_file():
        return None
    try:
        found = _CONFIRMED.validate_json(file.read_bytes())
    except (ValidationError, OSError):
        raise EmailRLError(f"{file} is damaged.", "Restore it, or remove it.") from None
    return found if found.step == checkpoint.metadata.step else None
