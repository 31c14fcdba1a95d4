"""Engines: from prompts to sampled tokens. ``build_engine`` picks one; ``base`` holds what they all share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emailrl.engines.base import Advance, Completion, Engine, PolicyEngine, Request, SamplingParams
from emailrl.errors import UsageError

if TYPE_CHECKING:
    from emailrl.policy.load import Policy
    from emailrl.settings import Settings

__all__ = ["Advance", "Completion", "Engine", "PolicyEngine", "Request", "SamplingParams", "build_engine"]


def build_engine(settings: Settings, policy: Policy) -> PolicyEngine:
    """The engine that ``settings.agent.engine`` names, sampling from the policy's base model until it gets an adapter.

    Raises UsageError for an engine that cannot serve a policy.
    """
    if settings.agent.engine not in ("auto", "transformers"):
        raise UsageError(f"The engine {settings.agent.engine} is not available.", "Use --engine transformers.")
    from emailrl.engines.renderer import stop_ids
    from emailrl.engines.transformers_engine import TransformersEngine

    return TransformersEngine(
        policy.model,
        stop_ids(policy.tokenizer),
        max_rows=settings.agent.max_batch_trajectories,
        max_model_len=settings.model.max_model_len,
    )
