"""Tensors on a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path

from full_disk import on_a_full_disk

SAFETENSORS = """
from pathlib import Path
import torch
from emailrl.model.tensors import write_tensors
write_tensors(Path(sys.argv[1]), {"a": torch.zeros(8)})
write_tensors(Path(sys.argv[1]), {"a": torch.zeros(4096)})
"""

TORCH = """
from pathlib import Path
import torch
from emailrl.model.tensors import writing_tensors
with writing_tensors(Path(sys.argv[1])):
    torch.save({"a": torch.zeros(4096)}, sys.argv[1])
"""


def test_safetensors_error_becomes_the_systems(tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    assert on_a_full_disk(1024, SAFETENSORS, path) == f"{errno.EFBIG} {path}"


def test_torchs_error_becomes_the_systems(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.pt"
    assert on_a_full_disk(1024, TORCH, path) in (f"{errno.EIO} {path}", f"{errno.EFBIG} {path}")
