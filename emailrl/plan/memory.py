"""A run's memory on one device, from settings and shape: resident parts, sampling and training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from emailrl.engines import engine_gpus, has_servers, vllm_in_process
from emailrl.engines.budget import (
    BLOCK,
    FREE_SHARE,
    GROWTH,
    PREFILL_TOKENS,
    blocks_of,
    blocks_within,
    merges,
    most_rows,
    rows_per_server,
)
from emailrl.plan.activations import WORKSPACES, Layers, Layout, head_bytes, kept_bytes, work_bytes
from emailrl.plan.gpus import GIB, Device
from emailrl.plan.tokens import Tokens
from emailrl.plan.vllm import ASLEEP, sampling_bytes, vllm_sleeps
from emailrl.policy.layout import (
    Keep,
    choose_keep,
    dtype_name,
    micro_batch_cap,
    numbers_for,
    recomputes,
    shards_base,
    wants_fused,
    why_not_packed,
)
from emailrl.policy.shape import Shape
from emailrl.settings import Settings

USABLE: Final = 0.95
"""Share of a GPU's memory available to tensors; the rest is the CUDA context and fragmentation."""
CONTEXT: Final = int(0.6 * GIB)
"""Memory that CUDA itself takes on a GPU."""
PROCESS: Final = int(0.8 * GIB)
"""A Python process with torch and transformers on a CPU."""
CACHE_GROWTH: Final = (1 + GROWTH) / 2
"""The in-process engine's cache is between 1 and ``GROWTH`` times as large as needed."""
HEAP: Final = 1.0
"""Freed blocks that glibc's heap keeps on a CPU, relative to the activations; measured with nano.
MALLOC_MMAP_THRESHOLD_=65536 returns them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part; ``sampling`` and ``training`` are the two peaks, ``resident`` counted in both."""

    device_bytes: int
    resident: dict[str, int]
    """Always present: weights, adapter, optimizer, and so on."""
    sampling: dict[str, int]
    training: dict[str, int]
    layout: Layout
    keep: Keep
    """What each layer keeps for the backward pass."""
    micro_batch_tokens: int
    cache_tokens: int | None = None
    """Capacity of the KV cache in tokens; None if there is none in this process."""
    cache_needs: int = 0
    """Tokens it must hold: vLLM's context window, or the longest trajectory of the in-process engine."""
    at_once: int = 1
    """Trajectories that are sampled together."""
    cards: int = 1
    """GPUs over which the base is sharded."""
    vllm_sleeps: bool = False
    """Whether in-process vLLM sleeps while the trainer works."""
    notes: list[str] = field(default_factory=list)

    @property
    def sampling_peak(self) -> int:
        """Bytes while rollouts are sampled."""
        return sum(self.resident.values()) + sum(self.sampling.values())

    @property
    def training_peak(self) -> int:
        """Bytes at the update's peak, as ``torch.cuda.max_memory_allocated`` would state them."""
        return sum(self.resident.values()) + sum(self.training.values())

    @property
    def peak(self) -> int:
        """The larger peak."""
        return max(self.sampling_peak, self.training_peak)

    @property
    def usable(self) -> int:
        """Usable memory of the device."""
        return int(USABLE * self.device_bytes)

    @property
    def fits(self) -> bool:
        """Whether the peak fits and the cache is large enough."""
        holds = self.cache_tokens is None or self.cache_tokens >= self.cache_needs
        return holds and self.peak <= self.usable


def plan_memory(shape: Shape, settings: Settings, device: Device, tokens: Tokens, *, cards: int = 1) -> Memory:
    """The memory of one process that samples and trains on ``device``, one of ``cards`` ranks on its host."""
    total = int(device.gib * GIB)
    layout = layout_of(shape, settings, device)
    weights = shape.weight_bytes(layout.itemsize, four_bit=settings.model.load_in_4bit)
    if not shards_base(settings.model, weight_bytes=weights, card_bytes=total, cards=cards):
        cards = 1
    resident = _resident(shape, settings, layout, cards)
    slots = _slots(shape, settings, layout, tokens)
    sampling, room, needs = _sampling(shape, settings, layout, tokens, total, sum(resident.values()))
    asleep = vllm_sleeps(shape, settings, layout, total)
    awake = sampling if vllm_in_process(settings) else {}
    training = {"vLLM": ASLEEP} if asleep else awake
    batch = micro_batch_tokens(shape, settings, device, tokens)
    free = total - context_of(layout) - sum(resident.values()) - sum(training.values())
    keep = keep_of(shape, settings, layout, batch, free)
    activations = training_bytes(shape, layout, keep, batch, tokens)
    return Memory(
        device_bytes=total,
        resident=resident,
        sampling=sampling,
        training=training | activations,
        layout=layout,
        keep=keep,
        micro_batch_tokens=batch,
        cache_tokens=room,
        cache_needs=needs,
        at_once=slots if room is None else max(min(slots, room // tokens.per_trajectory), 1),
        cards=cards,
        vllm_sleeps=asleep,
        notes=_notes(settings, layout),
    )


def layout_of(shape: Shape, settings: Settings, device: Device) -> Layout:
    """The layer implementation a policy trains with, as decided by ``policy.prepare``."""
    model, training = settings.model, settings.training
    packs = training.packing and not why_not_packed(model.attn_implementation, fully=shape.plain_attention)
    plain = not settings.lora.lora_dropout and not model.load_in_4bit and shape.activation == "silu"
    layers: Layers = "transformers"
    if model.backend == "unsloth":
        layers = "unsloth"
    elif plain and wants_fused(training, packs=packs, on_gpu=device.is_gpu):
        layers = "fused"
    return Layout(
        layers=layers,
        itemsize=4 if dtype_name(model.dtype, on_gpu=device.is_gpu) == "fp32" else 2,
        rank=settings.lora.lora_rank,
        targets=tuple(shape.lora_targets(settings.lora.target_modules)),
        dropout=settings.lora.lora_dropout > 0,
        eager=model.attn_implementation == "eager",
        on_gpu=device.is_gpu,
        fused_head=layers == "fused" and not settings.algorithm.entropy_coef,
        shares=packs and training.prefix_sharing and not settings.lora.lora_dropout and layers != "unsloth",
    )


def micro_batch_tokens(shape: Shape, settings: Settings, device: Device, tokens: Tokens) -> int:
    """Tokens of training's largest forward pass: the cap, or the step if smaller, or one sample if larger."""
    cap = micro_batch_cap(settings.training, on_gpu=device.is_gpu, hidden=shape.hidden)
    rows = settings.training.max_rows_per_micro_batch
    if rows is not None:
        cap = min(cap, rows * tokens.per_trajectory)
    return max(min(cap, tokens.per_step), tokens.longest)


def keep_of(shape: Shape, settings: Settings, layout: Layout, batch: int, free: int) -> Keep:
    """What layers keep of a micro-batch of ``batch`` tokens, as the trainer chooses with ``free`` bytes left."""
    checkpointing = settings.training.gradient_checkpointing
    if layout.layers != "fused":
        least = layout.layers == "unsloth" or recomputes(checkpointing, on_gpu=layout.on_gpu)
        return Keep.INPUT if least else Keep.ALL
    numbers = {keep: batch * numbers_for(keep, layers=shape.layers, **shape.widths) for keep in Keep}
    return choose_keep(checkpointing, free, {keep: layout.itemsize * count for keep, count in numbers.items()})


def training_bytes(shape: Shape, layout: Layout, keep: Keep, batch: int, tokens: Tokens) -> dict[str, int]:
    """Bytes that the update adds: what layers keep of a micro-batch, and the active layer or head."""
    longest = tokens.longest
    work = batch * work_bytes(shape, layout, keep, longest)
    head = head_bytes(shape, layout, round(batch * tokens.trainable_share))
    activations = batch * shape.layers * kept_bytes(shape, layout, keep, longest)
    heap = {} if layout.on_gpu else {"heap": int(HEAP * activations)}
    return {"activations": activations, "backward pass": max(work, head)} | heap


def _resident(shape: Shape, settings: Settings, layout: Layout, cards: int) -> dict[str, int]:
    adapter = shape.lora_parameters(settings.lora.lora_rank, settings.lora.target_modules)
    weights = _weights(shape, settings, layout, cards) | {
        # float32 weights and gradients; fused layers multiply with copies in the base's dtype.
        "adapter": adapter * (8 + (layout.itemsize if layout.layers == "fused" else 0)),
        "optimizer": 8 * adapter,
        "runtime": WORKSPACES if layout.on_gpu else PROCESS,
    }
    if samples_in_process(settings):
        matrices = sum(inputs * outputs for inputs, outputs in (shape.linears[name] for name in layout.targets))
        weights["sampler's copy"] = (
            shape.layers * matrices * layout.itemsize if samples_merged(shape, settings) else 4 * adapter
        )
    return weights


def _weights(shape: Shape, settings: Settings, layout: Layout, cards: int) -> dict[str, int]:
    """The base: whole, or this GPU's shard and what is gathered, as in ``policy.shard``."""
    every = shape.weight_bytes(layout.itemsize, four_bit=settings.model.load_in_4bit)
    if cards == 1:
        return {"weights": every}
    embeddings = shape.embeddings * layout.itemsize
    layer = (every - embeddings) // shape.layers
    head = embeddings if shape.tied else embeddings // 2
    part = 0 if settings.model.shard_offload else (every - head) // cards
    # The active layer and the next one; untied input embeddings are gathered separately.
    return {"weights": head + part, "gathered": max(2 * layer, embeddings - head)}


def samples_merged(shape: Shape, settings: Settings) -> bool:
    """Whether the in-process engine samples from its own merged weights."""
    return merges(shape.parameters, quantized=settings.model.load_in_4bit)


def _sampling(
    shape: Shape, settings: Settings, layout: Layout, tokens: Tokens, total: int, resident: int
) -> tuple[dict[str, int], int | None, int]:
    """Bytes by part, the cache's capacity in tokens, and the tokens it must hold."""
    if vllm_in_process(settings):
        parts, room = sampling_bytes(shape, settings, layout, total)
        window = min(settings.model.max_model_len or shape.context, shape.context)
        return parts, room * engine_gpus(settings) // shape.cache_bytes(2), window
    if not samples_in_process(settings):
        return {}, None, 0
    token, slots = shape.cache_bytes(layout.itemsize), _slots(shape, settings, layout, tokens)
    width = 4 * shape.hidden + 3 * shape.queries + 2 * shape.keys + 3 * shape.ffn
    prefill = rollout_pass(settings, layout) * width * layout.itemsize
    # One token of each: float32 logits three times, and one layer's keys and values gathered.
    decode = slots * (4 * shape.vocab * 3 + 2 * tokens.per_trajectory * shape.keys * layout.itemsize)
    forward = max(prefill, decode)
    if settings.agent.kv_cache_gib is None:
        unused = total - context_of(layout) - resident
        # If its share is too large, the engine detects it and samples fewer at once.
        budget = min(FREE_SHARE["cuda" if layout.on_gpu else "cpu"] * unused, USABLE * total - resident - forward)
    else:
        budget = settings.agent.kv_cache_gib * GIB
    room = blocks_within(budget, shape.layers, token) * BLOCK
    wanted = slots * blocks_of(tokens.per_trajectory) * BLOCK * token * CACHE_GROWTH
    return {"KV cache": int(max(min(wanted, budget), 0)), "forward": forward}, room, tokens.longest


def _slots(shape: Shape, settings: Settings, layout: Layout, tokens: Tokens) -> int:
    """Trajectories sampled concurrently if memory allows."""
    if not samples_in_process(settings):
        agent = settings.agent
        most = rows_per_server(agent) if has_servers(settings) else agent.max_batch_trajectories
        return min(most, tokens.at_once)
    return min(most_rows(settings.agent, shape.parameters, on_gpu=layout.on_gpu), tokens.at_once)


def context_of(layout: Layout) -> int:
    """Memory that CUDA itself takes."""
    return CONTEXT if layout.on_gpu else 0


def rollout_pass(settings: Settings, layout: Layout) -> int:
    """Prompt tokens that the in-process engine processes at once."""
    return settings.agent.max_tokens_per_rollout_pass or PREFILL_TOKENS["cuda" if layout.on_gpu else "cpu"]


def samples_in_process(settings: Settings) -> bool:
    """Whether transformers samples in the trainer's process."""
    return settings.agent.engine in ("auto", "transformers")


def _notes(settings: Settings, layout: Layout) -> list[str]:
    notes = []
    if layout.layers == "unsloth":
        notes.append("Unsloth's memory is fitted to two measured peaks, not derived")
    return notes
