"""Seconds per step between an update and the next rollouts: the new adapter, and vLLM's sleep beside the trainer."""

from __future__ import annotations

from typing import Final

from emailrl.engines import engine_gpus, has_servers
from emailrl.settings import Settings

HANDOVER: Final = 0.7
"""Seconds to write an adapter, load it into vLLM and verify it: 0.54 and 0.68 were measured on 4B, 0.80 and 0.87 on
14B (``tests/gpu/bench_grpo_trl.py`` and ``bench_grpo_step.py``)."""
HANDED_OVER: Final = 0.5
"""The trainer's part of it if servers do the rest during the next update: it saves the adapter, reads it and copies it
into its model. 0.42 were measured on 4B and 0.58 on 14B, in the same steps."""
WAKING: Final = 0.55
"""Seconds in which vLLM on a trainer's GPU wakes and goes to sleep, besides moving its weights."""
MOVED: Final = 25e9
"""Bytes of weights that it moves per second. Both were fitted to 0.87 s on 4B and 1.71 on 14B, in the same steps."""


def overlaps(settings: Settings) -> bool:
    """Whether servers sample the next step while this one trains."""
    return has_servers(settings) and settings.vllm.staleness(servers=True) > 0


def handover_seconds(settings: Settings, weights: int, *, vllm_sleeps: bool) -> float:
    """Seconds per step for which neither rollouts nor training can go on; 0 with the transformers engine.

    ``weights`` are the bytes of the model in vLLM.
    """
    if settings.agent.engine != "vllm":
        return 0.0
    if has_servers(settings):
        return HANDED_OVER if overlaps(settings) else HANDOVER
    return HANDOVER + (WAKING + weights / engine_gpus(settings) / MOVED if vllm_sleeps else 0.0)
