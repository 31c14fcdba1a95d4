"""For how many tokens in-process vLLM captures CUDA graphs on large GPUs: for the engine and for ``emailrl plan``."""

from __future__ import annotations

import math
from typing import Final

from emailrl.engines.budget import GIB
from emailrl.settings import Settings

GRAPHS_FROM_GIB: Final = 64
"""Memory of a GPU from which graphs are captured for steps that read prompts. Smaller ones need it for the cache."""
LARGE_STEPS: Final = (96, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of such steps: tool results, of one conversation or several, and a token each of the others.

By itself, vLLM captures up to twice MAX_BATCH_TRAJECTORIES, and launches the kernels of longer steps one by one: on 14B
and an H200 a step of reading prompts and sampling then takes 82 ms instead of 47 (docs/performance.md).
"""


def capture_sizes(settings: Settings, card_bytes: float) -> list[int]:
    """Numbers of tokens to capture graphs for, ascending; empty if vLLM is to choose them.

    It chooses on small GPUs and on CPUs (``card_bytes`` infinite), with tensor parallelism (not measured), and if
    VLLM_ENGINE_ARGS bears on it.
    """
    vllm = settings.vllm
    if not GRAPHS_FROM_GIB * GIB <= card_bytes < math.inf or vllm.vllm_enforce_eager:
        return []
    given = any(word in vllm.vllm_engine_args for word in ("cudagraph", "compilation", "batched_tokens", "speculative"))
    if given or vllm.vllm_tensor_parallel_size > 1:
        return []
    rows = settings.agent.max_batch_trajectories
    return sorted({1, 2, 4, *range(8, rows, 8), rows, *(tokens for tokens in LARGE_STEPS if tokens > rows)})


def graph_bytes(*, layers: int, hidden: int) -> int:
    """Memory of the graphs of ``LARGE_STEPS``: 5.5 GiB measured on 14B (40 layers, 5,120 wide), else in proportion."""
    return int(5.5 * GIB * layers * hidden / (40 * 5120))
