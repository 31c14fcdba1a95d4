"""Tensors on a disk that is full."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emailrl.policy.tensors import write_tensors, writing_tensors


@pytest.fixture
def full_at_a_kilobyte() -> Iterator[None]:
    """No file of this process grows beyond a kilobyte."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_safetensors_error_becomes_the_systems(tmp_path: Path, full_at_a_kilobyte: None) -> None:
    path = tmp_path / "adapter.safetensors"
    write_tensors(path, {"a": torch.zeros(8)})
    with pytest.raises(OSError, match="File too large") as raised:
        write_tensors(path, {"a": torch.zeros(4096)})
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))


def test_torchs_error_becomes_the_systems(tmp_path: Path, full_at_a_kilobyte: None) -> None:
    path = tmp_path / "trainer_state.pt"
    with pytest.raises(OSError) as raised, writing_tensors(path):
        torch.save({"a": torch.zeros(4096)}, path)
    assert raised.value.filename == str(path)
