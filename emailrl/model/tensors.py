"""Writes tensor files, with clear errors for a full disk."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from emailrl.base.disk import naming


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file; OSError, with ``path`` as its ``filename``, on failure."""
    with writing_tensors(path):
        save_file(dict(tensors), path, metadata={"format": "pt"})


def checksum(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the tensors' concatenated bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def writing_tensors(path: Path) -> Iterator[None]:
    """Turn the errors of safetensors and torch on a full disk into an OSError with ``path`` as its ``filename``."""
    try:
        with naming(path):
            yield
    except (SafetensorError, RuntimeError) as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:  # torch says no more than that a write failed
            raise OSError(errno.EIO, "write failed; is the disk full?", str(path)) from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
