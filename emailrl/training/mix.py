"""Resolve the algorithm from settings; reject combinations that conflict and flag those that rarely work as meant.

A setting that another one disables is also an error, so that a run never appears to use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from emailrl.engines import has_servers
from emailrl.errors import UsageError
from emailrl.settings import AlgorithmSettings, Settings
from emailrl.settings.names import nearest
from emailrl.training.algorithms import ALGORITHMS, Algorithm
from emailrl.training.passes import updates_per_step

Problem = tuple[str, str]
"""The conflict, naming both settings, and what to change."""

CRITIC_SETTINGS = ("value_clip", "value_coef", "critic_learning_rate", "critic_warmup_steps", "gae_lambda")
FILTER_SETTINGS = ("filter_on", "filter_low", "filter_high", "max_refill_rounds")
_DEFAULTS = AlgorithmSettings()


def resolve(settings: Settings) -> Algorithm:
    """Return the algorithm named by ``settings.training.algorithm``, with the overrides of ``settings.algorithm``.

    Raises UsageError for an unknown name, suggesting the nearest, and for conflicting settings.
    """
    name = settings.training.algorithm
    if name not in ALGORITHMS:
        near = nearest(name, ALGORITHMS)
        hint = f"Did you mean {near}? " if near else ""
        raise UsageError(f"Unknown algorithm '{name}'.", f"{hint}Known: {', '.join(ALGORITHMS)}.")
    wanted = settings.algorithm
    overrides: dict[str, Any] = {
        "advantage": wanted.advantage_estimator,
        "whiten": wanted.whiten_advantages,
        "clip_low": wanted.clip_low,
        "clip_high": wanted.clip_high,
        "dual_clip": wanted.dual_clip,
        "ratio_level": wanted.ratio_level,
        "aggregation": wanted.loss_aggregation,
        "kl_estimator": wanted.kl_estimator,
        "kl_in": wanted.kl_in,
        "value_clip": wanted.value_clip,
        "dynamic_filtering": wanted.dynamic_filtering,
        # vLLM's kernels compute slightly different log-probabilities from the trainer's; other trainers correct too.
        "importance_correction": wanted.importance_correction or ("tis" if settings.agent.engine == "vllm" else "off"),
    }
    algorithm = replace(ALGORITHMS[name], **{key: value for key, value in overrides.items() if value is not None})
    if not algorithm.has_critic and wanted.value_clip is None:
        algorithm = replace(algorithm, value_clip=None)
    for check in (_idle, _ratio, _bounds, _rollouts, _filters, _stale):
        for message, hint in check(algorithm, settings):
            raise UsageError(message, hint)
    return algorithm


def advice(algorithm: Algorithm, settings: Settings) -> list[str]:
    """Notes on valid combinations that rarely work as meant; for the run's header."""
    notes, wanted = [], settings.algorithm
    if wanted.beta and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        notes.append("KL_ESTIMATOR=k1 with KL_IN=loss has zero gradient in expectation: use k2 or k3")
    if wanted.beta and algorithm.kl_in == "reward" and algorithm.kl_estimator != "k1":
        notes.append(
            f"KL_ESTIMATOR={algorithm.kl_estimator} with KL_IN=reward does not follow the gradient of the KL: use k1"
        )
    if algorithm.ratio_level == "sequence" and max(algorithm.clip_low, algorithm.clip_high) > 0.1:
        notes.append(
            f"RATIO_LEVEL=sequence averages over tokens: CLIP_LOW={algorithm.clip_low:g} and"
            f" CLIP_HIGH={algorithm.clip_high:g} will hardly ever clip (GSPO uses 3e-4 and 4e-4)"
        )
    updates = updates_per_step(settings)
    if updates > 1 and settings.lora.lora_dropout:
        notes.append(
            f"LORA_DROPOUT={settings.lora.lora_dropout:g} with {updates} updates per step makes the ratios noisy: each"
            " pass drops different weights; use LORA_DROPOUT=0"
        )
    if not algorithm.compares_rollouts and not algorithm.has_critic and not algorithm.whiten:
        notes.append(f"{_estimator(algorithm, settings)} without WHITEN_ADVANTAGES has no baseline at all")
    return notes


def _idle(algorithm: Algorithm, settings: Settings) -> Iterator[Problem]:
    wanted, estimator = settings.algorithm, _estimator(algorithm, settings)
    for name in CRITIC_SETTINGS if not algorithm.has_critic else ():
        if getattr(wanted, name) != getattr(_DEFAULTS, name):
            yield (
                f"{_given(wanted, name)} applies to a critic, but {estimator} has none.",
                f"Use --algorithm ppo or ADVANTAGE_ESTIMATOR=gae, or unset {name.upper()}.",
            )
    if wanted.gamma != 1 and algorithm.compares_rollouts:
        yield (
            f"{_given(wanted, 'gamma')} discounts per token, but {estimator} gives one advantage per sequence.",
            "Use ADVANTAGE_ESTIMATOR=gae or reinforce, or EMAILRL_GAMMA=1.",
        )
    if wanted.constant_length is not None and algorithm.aggregation != "constant":
        yield (
            f"{_given(wanted, 'constant_length')} has no effect with LOSS_AGGREGATION={algorithm.aggregation}.",
            "Use LOSS_AGGREGATION=constant, or unset CONSTANT_LENGTH.",
        )
    if wanted.kl_target is not None and not wanted.beta:
        yield (
            f"{_given(wanted, 'kl_target')} adapts a coefficient that starts at BETA=0 and stays there.",
            "Set BETA above 0, or unset KL_TARGET.",
        )
    for name in ("correction_low", "correction_high") if algorithm.importance_correction == "off" else ():
        if getattr(wanted, name) != getattr(_DEFAULTS, name):
            yield (
                f"{_given(wanted, name)} has no effect with IMPORTANCE_CORRECTION=off.",
                f"Use IMPORTANCE_CORRECTION=tis, icepop or sequence_mask, or unset {name.upper()}.",
            )


def _filters(algorithm: Algorithm, settings: Settings) -> Iterator[Problem]:
    wanted = settings.algorithm
    for name in FILTER_SETTINGS if not algorithm.dynamic_filtering else ():
        if getattr(wanted, name) != getattr(_DEFAULTS, name):
            yield (
                f"{_given(wanted, name)} has no effect without DYNAMIC_FILTERING.",
                f"Use --algorithm dapo or DYNAMIC_FILTERING=true, or unset {name.upper()}.",
            )
    low, high = wanted.filter_low, wanted.filter_high
    if algorithm.dynamic_filtering and low >= high:
        yield (
            f"No mean is between {_given(wanted, 'filter_low')} and {_given(wanted, 'filter_high')}.",
            "Set the lower bound below the upper one.",
        )
    rollouts = settings.training.num_generations
    reachable = any(low < right / rollouts < high for right in range(rollouts + 1))
    by_reward = wanted.filter_on == "reward" or (wanted.filter_on is None and settings.training.mode == "simple")
    if algorithm.dynamic_filtering and not by_reward and not reachable:
        yield (
            f"DYNAMIC_FILTERING drops every question with NUM_GENERATIONS={rollouts}: the share of correct answers is"
            f" never between {low:g} and {high:g}.",
            "Use more rollouts, a wider range, or FILTER_ON=reward.",
        )
    buffer = algorithm.overlong_share if wanted.overlong_buffer is None else wanted.overlong_buffer
    if wanted.overlong_penalty != _DEFAULTS.overlong_penalty and not buffer:
        yield (
            f"{_given(wanted, 'overlong_penalty')} has no effect without OVERLONG_BUFFER.",
            "Set OVERLONG_BUFFER, or unset OVERLONG_PENALTY.",
        )


def _ratio(algorithm: Algorithm, settings: Settings) -> Iterator[Problem]:
    """One ratio per sequence needs one advantage per sequence."""
    if algorithm.ratio_level != "sequence":
        return
    wanted, fix = settings.algorithm, "or RATIO_LEVEL=token."
    if algorithm.has_critic:
        estimator = _estimator(algorithm, settings)
        yield (
            f"RATIO_LEVEL=sequence needs one advantage per sequence, but {estimator} gives one per token.",
            f"Use ADVANTAGE_ESTIMATOR=group_norm, {fix}",
        )
    if algorithm.kl_in == "reward" and wanted.beta:
        yield (
            "RATIO_LEVEL=sequence needs one advantage per sequence, but KL_IN=reward penalizes each token separately.",
            f"Use KL_IN=loss, BETA=0, {fix}",
        )
    if wanted.gamma != 1:
        yield (
            f"RATIO_LEVEL=sequence needs one advantage per sequence; {_given(wanted, 'gamma')} gives one per token.",
            f"Use EMAILRL_GAMMA=1, {fix}",
        )


def _bounds(algorithm: Algorithm, settings: Settings) -> Iterator[Problem]:
    wanted, steps = settings.algorithm, settings.training.max_steps
    if algorithm.importance_correction != "off" and wanted.correction_low >= wanted.correction_high:
        yield (
            f"No weight is between {_given(wanted, 'correction_low')} and {_given(wanted, 'correction_high')}.",
            "Set the lower bound below the upper one, with 1 between them.",
        )
    low, high = wanted.reward_clip_low, wanted.reward_clip_high
    if low is not None and high is not None and low >= high:
        yield (
            f"No reward is between {_given(wanted, 'reward_clip_low')} and {_given(wanted, 'reward_clip_high')}.",
            "Set the lower bound below the upper one.",
        )
    if algorithm.has_critic and wanted.critic_warmup_steps >= steps:
        yield (
            f"{_given(wanted, 'critic_warmup_steps')} leaves none of MAX_STEPS={steps} for the policy.",
            "Lower CRITIC_WARMUP_STEPS or raise MAX_STEPS.",
        )


def _rollouts(algorithm: Algorithm, settings: Settings) -> Iterator[Problem]:
    if settings.training.num_generations < algorithm.min_group_size:
        yield (
            f"NUM_GENERATIONS={settings.training.num_generations} is too low for {algorithm.name}, which compares the"
            f" rollouts of one question ({_estimator(algorithm, settings)}).",
            f"Use at least {algorithm.min_group_size}, or ADVANTAGE_ESTIMATOR=reinforce or gae.",
        )
    correction = algorithm.importance_correction
    if correction != "off" and settings.agent.engine == "openai":
        yield (
            f"IMPORTANCE_CORRECTION={correction} needs the sampler's log-probabilities, which EMAILRL_ENGINE=openai"
            " does not return.",
            "Train with EMAILRL_ENGINE=transformers or vllm.",
        )


def staleness(settings: Settings) -> int:
    """Steps by which the sampling policy may lag behind the trained one: MAX_STALENESS or its default."""
    return settings.vllm.staleness(servers=has_servers(settings))


def _stale(algorithm: Algorithm, settings: Settings) -> Iterator[Problem]:
    lag = staleness(settings)
    if lag and not has_servers(settings):
        yield (
            f"MAX_STALENESS={lag} needs samplers of their own; in process, sampling and training take turns.",
            "Use --engine vllm with VLLM_URLS (emailrl serve starts servers), or MAX_STALENESS=0.",
        )
    if lag and algorithm.importance_correction == "off":
        yield (
            f"MAX_STALENESS={lag} trains on rollouts of an older policy, which IMPORTANCE_CORRECTION=off ignores.",
            "Use IMPORTANCE_CORRECTION=tis, icepop or sequence_mask, or MAX_STALENESS=0.",
        )


def _given(wanted: AlgorithmSettings, name: str) -> str:
    value, label = getattr(wanted, name), name.upper() if "_" in name else f"EMAILRL_{name.upper()}"
    return f"{label}={value:g}" if isinstance(value, float) else f"{label}={value}"


def _estimator(algorithm: Algorithm, settings: Settings) -> str:
    """The advantage estimator as ``SETTING=value``, and its source if it was not set."""
    source = "" if settings.algorithm.advantage_estimator else f" (--algorithm {algorithm.name})"
    return f"ADVANTAGE_ESTIMATOR={algorithm.advantage}{source}"
