"""Checks, before any download, that a model is available and fits this machine."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emailrl.errors import EmailRLError, UsageError
from emailrl.model.layout import shards_base
from emailrl.model.shape import known_shape
from emailrl.plain import first_line
from emailrl.remote.hub import check_hub, go_offline_if_unreachable
from emailrl.settings import ModelSettings

if TYPE_CHECKING:
    import torch

GPU_SIZED = 4e9
"""Parameter count above which a CPU is too slow to be useful, regardless of memory."""
_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[Bb](?![A-Za-z0-9])")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_REMEDY = "Use --model nano or smol on this machine, or a machine with a GPU."


def check_fits(
    model: ModelSettings, path: str | Path, device: torch.device, dtype: torch.dtype, *, cards: int = 1
) -> bool:
    """Raise EmailRLError, before any weight is fetched, for a model this machine cannot run or reach.

    The size comes from the name (``...-14B-...``) if present, else from the config, local or fetched separately.
    Returns whether to shard the base over the ``cards`` of this host that train together.
    """
    num_parameters, named = _size(model.name, path)
    sharded = cards > 1 and shards_base(
        model, weight_bytes=num_parameters * dtype.itemsize, card_bytes=card_bytes(device), cards=cards
    )
    parts = cards if sharded else 1
    if not (sharded and model.shard_offload):
        _refuse_if_too_large(model, num_parameters, device, dtype, parts)
    if named:
        load_config(model.name, path)
    return sharded


def parameters_of(name: str, path: str | Path) -> int:
    """Parameter count of a model, from its name if possible, else from its config."""
    return _size(name, path)[0]


def _size(name: str, path: str | Path) -> tuple[int, bool]:
    """Parameters, and whether the name tells: a 14B model on a CPU is refused without waiting for a network."""
    shape = known_shape(name) if isinstance(path, str) else None
    if shape is not None:
        return shape.parameters, True
    billions = _BILLIONS.search(name) if isinstance(path, str) else None
    if billions:
        return int(float(billions[1]) * 1e9), True
    return count_parameters(load_config(name, path)), False


def card_bytes(device: torch.device) -> float:
    """Memory of the GPU ``device``; infinite for a CPU, whose memory all ranks share."""
    import torch

    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


def _refuse_if_too_large(
    model: ModelSettings, num_parameters: int, device: torch.device, dtype: torch.dtype, parts: int
) -> None:
    bytes_each = 0.6 if model.load_in_4bit else dtype.itemsize
    need = num_parameters * bytes_each
    size = f"{num_parameters / 1e9:.2f} billion parameters, {need / 1e9:.0f} GB"
    if device.type == "cuda":
        have = card_bytes(device)
        if need / parts > have:
            hint = "Use more GPUs (docs/scaling.md), LOAD_IN_4BIT=true, a smaller model, or a larger GPU."
            raise EmailRLError(f"The model '{model.name}' ({size}) does not fit this GPU ({have / 1e9:.0f} GB).", hint)
        return
    have = available_memory()
    if need > have:
        free = f"{have / 1e9:.0f} GB of {total_memory() / 1e9:.0f} GB of memory"
        raise EmailRLError(f"The model '{model.name}' ({size}) needs a GPU; this machine has {free} free.", _REMEDY)
    if num_parameters > GPU_SIZED and model.device == "auto":
        raise EmailRLError(
            f"The model '{model.name}' ({size}) needs a GPU, but this machine has none.",
            f"{_REMEDY} EMAILRL_DEVICE=cpu runs it anyway, slowly.",
        )


def count_parameters(config: Any) -> int:
    """Count a model's parameters from its config, without memory for them."""
    return sum(parameter.numel() for parameter in empty_model(config).parameters())


def empty_model(config: Any) -> Any:
    """Return the model that a config describes on the meta device: layers and shapes without memory for weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # Without a choice of ours the config's own counts, and may name kernels on the hub to fetch and run.
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, attn_implementation="eager")


def load_config(name: str, path: str | Path) -> Any:
    """Read a model's config from its folder, the local cache or the hub, without long retries.

    Raises UsageError for a name the hub does not know or knows as an adapter, EmailRLError if the hub cannot be
    reached.
    """
    from transformers import AutoConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    if isinstance(path, str):
        go_offline_if_unreachable()
        if not _cached(path):
            check_hub(name)
    # transformers would put an adapter beside the config on the model by itself, unchecked.
    if find_adapter_config_file(str(path)):
        raise UsageError(
            f"The model '{name}' is an adapter.",
            "Name its base model with --model, and the adapter with --checkpoint or --adapter.",
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise EmailRLError(
            f"The model '{name}' failed to load: {first_line(error)}", "Check its config.json, or choose another model."
        ) from error


def available_memory() -> int:
    """Bytes this process may still allocate, respecting a container's limit."""
    import psutil  # type: ignore[import-untyped]

    return _within_limit(int(psutil.virtual_memory().available))


def total_memory() -> int:
    """Bytes of this machine's memory, or of its container's limit."""
    import psutil

    return _within_limit(int(psutil.virtual_memory().total))


def _within_limit(size: int) -> int:
    if not _CGROUP_LIMIT.is_file():
        return size
    limit = _CGROUP_LIMIT.read_text().strip()
    return min(size, int(limit)) if limit.isdigit() else size


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)
