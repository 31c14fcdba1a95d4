"""What the tests of updates share; the room is imported late, so that its mutants can take its place before."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def make(tiny_model: Path) -> Any:
    """Make an updater whose adapter has already moved away from the base; settings by name."""
    from training.updaters import make_updater

    return partial(make_updater, tiny_model)
