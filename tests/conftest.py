"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# A test must never reach the network or a tracking server, whoever's machine it runs on.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real mail and tokenizers beside the repository; skips the test where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no shared data at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the developer's environment must not steer a test; a test sets the ones it needs itself."""
    from emailrl.settings.names import by_env_name

    for name in by_env_name():
        if name != "WANDB_MODE":
            monkeypatch.delenv(name, raising=False)
