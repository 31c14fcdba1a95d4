"""The algorithm in force: the named one with the overrides of the settings, checked against the table of needs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from emailrl.base.errors import UsageError
from emailrl.settings import Settings
from emailrl.settings.names import leaves, nearest
from emailrl.settings.needs import errors, notes
from emailrl.training.algorithms import ALGORITHMS, Algorithm, default_low

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
    algorithm, now = in_force(settings)
    for reason, remedy in errors(now):
        raise UsageError(reason, remedy)
    return algorithm


def advice(settings: Settings) -> list[str]:
    """Settings that were given but have no effect, and combinations that rarely work as meant; for the run's header."""
    return list(notes(in_force(settings)[1]))


def in_force(settings: Settings) -> tuple[Algorithm, SimpleNamespace]:
    """The algorithm, unchecked, and every setting by name, for `settings.needs`.

    The names have the algorithm's values where they are not set; ``given`` has those that are.
    """
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
    sections = {leaf: getattr(settings, leaf.section) for leaf in leaves()}
    own = {leaf.key: getattr(section, leaf.field) for leaf, section in sections.items()}
    given = {leaf.key: own[leaf.key] for leaf, section in sections.items() if leaf.field in section.model_fields_set}
    values = own | {setting: getattr(algorithm, field) for setting, field in OVERRIDES.items()}
    buffer = settings.algorithm.overlong_buffer
    if values["correction_low"] is None:
        values["correction_low"] = default_low(algorithm.importance_correction)
    source = "" if settings.algorithm.advantage_estimator else f" (--algorithm {algorithm.name})"
    return algorithm, SimpleNamespace(
        **values,
        given=given,
        critic=algorithm.has_critic,
        compares=algorithm.compares_rollouts,
        estimator=f"ADVANTAGE_ESTIMATOR={algorithm.advantage}{source}",
        overlong=algorithm.overlong_share if buffer is None else buffer,
        updates=settings.training.updates_per_step,
        servers=settings.has_servers,
        lag=settings.staleness,
    )
