"""Where a policy computes: its device and dtype, and whether it fits, before any weight is fetched."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import counted
from emailrl.model.layout import GPU_SIZED, available_memory, dtype_name, shards_base, total_memory
from emailrl.model.resolve import resolve_model
from emailrl.model.shape import load_config, parameters_of
from emailrl.settings import ModelSettings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BF16_FROM = 50_000_000
"""Parameter count from which a sampling-only model uses bf16 on a CPU: it is bound by reading weights."""
_REMEDY = "Use --model nano or smol on this machine, or a machine with a GPU."


def choose_device(name: str) -> torch.device:
    """Return the named device, or for ``auto`` the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
        raise UsageError(f"EMAILRL_DEVICE={name} is not supported.", "Use auto, cpu or cuda.")
    device, gpus = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < gpus):
        hint = "Use EMAILRL_DEVICE=auto."
        raise EmailRLError(f"EMAILRL_DEVICE={name}: this machine has {counted(gpus, 'usable CUDA GPU')}.", hint)
    return device


def choose_dtype(name: str, device: torch.device, *, sampled_parameters: int = 0) -> torch.dtype:
    """The named dtype, or for ``auto`` bf16 on a GPU and fp32 on a CPU. A model that only samples, of
    ``sampled_parameters``, takes bf16 on a CPU with instructions for it too, if it has ``BF16_FROM`` or more."""
    if name == "auto" and device.type == "cpu" and sampled_parameters >= BF16_FROM and computes_bf16():
        return torch.bfloat16
    return DTYPES[dtype_name(name, on_gpu=device.type == "cuda")]


def sampling_dtype(model: ModelSettings) -> torch.dtype:
    """Return the dtype of a model that only samples; raises UsageError or EmailRLError if it is not found."""
    sampled = parameters_of(model.name, resolve_model(model.name, model.smol_base))
    return choose_dtype(model.dtype, choose_device(model.device), sampled_parameters=sampled)


def computes_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices natively; without, they are converted and slower than fp32."""
    return torch.cpu._is_avx512_bf16_supported()


def check_fits(
    model: ModelSettings, path: str | Path, device: torch.device, dtype: torch.dtype, *, cards: int = 1
) -> bool:
    """Raise EmailRLError, before any weight is fetched, for a model this machine cannot run or reach. The size comes
    from the name (``...-14B-...``) if present, else from the config, local or fetched separately. Returns whether to
    shard the base over the ``cards`` of this host that train together."""
    num_parameters, card = parameters_of(model.name, path), card_bytes(device)
    whole = num_parameters * dtype.itemsize
    sharded = cards > 1 and shards_base(model, weight_bytes=whole, card_bytes=card, cards=cards)
    need = num_parameters * (0.6 if model.load_in_4bit else dtype.itemsize)
    refused = f"The model '{model.name}' ({num_parameters / 1e9:.2f} billion parameters, {need / 1e9:.0f} GB)"
    if sharded and model.shard_offload:
        pass  # the host's memory holds it
    elif device.type == "cuda":
        if need / (cards if sharded else 1) > card:
            hint = "Use more GPUs (docs/guides/scaling.md), LOAD_IN_4BIT=true, a smaller model, or a larger GPU."
            raise EmailRLError(f"{refused} does not fit this GPU ({card / 1e9:.0f} GB).", hint)
    elif need > (free := available_memory()):
        have = f"{free / 1e9:.0f} GB of {total_memory() / 1e9:.0f} GB of memory"
        raise EmailRLError(f"{refused} needs a GPU; this machine has {have} free.", _REMEDY)
    elif num_parameters > GPU_SIZED and model.device == "auto":
        hint = f"{_REMEDY} EMAILRL_DEVICE=cpu runs it anyway, slowly."
        raise EmailRLError(f"{refused} needs a GPU, but this machine has none.", hint)
    load_config(model.name, path)
    return sharded


def card_bytes(device: torch.device) -> float:
    """Memory of the GPU ``device``; infinite for a CPU, whose memory all ranks share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


@contextmanager
def enough_memory(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error that smaller micro-batches cannot avoid into EmailRLError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        hint = "Lower MAX_TOKENS_PER_MICRO_BATCH or LORA_RANK, or set LOAD_IN_4BIT=true."
        raise EmailRLError(f"Out of memory while {doing}.", hint) from error
