"""Engines: from prompts to sampled tokens. ``build_engine`` selects one; ``base`` defines the interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from emailrl.base.errors import UsageError
from emailrl.engines.base import Advance, Completion, Engine, PolicyEngine, Request, SamplingParams

if TYPE_CHECKING:
    from emailrl.model.policy import Policy
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
    "check_engine",
    "check_player",
    "engine_gpus",
    "has_servers",
    "is_chat",
    "vllm_in_process",
]


def is_chat(settings: Settings) -> bool:
    """Whether the configured engine is a chat server, which needs no policy, tokenizer or adapter."""
    return settings.agent.engine == "openai"


def has_servers(settings: Settings) -> bool:
    """Whether vLLM servers sample, rather than an engine on the trainer's own GPU."""
    return settings.agent.engine == "vllm" and bool(settings.vllm.vllm_urls)


def vllm_in_process(settings: Settings) -> bool:
    """Whether vLLM samples on the trainer's own GPU."""
    return settings.agent.engine == "vllm" and not settings.vllm.vllm_urls


def engine_gpus(settings: Settings) -> int:
    """GPUs, each with a rank, that share one engine in the trainer's process."""
    return settings.vllm.vllm_tensor_parallel_size if vllm_in_process(settings) else 1


def build_chat_engine(settings: Settings, tools: Sequence[dict[str, Any]]) -> Engine:
    """A chat-server engine for ``settings.model.name``; ``tools`` are OpenAI function schemas."""
    from emailrl.engines.openai import OpenAIEngine

    return OpenAIEngine(settings, tools)


def check_engine(settings: Settings, *, trainable: bool) -> None:
    """Raise UsageError or EmailRLError for an engine that cannot serve a policy, before any model is loaded."""
    if is_chat(settings):
        raise UsageError(
            "The openai engine returns no token ids: it works in rollout and benchmark, but not in training.",
            "Use --engine transformers or vllm.",
        )
    if settings.agent.engine == "vllm":
        from emailrl.engines.vllm.arguments import check_vllm

        check_vllm(settings, trainable=trainable)


def check_player(settings: Settings) -> None:
    """Raise UsageError or EmailRLError for an engine that cannot run rollouts, before any model is loaded."""
    if not is_chat(settings):
        check_engine(settings, trainable=False)
        return
    from emailrl.engines.openai import checked_key

    checked_key(settings)


def build_engine(settings: Settings, policy: Policy) -> PolicyEngine:
    """The engine that ``settings.agent.engine`` names, sampling from the policy's base model until it gets an adapter.

    ``auto`` means transformers, in this process. Raises UsageError for an engine that cannot serve a policy.
    """
    check_engine(settings, trainable=policy.trainable)
    from emailrl.engines.renderer import stop_ids

    if settings.agent.engine == "vllm":
        return _build_vllm(settings, policy)
    from emailrl.engines.budget import GIB, most_rows
    from emailrl.engines.local.engine import TransformersEngine

    model = policy.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if settings.model.backend == "unsloth":
        from emailrl.model.unsloth_backend import unpatched

        model = unpatched(model)
    return TransformersEngine(
        model,
        stop_ids(policy.tokenizer),
        max_rows=most_rows(settings.agent, parameters, on_gpu=policy.device.type == "cuda"),
        max_model_len=settings.model.max_model_len,
        max_pass_tokens=settings.agent.max_tokens_per_rollout_pass,
        cache_bytes=None if settings.agent.kv_cache_gib is None else int(settings.agent.kv_cache_gib * GIB),
        cuda_graphs=settings.agent.cuda_graphs,
    )


def _build_vllm(settings: Settings, policy: Policy) -> PolicyEngine:
    from emailrl.engines.local.engine import generation_stop_ids
    from emailrl.engines.renderer import stop_ids
    from emailrl.engines.vllm.probe import Probe

    tolerance = settings.vllm.vllm_probe_tolerance
    probe = Probe(policy, temperature=settings.agent.temperature, tolerance=tolerance)
    stops = stop_ids(policy.tokenizer) | generation_stop_ids(policy.model)
    if settings.vllm.vllm_urls:
        from emailrl.engines.vllm.servers import VllmServers

        agent, vllm, most = settings.agent, settings.vllm, settings.model.max_model_len
        return VllmServers(agent, vllm, probe, stops, max_model_len=most)
    from emailrl.engines.vllm.local import VllmEngine

    return VllmEngine(settings, policy, probe, stops)
