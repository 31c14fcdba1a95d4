"""Settings that were given but have no effect, reported in a run's header.

Contradictory settings are errors (``mix``); these are valid, but unused.
"""

from __future__ import annotations

from collections.abc import Iterator

from emailrl.settings import Settings
from emailrl.training.algorithms import Algorithm

IN_PROCESS = (
    "vllm_tensor_parallel_size",
    "vllm_gpu_memory_utilization",
    "vllm_enforce_eager",
    "vllm_enable_prefix_caching",
    "vllm_enable_sleep",
)
"""Settings of in-process vLLM, for which servers have their own flags."""

ONE_UPDATE = "with one update per step (NUM_MINI_BATCHES=1, UPDATE_EPOCHS=1): every ratio is 1"


def updates_per_step(settings: Settings) -> int:
    """Optimizer updates per step; fewer if a step has fewer trajectories than mini-batches."""
    return settings.training.num_mini_batches * settings.training.update_epochs


def idle_settings(algorithm: Algorithm, settings: Settings) -> list[str]:
    """One line per setting that was given but has no effect, with the reason."""
    rows = [*_of_the_update(algorithm, settings), *_of_the_run(settings), *_of_vllm(settings)]
    said = [
        f"{name.upper()} has no effect {reason}"
        for section, name, reason in rows
        if name in getattr(settings, section).model_fields_set
    ]
    if algorithm.name == "gspo" and updates_per_step(settings) == 1:
        said.append(f"--algorithm gspo differs from grpo only in its aggregation {ONE_UPDATE}")
    return said


Row = tuple[str, str, str]
"""Section, setting, and the reason it is unused."""


def _of_the_update(algorithm: Algorithm, settings: Settings) -> Iterator[Row]:
    if updates_per_step(settings) == 1:
        for name in ("clip_low", "clip_high", "dual_clip", "value_clip", "ratio_level"):
            yield "algorithm", name, ONE_UPDATE
    if not settings.algorithm.beta:
        yield "algorithm", "reference", "with BETA=0: the reference is not computed"
    if settings.algorithm.kl_target is None:
        yield "algorithm", "kl_horizon", "without KL_TARGET"
    if not algorithm.compares_rollouts:
        estimator = f"with the advantage estimator {algorithm.advantage}, which does not compare rewards within a group"
        yield "algorithm", "min_group_std", estimator


def _of_the_run(settings: Settings) -> Iterator[Row]:
    training = settings.training
    if training.lr_scheduler == "constant":
        yield "training", "min_lr_ratio", "with LR_SCHEDULER=constant"
    if training.warmup_ratio is not None:
        yield "training", "warmup_steps", "when WARMUP_RATIO is set"
    if settings.output.export_dir is None:
        yield "output", "export_format", "without EXPORT_DIR"
    if settings.model.shard == "off":
        yield "model", "shard_offload", "with SHARD=off"


def _of_vllm(settings: Settings) -> Iterator[Row]:
    if settings.vllm.vllm_urls:
        for name in IN_PROCESS:
            yield "vllm", name, "when VLLM_URLS is set: the servers have their own flags"
