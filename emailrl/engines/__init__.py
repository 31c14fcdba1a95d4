"""Engines: from prompts to sampled tokens. ``build_engine`` selects one; ``base`` defines the interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from emailrl.base.errors import UsageError
from emailrl.engines.base import Advance, Completion, Engine, PolicyEngine, Request, SamplingParams

if TYPE_CHECKING:
    from emailrl.model.policy import Policy
    from emailrl.settings import PlayingSettings, PolicySettings

__all__ = ["Advance", "Completion", "Engine", "PolicyEngine", "Request", "SamplingParams"]

P = TypeVar("P", bound="PolicySettings")


def check_engine(settings: PolicySettings, *, trainable: bool) -> None:
    """Raise UsageError or EmailRLError for an engine that cannot serve a policy, before any model is loaded."""
    if settings.is_chat:
        what = "The openai engine returns no token ids: it works in rollout and benchmark, but not in training."
        raise UsageError(what, "Use --engine transformers or vllm.")
    if settings.agent.engine == "vllm":
        from emailrl.engines.vllm.arguments import check_vllm

        check_vllm(settings, trainable=trainable)


def check_player(settings: PlayingSettings) -> None:
    """Raise UsageError or EmailRLError for an engine that cannot run rollouts, before any model is loaded."""
    if settings.is_chat:
        from emailrl.engines.openai import checked_key

        checked_key(settings.openai, settings.rewards)
    else:
        check_engine(settings, trainable=False)


def build_engine(settings: PolicySettings, policy: Policy) -> PolicyEngine:
    """The engine that ``settings.agent.engine`` names, sampling from the policy's base model until it gets an adapter.
    ``auto`` means transformers, in this process. Raises UsageError for an engine that cannot serve a policy."""
    check_engine(settings, trainable=policy.trainable)
    from emailrl.engines.local.engine import TransformersEngine, generation_stop_ids
    from emailrl.engines.local.single import SingleEngine
    from emailrl.engines.renderer import stop_ids

    agent, vllm, stops = settings.agent, settings.vllm, stop_ids(policy.tokenizer)
    if agent.engine == "vllm":
        from emailrl.engines.vllm.local import VllmEngine
        from emailrl.engines.vllm.probe import Probe
        from emailrl.engines.vllm.servers import VllmServers

        probe = Probe(policy, temperature=agent.temperature, tolerance=vllm.vllm_probe_tolerance)
        stops |= generation_stop_ids(policy.model)
        return VllmServers(settings, probe, stops) if vllm.vllm_urls else VllmEngine(settings, policy, probe, stops)
    from emailrl.engines.base import report
    from emailrl.engines.budget import GIB, most_rows
    from emailrl.model.lora import has_full_attention

    model, parameters = policy.model, sum(parameter.numel() for parameter in policy.model.parameters())
    if settings.model.backend == "unsloth":
        from emailrl.model.unsloth_backend import unpatched

        model = unpatched(model)
    rows = most_rows(agent, parameters, on_gpu=policy.device.type == "cuda")
    cache_bytes = None if agent.kv_cache_gib is None else int(agent.kv_cache_gib * GIB)
    window, tokens = settings.model.max_model_len, agent.max_tokens_per_rollout_pass
    limits: dict[str, int | None] = {"max_model_len": window, "max_pass_tokens": tokens, "cache_bytes": cache_bytes}
    if has_full_attention(model):
        return TransformersEngine(model, stops, max_rows=rows, trains=policy.trainable, **limits)
    what = f"{settings.model.name} does not have full attention in every layer"
    report(f"{what}: trajectories are sampled one after the other (slower). --engine vllm samples them together.")
    return SingleEngine(model, stops, **limits)


def open_policy(
    settings: P, adapter: Path | None = None, check: Callable[[Any], None] | None = None
) -> tuple[P, Policy, PolicyEngine]:
    """Load the base model that the settings name, and an engine for it with ``adapter``; the settings come back within
    the model's own limits, and the caller closes the engine. Raises as `load_policy`, which takes ``check``, and
    `build_engine`."""
    from emailrl.model.policy import load_policy
    from emailrl.model.resolve import with_token_limit

    policy = load_policy(settings, check=check)
    settings = settings.model_copy(update={"agent": with_token_limit(settings.agent, policy.model)})
    engine = build_engine(settings, policy)
    if adapter is not None:
        try:
            engine.load_adapter(adapter, str(adapter.absolute()))
        except BaseException:
            engine.close()
            raise
    return settings, policy, engine
