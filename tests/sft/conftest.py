"""The model that fine-tuning is tested on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))
