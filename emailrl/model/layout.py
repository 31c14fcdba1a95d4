"""How batches run through the policy and what memory there is, shared by the trainer and ``emailrl plan``: no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil  # type: ignore[import-untyped]

from emailrl.base.errors import UsageError
from emailrl.settings import ModelSettings, TrainingSettings

if TYPE_CHECKING:
    import torch

Checkpointing = Literal["auto", "off", "selective", "on"]  # GRADIENT_CHECKPOINTING
CHUNK_ELEMENTS: Final = 2**25
"""Maximum logits held at once: 128 MiB of float32, or 64 MiB in bf16 and as much for their gradient."""
SHARE_FOR_BASE: Final = 0.7
"""Share of GPU memory for the base weights beyond which SHARD=auto spreads them over the host's GPUs."""
SHARE_FOR_KEPT: Final = 0.9  # of free memory for kept states; the rest is for fragmentation and the loss
GPU_SIZED: Final = 4e9  # parameter count above which a CPU is too slow to be useful, regardless of memory
LARGE_FROM: Final = 50_000_000  # parameter count from which sampling on a CPU is bound by reading weights
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


class Keep(IntEnum):
    """How much of a layer the forward pass keeps, from least memory to least time."""

    INPUT = 0  # only the inputs: everything else is recomputed
    ATTENTION = 1  # also attention's result: attention itself, the slowest part of long samples, is not run again
    HIDDEN = 2  # also queries, keys, values and the state between attention and MLP: only gate and up are recomputed
    ALL = 3  # also gate and up: no matrix product is repeated


def dtype_name(name: str, *, on_gpu: bool) -> str:
    """Return the dtype of the frozen base for the setting DTYPE: ``auto`` is bf16 on a GPU and fp32 on a CPU."""
    return ("bf16" if on_gpu else "fp32") if name == "auto" else name


def shards_base(model: ModelSettings, *, weight_bytes: int, card_bytes: float, cards: int) -> bool:
    """Whether the frozen base is spread over the ``cards`` of a host, of ``card_bytes`` each, by the setting SHARD."""
    if model.shard == "auto":
        whole = model.load_in_4bit or model.backend == "unsloth"  # neither can be sharded
        return cards > 1 and not whole and weight_bytes > SHARE_FOR_BASE * card_bytes
    return model.shard == "host"


def micro_batch_cap(training: TrainingSettings, *, on_gpu: bool, hidden: int) -> int:
    """Initial maximum tokens per forward pass in training; a longer sample or running out of memory changes it.
    ``hidden`` is the model's hidden size."""
    # Measured on a CPU with nano: 16384 takes 1.65 times as long a token as 2048, and eight times the memory. On an
    # H200, SmolLM2-135M (hidden 576) waits for kernel launches half the time at 35,000 tokens; 0.6B (1024) gains 4%
    # by 32768.
    return training.max_tokens_per_micro_batch or ((16384 if hidden >= 1024 else 131072) if on_gpu else 2048)


def attends_fully(config: Mapping[str, Any]) -> bool:
    """Whether every layer of a model has plain causal attention, by its ``config.json``: no windows, no recurrence."""
    if "layer_types" in config:
        return set(config["layer_types"] or ["full_attention"]) == {"full_attention"}
    return config.get("sliding_window") is None or not config.get("use_sliding_window", True)


def why_not_packed(attention: str, *, fully: bool) -> str | None:
    """Why a model with this ATTN_IMPLEMENTATION cannot use packed rows; None if it can."""
    if not fully:
        return "its attention is not plain causal attention in every layer"
    return None if attention == "sdpa" else f"packing needs ATTN_IMPLEMENTATION=sdpa, not {attention}"


def wants_fused(training: TrainingSettings, *, packs: bool, on_gpu: bool) -> bool:
    return packs and training.fused_layers and on_gpu


def recomputes(checkpointing: Checkpointing, *, on_gpu: bool) -> bool:
    """Whether transformers' own layers keep only their inputs; they offer nothing between that and keeping all."""
    return checkpointing in ("on", "selective") or (checkpointing == "auto" and on_gpu)


def choose_keep(checkpointing: Checkpointing, free: float, bytes_of: Mapping[Keep, int]) -> Keep:
    """What fused layers keep: as set, or with ``auto`` the most of ``bytes_of`` that ``free`` bytes of a GPU hold."""
    if checkpointing != "auto":
        return {"on": Keep.INPUT, "selective": Keep.ATTENTION, "off": Keep.ALL}[checkpointing]
    fitting = [keep for keep, size in bytes_of.items() if size <= SHARE_FOR_KEPT * free]
    return max(fitting, default=Keep.INPUT)


def named_targets(wanted: str, known: Collection[str]) -> list[str]:
    """The names in the setting ``target_modules``; UsageError unless each ends in the name of a ``known`` layer."""
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in names if name.rsplit(".", 1)[-1] not in known]
    if unknown or not names:
        hint = f"It has {', '.join(sorted(known))}; or use all-linear."
        raise UsageError(f"TARGET_MODULES matches no layer of this model: {', '.join(unknown) or 'empty'}.", hint)
    return names


def numbers_for(keep: Keep, *, layers: int, hidden: int, queries: int, keys: int, ffn: int) -> int:
    """Numbers that fused layers keep of one token for the backward pass, and that one of them works with, by the widths
    of all query and all key heads. Rounded up, by 2 to 18% of what ``plan.activations`` counts."""
    steps = (hidden, queries, hidden + queries + 2 * keys, 2 * ffn)
    return sum(steps[: keep + 1]) * layers + 4 * ffn + 4 * (queries + hidden) + 4 * keys


def available_memory() -> int:
    """Bytes this process may still allocate, respecting a container's limit."""
    return _within_limit(int(psutil.virtual_memory().available))


def free_memory(device: torch.device) -> int:
    """Bytes that may still be allocated on ``device``, including torch's cached memory."""
    if device.type == "cpu":
        return available_memory()
    import torch

    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def total_memory() -> int:
    """Bytes of this machine's memory, or of its container's limit."""
    return _within_limit(int(psutil.virtual_memory().total))


def _within_limit(size: int) -> int:
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else ""
    return min(size, int(limit)) if limit.isdigit() else size
