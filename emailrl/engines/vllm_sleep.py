"""Whether in-process vLLM sleeps while the trainer works: decided here for the engine and for ``emailrl plan``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from emailrl.engines.budget import GIB
from emailrl.engines.vllm_graphs import capture_sizes, graph_bytes
from emailrl.policy.layout import Keep, choose_keep, micro_batch_cap, numbers_for
from emailrl.settings import Settings, TrainingSettings

if TYPE_CHECKING:
    from emailrl.policy.load import Policy

VLLM_WORK: Final = 2 * GIB
"""Part of vLLM's share reserved for activations and CUDA graphs. Assumed."""
ADAPTER_BYTES: Final = 24
"""Per parameter of the adapter: float32 weight, gradient, two moments and the sampler's copy, and one in the base's
dtype."""
SHARE_FOR_BOTH: Final = 0.9
"""Share of a GPU that trainer and sampler may take together; the rest is CUDA's, the logits and fragmentation."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a trainer with fused layers needs of a GPU, in bytes."""

    weights: int
    """Of the frozen base."""
    adapter: int
    activations: int
    """Of a full micro-batch, with everything kept that GRADIENT_CHECKPOINTING keeps where memory is ample."""
    graphs: int = 0
    """Of vLLM's CUDA graphs for this model, if it captures those of ``vllm_graphs``."""

    @classmethod
    def of_sizes(
        cls, training: TrainingSettings, *, weights: int, adapter: int, itemsize: int, layers: int, **widths: int
    ) -> Trainer:
        """``adapter`` is in parameters, ``itemsize`` the base's; ``widths`` as for ``numbers_for``."""
        numbers = {keep: numbers_for(keep, layers=layers, **widths) for keep in Keep}
        keep = choose_keep(training.gradient_checkpointing, math.inf, numbers)
        tokens = micro_batch_cap(training, on_gpu=True, hidden=widths["hidden"])
        graphs = graph_bytes(layers=layers, hidden=widths["hidden"])
        return cls(weights, ADAPTER_BYTES * adapter, tokens * itemsize * numbers[keep], graphs)

    @classmethod
    def of(cls, policy: Policy, settings: Settings) -> Trainer | None:
        """A loaded policy's, None if it is not trained with fused layers: the needs of others are not known."""
        from emailrl.policy.fused.model import fused_backbone

        fused = fused_backbone(policy.model)
        if not policy.trainable or fused is None:
            return None
        frozen = [parameter for parameter in policy.model.parameters() if not parameter.requires_grad]
        return cls.of_sizes(
            settings.training,
            weights=sum(parameter.numel() * parameter.itemsize for parameter in frozen),
            adapter=sum(parameter.numel() for _, parameter in policy.trainable_parameters()),
            itemsize=policy.dtype.itemsize,
            layers=len(fused.layers),
            **fused.widths,
        )


def sleeps(settings: Settings, trainer: Trainer | None, card_bytes: float) -> bool:
    """Whether vLLM releases a GPU of ``card_bytes`` to the trainer between rollouts.

    It does as VLLM_ENABLE_SLEEP says; with ``auto``, unless both are known to fit.
    """
    wanted = settings.vllm.vllm_enable_sleep
    if wanted != "auto" or trainer is None:
        return wanted != "off"
    both = trainer.weights + trainer.adapter + trainer.activations + vllm_share(settings, trainer.weights, card_bytes)
    if capture_sizes(settings, card_bytes):
        both += trainer.graphs
    return both > SHARE_FOR_BOTH * card_bytes


def vllm_share(settings: Settings, weight_bytes: int, card_bytes: float) -> float:
    """Bytes of vLLM on each of its GPUs while it samples; KV_CACHE_GIB overrides VLLM_GPU_MEMORY_UTILIZATION."""
    cache = settings.agent.kv_cache_gib
    if cache is None:
        return settings.vllm.vllm_gpu_memory_utilization * card_bytes
    return weight_bytes // settings.vllm.vllm_tensor_parallel_size + VLLM_WORK + cache * GIB
