"""Loading settings from sources that a test gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emailrl.base.errors import UsageError
from emailrl.settings import Settings, load_settings

Load = Callable[..., Settings]


def at(settings: Settings, place: str) -> Any:
    """The value at ``section.field``."""
    section, field = place.split(".")
    return getattr(getattr(settings, section), field)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load_settings` in an empty directory, with an empty environment."""

    def call(overrides: dict[str, Any] | None = None, preset: str | None = None, **environ: str) -> Settings:
        return load_settings(overrides, preset, cwd=tmp_path, environ=environ)

    return call


@pytest.fixture
def refused(load: Load) -> Callable[..., str]:
    """The one line that a refused load ends with."""

    def call(*args: Any, **environ: str) -> str:
        with pytest.raises(UsageError) as caught:
            load(*args, **environ)
        assert caught.value.exit_code == 2
        return str(caught.value)

    return call
