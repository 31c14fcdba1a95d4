"""The device and the number type of a policy, as the settings name them or this machine has them."""

from __future__ import annotations

import torch

from emailrl.errors import EmailRLError, UsageError
from emailrl.policy.layout import dtype_name

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_device(name: str) -> torch.device:
    """Take the device named, or for ``auto`` the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"Unknown device '{name}'.", "Use auto, cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EmailRLError(
            f"Device '{name}' was requested, but this machine has no usable CUDA GPU.", "Use EMAILRL_DEVICE=auto."
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Take the parameter type named, or for ``auto`` bf16 on a GPU and fp32 on a CPU."""
    return DTYPES[dtype_name(name, on_gpu=device.type == "cuda")]
