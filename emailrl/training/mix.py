"""The algorithm in force: the named one with the overrides of the settings, checked against the table of needs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from emailrl.base.errors import UsageError
from emailrl.settings import Settings
from emailrl.settings.names import leaves, nearest
from emailrl.settings.needs import unmet
from emailrl.training.algorithms import ALGORITHMS, Algorithm, default_low
from emailrl.training.passes import updates_per_step

OVERRIDES: Final = {
    "advantage_estimator": "advantage",
    "whiten_advantages": "whiten",
    "clip_low": "clip_low",
    "clip_high": "clip_high",
    "dual_clip": "dual_clip",
    "ratio_level": "ratio_level",
    "loss_aggregation": "aggregation",
    "kl_estimator": "kl_estimator",
    "kl_in": "kl_in",
    "value_clip": "value_clip",
    "dynamic_filtering": "dynamic_filtering",
    "importance_correction": "importance_correction",
}
"""Setting → the field of the algorithm that it overrides."""


def resolve(settings: Settings) -> Algorithm:
    """Return the algorithm named by ``settings.training.algorithm``, with the overrides of ``settings.algorithm``.

    Raises UsageError for an unknown name, suggesting the nearest, and for conflicting settings. A setting that another
    one disables is also an error, so that a run never appears to use it.
    """
    algorithm = override(settings)
    for reason, remedy in unmet(settings, in_force(algorithm, settings), "error"):
        raise UsageError(reason, remedy)
    return algorithm


def override(settings: Settings) -> Algorithm:
    """The algorithm as ``resolve`` returns it, without a check of the combination."""
    name = settings.training.algorithm
    if name not in ALGORITHMS:
        near = nearest(name, ALGORITHMS)
        hint = f"Did you mean {near}? " if near else ""
        raise UsageError(f"Unknown algorithm '{name}'.", f"{hint}Known: {', '.join(ALGORITHMS)}.")
    # vLLM's kernels compute slightly different log-probabilities from the trainer's; other trainers correct too.
    values: dict[str, Any] = {"importance_correction": "tis" if settings.agent.engine == "vllm" else "off"}
    given = {field: getattr(settings.algorithm, setting) for setting, field in OVERRIDES.items()}
    values |= {field: value for field, value in given.items() if value is not None}
    algorithm = replace(ALGORITHMS[name], **values)
    if not algorithm.has_critic and settings.algorithm.value_clip is None:
        algorithm = replace(algorithm, value_clip=None)
    return algorithm


def in_force(algorithm: Algorithm, settings: Settings) -> SimpleNamespace:
    """Every setting by name, with the algorithm's values where it is not set, and what follows for `settings.needs`."""
    values = {leaf.key: getattr(getattr(settings, leaf.section), leaf.field) for leaf in leaves()}
    values |= {setting: getattr(algorithm, field) for setting, field in OVERRIDES.items()}
    buffer = settings.algorithm.overlong_buffer
    if values["correction_low"] is None:
        values["correction_low"] = default_low(algorithm.importance_correction)
    source = "" if settings.algorithm.advantage_estimator else f" (--algorithm {algorithm.name})"
    return SimpleNamespace(
        **values,
        critic=algorithm.has_critic,
        compares=algorithm.compares_rollouts,
        estimator=f"ADVANTAGE_ESTIMATOR={algorithm.advantage}{source}",
        overlong=algorithm.overlong_share if buffer is None else buffer,
        updates=updates_per_step(settings),
        servers=settings.has_servers,
        lag=staleness(settings),
    )


def advice(algorithm: Algorithm, settings: Settings) -> list[str]:
    """Settings that were given but have no effect, and combinations that rarely work as meant; for the run's header."""
    return [reason for reason, _ in unmet(settings, in_force(algorithm, settings), "note")]


def staleness(settings: Settings) -> int:
    """Steps by which the sampling policy may lag behind the trained one: MAX_STALENESS or its default."""
    return settings.vllm.staleness(servers=settings.has_servers)
