"""Rewards of the user's own: ``package.module:attribute`` or ``path/to/file.py:attribute``.

The attribute is called with a finished ``Trajectory`` (its ``rubric["answer_correct"]`` is known) and returns a number,
or a dict of named numbers that are added up.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

from emailrl.errors import EmailRLError, UsageError
from emailrl.rewards.rubric import Reward
from emailrl.trajectory import Trajectory


def load_reward(name: str) -> Reward:
    """The reward behind a Python path; raises ``UsageError`` where there is none."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise UsageError(
            f"Unknown reward: {name!r}.",
            "Named rewards are art_e, simple and heuristic; your own is module:attribute or path.py:attribute.",
        )
    function = getattr(_load_module(place), attribute, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {attribute!r} to use as the reward.")

    def reward(trajectory: Trajectory) -> dict[str, float]:
        try:
            value = function(trajectory)
        except Exception as error:
            raise EmailRLError(f"The reward {name} raised {type(error).__name__}: {error}") from error
        return _terms(name, attribute, value)

    return reward


def _load_module(place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).expanduser()
        if not path.is_file():
            raise UsageError(f"There is no file {path} to take the reward from.")
        spec = importlib.util.spec_from_file_location(f"emailrl_custom_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{path} cannot be loaded as Python.")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except EmailRLError:
        raise
    except Exception as error:
        raise UsageError(f"Loading {place} raised {type(error).__name__}: {error}") from error


def _terms(name: str, attribute: str, value: Any) -> dict[str, float]:
    values = value if isinstance(value, dict) else {attribute: value}
    try:
        terms = {str(term): float(number) for term, number in values.items()}
    except (TypeError, ValueError):
        raise EmailRLError(f"The reward {name} returned {value!r}.", "Return a number, or a dict of numbers.") from None
    if not all(math.isfinite(number) for number in terms.values()):
        raise EmailRLError(f"The reward {name} returned {value!r}.", "Rewards must be finite.")
    return terms
