"""What the tests on a real GPU share: small random policies. What they measure they print."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gpu.shapes import save_model

from emailrl.model.resolve import NANO_DIR


def need(*modules: str) -> None:
    """Skip the test, with the reason, where there is no CUDA GPU or one of the packages is missing."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.fixture(scope="session", autouse=True)
def needs() -> Callable[..., None]:
    """Every test needs a GPU; ``needs("unsloth")`` also skips it where the package is missing."""
    need()
    return need


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_model("three layers", NANO_DIR, folder := tmp_path_factory.mktemp("model"), torch.float32)
    return folder


@pytest.fixture(scope="session")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_model("eight layers", NANO_DIR, folder := tmp_path_factory.mktemp("larger"))
    return folder
