"""Seconds per step between an update and the next rollouts: the new adapter, and vLLM's sleep beside the trainer."""

from __future__ import annotations

from typing import Final

from emailrl.engines import has_servers
from emailrl.settings import Settings

HANDOVER: Final = 1.7
"""Seconds to write an adapter, load it into vLLM and verify it: docs/performance.md, 14B. It hardly depends on size."""
HANDED_OVER: Final = 0.5
"""The trainer's part of it, if servers do the rest during the next update: 0.36 to save the adapter, 14B, and 0.14 to
copy it into the trainer's model, 4B on a CPU. 1.4 were measured on 4B before it was shortened."""
SLEEPING: Final = 1.5
"""Seconds in which vLLM on a trainer's GPU wakes and goes to sleep: the same step."""


def overlaps(settings: Settings) -> bool:
    """Whether servers sample the next step while this one trains."""
    return has_servers(settings) and settings.vllm.staleness(servers=True) > 0


def handover_seconds(settings: Settings, *, vllm_sleeps: bool) -> float:
    """Seconds per step for which neither rollouts nor training can go on; 0 with the transformers engine."""
    if settings.agent.engine != "vllm":
        return 0.0
    if has_servers(settings):
        return HANDED_OVER if overlaps(settings) else HANDOVER
    return HANDOVER + SLEEPING * vllm_sleeps
