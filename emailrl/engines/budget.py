"""How many conversations are sampled at once, and the in-process engine's memory: for engines and ``emailrl plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from emailrl.model.layout import LARGE_FROM

if TYPE_CHECKING:
    from emailrl.settings import AgentSettings, VllmSettings

GIB: Final = 1 << 30
BLOCK: Final = 32  # tokens per block; a conversation takes whole blocks
GROWTH: Final = 1.5  # minimum growth factor of the cache, within its budget
FREE_SHARE: Final = {"cpu": 0.5, "cuda": 0.8}
"""Default of KV_CACHE_GIB, as a share of the memory free when sampling begins, torch's cached memory included.
Activations need the rest; so do other programs on a CPU."""
PREFILL_TOKENS: Final = {"cpu": 1024, "cuda": 8192}
"""Maximum tokens per prefill pass, padding included: what the caches hold on a CPU, what saturates a GPU."""
LARGE_ROWS_ON_CPU: Final = 16  # conversations at once from which a CPU gains nothing with a model of ``LARGE_FROM``
ROWS_PER_SERVER: Final = 256
"""Concurrent conversations of a vLLM server, which has its GPUs to itself, unless MAX_BATCH_TRAJECTORIES is set. One of
4B on an H200 sampled 6,700 tokens/s for 48 of them, 12,300 for 192 and 15,500 for 384
(docs/evidence/performance.md)."""
SERVER_SHARE: Final = 0.9  # of its GPUs' memory for a vLLM server, unless VLLM_GPU_MEMORY_UTILIZATION is set
MERGE_LIMIT: Final = 1_000_000_000  # models with more parameters are not copied for sampling


def most_rows(agent: AgentSettings, parameters: int, *, on_gpu: bool) -> int:
    """Maximum concurrent conversations of the in-process engine: MAX_BATCH_TRAJECTORIES, or its default for the model.
    Memory grows with their caches: SmolLM2 takes about 40 MB for each, on top of 1.1 GB."""
    small = on_gpu or parameters < LARGE_FROM or "max_batch_trajectories" in agent.model_fields_set
    return agent.max_batch_trajectories if small else min(agent.max_batch_trajectories, LARGE_ROWS_ON_CPU)


def rows_per_server(agent: AgentSettings) -> int:
    """Maximum concurrent conversations of each vLLM server: MAX_BATCH_TRAJECTORIES, or its default for servers."""
    return agent.max_batch_trajectories if "max_batch_trajectories" in agent.model_fields_set else ROWS_PER_SERVER


def server_share(vllm: VllmSettings) -> float:
    """Share of its GPUs' memory that a vLLM server takes: VLLM_GPU_MEMORY_UTILIZATION, or its default for servers."""
    return vllm.vllm_gpu_memory_utilization if "vllm_gpu_memory_utilization" in vllm.model_fields_set else SERVER_SHARE


def most_requests(agent: AgentSettings, servers: int) -> int:
    """Maximum concurrent requests to so many vLLM servers together. The default of ROLLOUT_CONCURRENCY suits shared
    chat servers; it applies here only if set explicitly."""
    chosen = "rollout_concurrency" in agent.model_fields_set
    return agent.rollout_concurrency if chosen else servers * rows_per_server(agent)


def merges(parameters: int, *, quantized: bool) -> bool:
    """Whether to sample from a separate copy with merged weights instead of the trainer's model with an adapter."""
    return parameters <= MERGE_LIMIT and not quantized


def blocks_of(tokens: int) -> int:
    """The number of blocks that a conversation of this many tokens takes."""
    return -(-tokens // BLOCK)


def blocks_within(budget: float, layers: int, token_bytes: int) -> int:
    """The number of conversation blocks that fit in ``budget`` bytes, at least 0. ``token_bytes`` is the size of one
    token's keys and values in all ``layers``. Includes the block that receives padding writes, and the temporary copy
    of one of the 2 · layers tensors while the cache grows."""
    tensors = 2 * layers
    return max(int(budget * tensors / ((tensors + 1) * BLOCK * token_bytes)) - 1, 0)


def gib_for(blocks: int, layers: int, token_bytes: int) -> str:
    """KV_CACHE_GIB for a number of blocks, the inverse of ``blocks_within``: rounded up slightly, three digits."""
    tensors = 2 * layers
    budget = (blocks + 1) * (tensors + 1) * BLOCK * token_bytes / tensors
    return f"{1.01 * budget / GIB:.3g}"
