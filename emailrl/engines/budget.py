"""What memory the in-process engine takes: decided here, for the engine that takes it and for ``emailrl plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from emailrl.settings import AgentSettings

GIB: Final = 1 << 30
BLOCK: Final = 32
"""Tokens of a block; a conversation takes whole blocks."""
GROWTH: Final = 1.5
"""A cache that has to grow grows at least by this factor, as far as its budget goes."""
FREE_SHARE: Final = {"cpu": 0.5, "cuda": 0.8}
"""What KV_CACHE_GIB is by default, as a share of the memory that is free when sampling begins: activations need the
rest, on a CPU other programs too."""

PREFILL_TOKENS: Final = {"cpu": 1024, "cuda": 8192}
"""Most tokens, padding included, that one pass over new prompts reads: on a CPU what its caches hold, on a GPU what
keeps it busy."""
LARGE_FROM: Final = 50_000_000
"""Parameters from which a CPU computes no faster with more than ``LARGE_ROWS_ON_CPU`` conversations at once."""
LARGE_ROWS_ON_CPU: Final = 16
MERGE_LIMIT: Final = 1_000_000_000
"""Models of more parameters are not copied for sampling."""


def most_rows(agent: AgentSettings, parameters: int, *, on_gpu: bool) -> int:
    """Conversations that the in-process engine holds at once: MAX_BATCH_TRAJECTORIES, with its default for the model.

    Their caches are what grows: SmolLM2 takes some 40 MB for each, beside 1.1 GB.
    """
    small = on_gpu or parameters < LARGE_FROM or "max_batch_trajectories" in agent.model_fields_set
    return agent.max_batch_trajectories if small else min(agent.max_batch_trajectories, LARGE_ROWS_ON_CPU)


def merges(parameters: int, *, quantized: bool) -> bool:
    """Whether a model is sampled from merged weights of its own, not with the adapter beside the trainer's."""
    return parameters <= MERGE_LIMIT and not quantized


def blocks_of(tokens: int) -> int:
    """Blocks that so many tokens of one conversation take."""
    return -(-tokens // BLOCK)


def blocks_within(budget: float, layers: int, token_bytes: int) -> int:
    """Blocks for conversations that ``budget`` bytes hold, at least 0.

    ``token_bytes`` are those of one token's keys and values in all ``layers``. Counted too: one block that takes what
    padding writes, and the copy of one of the 2 · layers tensors that exists beside it while the cache grows.
    """
    tensors = 2 * layers
    return max(int(budget * tensors / ((tensors + 1) * BLOCK * token_bytes)) - 1, 0)


def gib_for(blocks: int, layers: int, token_bytes: int) -> str:
    """KV_CACHE_GIB for so many blocks, the inverse of ``blocks_within``: a little more, in three digits."""
    tensors = 2 * layers
    budget = (blocks + 1) * (tensors + 1) * BLOCK * token_bytes / tensors
    return f"{1.01 * budget / GIB:.3g}"


def token_bytes_of(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers, by a model's config."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * kv_heads_of(config) * head_dim * dtype.itemsize)


def kv_heads_of(config: Any) -> int:
    """Key heads of a layer, by a model's config."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def default_budget(device: torch.device) -> int:
    """``FREE_SHARE`` of what is free now, what torch keeps for later included."""
    if device.type == "cpu":
        from emailrl.policy.size import available_memory

        return int(FREE_SHARE["cpu"] * available_memory())
    import torch

    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(FREE_SHARE["cuda"] * free)
