"""The device and dtype of a policy, from the settings and the hardware."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from emailrl.errors import EmailRLError, UsageError
from emailrl.model.layout import dtype_name
from emailrl.model.resolve import resolve_model
from emailrl.model.size import parameters_of
from emailrl.plain import counted
from emailrl.settings import ModelSettings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BF16_FROM = 50_000_000
"""Parameter count from which a sampling-only model uses bf16 on a CPU: it is bound by reading weights."""


def choose_device(name: str) -> torch.device:
    """Return the named device, or for ``auto`` the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"EMAILRL_DEVICE={name} is not supported.", "Use auto, cpu or cuda.")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < gpus):
        raise EmailRLError(
            f"EMAILRL_DEVICE={name}: this machine has {counted(gpus, 'usable CUDA GPU')}.", "Use EMAILRL_DEVICE=auto."
        )
    return device


def choose_dtype(name: str, device: torch.device, *, sampled_parameters: int = 0) -> torch.dtype:
    """Return the named dtype, or for ``auto`` bf16 on a GPU and fp32 on a CPU.

    A model that only samples, of ``sampled_parameters``, takes bf16 on a CPU too if it has ``BF16_FROM`` or more and
    the CPU has instructions for it.
    """
    if name == "auto" and device.type == "cpu" and sampled_parameters >= BF16_FROM and computes_bf16():
        return torch.bfloat16
    return DTYPES[dtype_name(name, on_gpu=device.type == "cuda")]


def sampling_dtype(model: ModelSettings) -> torch.dtype:
    """Return the dtype of a model that only samples; raises UsageError or EmailRLError if it is not found."""
    path = resolve_model(model.name, model.smol_base)
    sampled = parameters_of(model.name, path)
    return choose_dtype(model.dtype, choose_device(model.device), sampled_parameters=sampled)


def computes_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices natively; without, they are converted and slower than fp32."""
    return torch.cpu._is_avx512_bf16_supported()


@contextmanager
def enough_memory(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error that smaller micro-batches cannot avoid into EmailRLError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EmailRLError(
            f"Out of memory while {doing}.", "Lower MAX_TOKENS_PER_MICRO_BATCH or LORA_RANK, or set LOAD_IN_4BIT=true."
        ) from error
