"""Engines: from prompts to sampled tokens. ``build_engine`` picks one; ``base`` holds what they all share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from emailrl.engines.base import Advance, Completion, Engine, PolicyEngine, Request, SamplingParams
from emailrl.errors import UsageError

if TYPE_CHECKING:
    from emailrl.policy.load import Policy
    from emailrl.settings import Settings

__all__ = [
    "Advance",
    "Completion",
    "Engine",
    "PolicyEngine",
    "Request",
    "SamplingParams",
    "build_chat_engine",
    "build_engine",
    "is_chat",
]


def is_chat(settings: Settings) -> bool:
    """Whether the engine set talks to a chat server: it plays without a policy, a tokenizer or an adapter."""
    return settings.agent.engine == "openai"


def build_chat_engine(settings: Settings, tools: Sequence[dict[str, Any]]) -> Engine:
    """The engine of a chat server that knows ``settings.model.name``, given the tools' OpenAI function schemas."""
    from emailrl.engines.openai_engine import OpenAIEngine

    return OpenAIEngine(settings, tools)


def build_engine(settings: Settings, policy: Policy) -> PolicyEngine:
    """The engine that ``settings.agent.engine`` names, sampling from the policy's base model until it gets an adapter.

    ``auto`` is in process with transformers. Raises UsageError for an engine that cannot serve a policy.
    """
    if is_chat(settings):
        raise UsageError(
            "The engine openai hands back no token ids: it plays in rollout and benchmark, and cannot be trained with.",
            "Use --engine transformers or vllm.",
        )
    if settings.agent.engine == "vllm":
        raise UsageError(f"The engine {settings.agent.engine} is not available.", "Use --engine transformers.")
    from emailrl.engines.renderer import stop_ids
    from emailrl.engines.transformers_engine import TransformersEngine

    return TransformersEngine(
        policy.model,
        stop_ids(policy.tokenizer),
        max_rows=settings.agent.max_batch_trajectories,
        max_model_len=settings.model.max_model_len,
    )
