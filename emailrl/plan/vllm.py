"""In-process vLLM's part of a trainer's GPU."""

from __future__ import annotations

from typing import Final

from emailrl.engines import engine_gpus, vllm_in_process
from emailrl.engines.vllm.arguments import VLLM_WORK, Trainer, capture_sizes, graph_bytes, sleeps, vllm_share
from emailrl.plan.activations import Layout
from emailrl.plan.gpus import GIB
from emailrl.policy.shape import Shape
from emailrl.settings import Settings

ASLEEP: Final = int(1.5 * GIB)
"""Memory a sleeping vLLM keeps on the GPU. Assumed; 0.9 and 1.2 GiB on 14B (docs/performance.md)."""


def sampling_bytes(shape: Shape, settings: Settings, layout: Layout, total: int) -> tuple[dict[str, int], int]:
    """Bytes of vLLM on each of its GPUs while it samples, by part, and those of its share for its KV cache."""
    weights = shape.weight_bytes(2, four_bit=settings.model.load_in_4bit)
    share = int(vllm_share(settings, weights, total))
    parts = {"vLLM": share}
    if layout.on_gpu and capture_sizes(settings, total):
        parts["CUDA graphs"] = graph_bytes(layers=shape.layers, hidden=shape.hidden)
    return parts, max(share - weights // engine_gpus(settings) - VLLM_WORK, 0)


def vllm_sleeps(shape: Shape, settings: Settings, layout: Layout, total: int) -> bool:
    """Whether vLLM sleeps while the trainer works, as the engine decides."""
    if not vllm_in_process(settings):
        return False
    trainer = None
    if layout.layers == "fused":
        trainer = Trainer.of_sizes(
            settings.training,
            weights=shape.weight_bytes(layout.itemsize),
            adapter=shape.lora_parameters(settings.lora.lora_rank, settings.lora.target_modules),
            itemsize=layout.itemsize,
            layers=shape.layers,
            **shape.widths,
        )
    return sleeps(settings, trainer, total)
