"""Tensors on a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from full_disk import on_a_full_disk

HEAD = "from pathlib import Path\nimport torch\nfrom emailrl.model.lora import write_tensors, writing_tensors\n"
SAFETENSORS = """
write_tensors(Path(sys.argv[1]), {"a": torch.zeros(8)})
write_tensors(Path(sys.argv[1]), {"a": torch.zeros(4096)})
"""
TORCH = """
with writing_tensors(Path(sys.argv[1])):
    torch.save({"a": torch.zeros(4096)}, sys.argv[1])
"""


@pytest.mark.parametrize(("script", "numbers"), [(SAFETENSORS, {errno.EFBIG}), (TORCH, {errno.EIO, errno.EFBIG})])
def test_the_librarys_error_becomes_the_systems(tmp_path: Path, script: str, numbers: set[int]) -> None:
    path = tmp_path / "adapter.safetensors"
    assert on_a_full_disk(1024, HEAD + script, path) in {f"{number} {path}" for number in numbers}
