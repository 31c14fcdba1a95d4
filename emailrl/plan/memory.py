"""A run's memory on one GPU, from settings and shape: what is always there, what sampling adds, what training adds.
Each term of a layer's activations is a tensor of `model/fused.py`, or of transformers' and PEFT's modules;
`tests/plan/test_memory.py` counts the tensors that autograd actually saves. ``w`` is the bytes per number in
the base's dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from emailrl.engines import budget
from emailrl.engines.vllm.arguments import VLLM_WORK, Trainer, capture_sizes, graph_bytes, sleeps, vllm_share
from emailrl.model.layout import (
    CHUNK_ELEMENTS,
    Checkpointing,
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
from emailrl.model.shape import Shape
from emailrl.plan.devices import GIB
from emailrl.plan.tokens import Job, Tokens

Layers = Literal["fused", "transformers", "unsloth"]
WORKSPACES: Final = 2**27
"""cuBLAS workspaces, 32 MiB per handle; two handles in each of autograd's two threads, fitted to one peak."""
UNSLOTH: Final = 1.2
"""Active Unsloth layer relative to a fused one that keeps its input; fitted to two peaks. Inputs are in host memory."""
USABLE: Final = 0.95  # Share of a GPU's memory available to tensors; the rest is the CUDA context and fragmentation.
CONTEXT: Final = int(0.6 * GIB)  # Memory that CUDA itself takes on a GPU.
PROCESS: Final = int(0.8 * GIB)  # A Python process with torch and transformers on a CPU.
CACHE_GROWTH: Final = (1 + budget.GROWTH) / 2
"""The in-process engine's cache is between 1 and ``GROWTH`` times as large as needed."""
HEAP: Final = 1.0
"""Freed blocks that glibc's heap keeps on a CPU, relative to the activations; measured with nano.
MALLOC_MMAP_THRESHOLD_=65536 returns them."""
ASLEEP: Final = int(1.5 * GIB)
"""Memory a sleeping vLLM keeps on the GPU. Assumed; 0.9 and 1.2 GiB on 14B (docs/evidence/performance.md)."""


@dataclass(frozen=True, slots=True)
class Layout:
    layers: Layers
    itemsize: int
    rank: int
    targets: tuple[str, ...]  # The projections with an adapter.
    dropout: bool = False
    eager: bool = False  # Attention that materializes the full score matrix.
    on_gpu: bool = True
    fused_head: bool = True
    shares: bool = False  # Whether common prefixes are computed once.


def kept_bytes(shape: Shape, layout: Layout, keep: Keep, longest: int = 0) -> int:
    """Bytes that one layer keeps per token; ``longest`` is the longest sample, used only for eager attention."""
    own = shape.hidden * layout.itemsize
    if layout.layers == "unsloth":
        return 0
    if layout.layers == "transformers":
        return own if keep < Keep.ALL else _transformers_layer(shape, layout, longest)
    w, ranks = layout.itemsize, layout.rank * layout.itemsize
    count = own
    if keep >= Keep.ATTENTION:
        count += shape.queries * w + 4 * shape.heads  # attention's result and its log-sum-exp
    if keep >= Keep.HIDDEN:
        count += (shape.hidden + shape.queries + 2 * shape.keys) * w
        count += ranks * sum(name in layout.targets for name in ("q_proj", "k_proj", "v_proj"))
    if keep >= Keep.ALL:
        count += 2 * shape.ffn * w + ranks * sum(name in layout.targets for name in ("gate_proj", "up_proj"))
    return count


def work_bytes(shape: Shape, layout: Layout, keep: Keep, longest: int = 0) -> int:
    """Bytes per token that the backward pass of one layer holds in addition to what all layers keep."""
    if layout.layers == "transformers":
        again = 0 if keep == Keep.ALL else _transformers_layer(shape, layout, longest)
        # Fitted to one peak; with PEFT it is a wide gradient, its float32 copy and another half copy.
        return again + (7 if layout.itemsize == 2 else 12) * shape.ffn
    keep = Keep.INPUT if layout.layers == "unsloth" else keep
    fused, w = Layout("fused", layout.itemsize, layout.rank, layout.targets), layout.itemsize
    again = kept_bytes(shape, fused, Keep.ALL) - kept_bytes(shape, fused, keep)
    # Two gradients of hidden size, one of attention's output, rotated queries and keys, and FlashAttention's buffers:
    # gradients of queries (also in float32), keys and values; with grouped heads, those of keys and values are expanded
    # to one per query head. Gate and up are freed by then.
    attention = (2 * shape.hidden + 3 * shape.queries + 3 * shape.keys - 2 * shape.ffn) * w + 4 * shape.queries
    if shape.heads != shape.kv_heads:
        attention += 2 * shape.queries * w
    work = again + max(attention, (shape.hidden + shape.ffn) * w)
    return int(UNSLOTH * work) if layout.layers == "unsloth" else work


def _transformers_layer(shape: Shape, layout: Layout, longest: int) -> int:
    """Everything autograd saves of one layer under PEFT, whose float32 adapters read float32 copies of their inputs."""
    w = layout.itemsize
    count = 2 * (4 * shape.hidden + 4)  # the norms: float32 input and root
    if shape.head_norms:
        count += 4 * (shape.queries + shape.keys) + 4 * (shape.heads + shape.kv_heads)
    count += (2 * shape.queries + 2 * shape.keys) * w + 4 * shape.heads
    if layout.eager:
        count += longest * shape.heads * (4 + w)  # scores after the softmax, in float32 and as they are multiplied
    count += 3 * shape.ffn * w  # gate, its activation, up
    inputs = [shape.linears[name][0] for name in layout.targets]
    if layout.dropout:
        count += (5 if layout.on_gpu else 8) * sum(inputs)  # the dropped input and its mask, bool on a GPU
    elif w == 4:
        groups = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
        # Nothing to convert: projections share their input.
        count += 4 * sum(shape.linears[group[0]][0] for group in groups if set(group) & set(layout.targets))
    else:
        count += 4 * sum(inputs)
    return count + 4 * layout.rank * len(layout.targets)


def head_bytes(shape: Shape, layout: Layout, trained: int) -> int:
    """Peak bytes of the vocabulary projection, for ``trained`` hidden states and a chunk of logits. The states are
    gathered, normalized in float32 and get a gradient; the fused head allocates logits and their gradient, the unfused
    one float32 logits, probabilities and three more tensors of that size."""
    chunk = min(CHUNK_ELEMENTS, trained * shape.vocab)
    per_logit = 2 * layout.itemsize if layout.fused_head else layout.itemsize + 20
    return trained * shape.hidden * (3 * layout.itemsize + 4) + chunk * per_logit


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part; ``sampling`` and ``training`` are the two peaks, ``resident`` counted in both."""

    device_bytes: int
    resident: dict[str, int]  # Always present: weights, adapter, optimizer, and so on.
    sampling: dict[str, int]
    training: dict[str, int]
    layout: Layout
    keep: Keep  # What each layer keeps for the backward pass.
    micro_batch_tokens: int
    cache_tokens: int | None = None  # Capacity of the KV cache in tokens; None if there is none in this process.
    cache_needs: int = 0
    """Tokens it must hold: vLLM's context window, or the longest trajectory of the in-process engine."""
    at_once: int = 1  # Trajectories that are sampled together.
    cards: int = 1  # GPUs over which the base is sharded.
    vllm_sleeps: bool = False  # Whether in-process vLLM sleeps while the trainer works.

    @property
    def sampling_peak(self) -> int:
        return sum(self.resident.values()) + sum(self.sampling.values())

    @property
    def training_peak(self) -> int:
        """As ``torch.cuda.max_memory_allocated`` would state it."""
        return sum(self.resident.values()) + sum(self.training.values())

    @property
    def peak(self) -> int:
        return max(self.sampling_peak, self.training_peak)

    @property
    def usable(self) -> int:
        return int(USABLE * self.device_bytes)

    @property
    def fits(self) -> bool:
        holds = self.cache_tokens is None or self.cache_tokens >= self.cache_needs
        return holds and self.peak <= self.usable


def plan_memory(job: Job, tokens: Tokens, *, cards: int = 1) -> Memory:
    """The memory of one process that samples and trains, one of ``cards`` ranks on its host."""
    shape, settings, total, on_gpu = job.shape, job.settings, int(job.cluster.device.gib * GIB), job.on_gpu
    model, training, lora = settings.model, settings.training, settings.lora
    packs = training.packing and not why_not_packed(model.attn_implementation, fully=shape.plain_attention)
    plain = not lora.lora_dropout and not model.load_in_4bit and shape.activation == "silu"
    layers: Layers = "transformers"  # as ``policy.prepare`` decides
    if model.backend == "unsloth":
        layers = "unsloth"
    elif plain and wants_fused(training, packs=packs, on_gpu=on_gpu):
        layers = "fused"
    layout = Layout(
        layers=layers,
        itemsize=4 if dtype_name(model.dtype, on_gpu=on_gpu) == "fp32" else 2,
        rank=lora.lora_rank,
        targets=tuple(shape.lora_targets(lora.target_modules)),
        dropout=lora.lora_dropout > 0,
        eager=model.attn_implementation == "eager",
        on_gpu=on_gpu,
        fused_head=layers == "fused" and not settings.algorithm.entropy_coef,
        shares=packs and training.prefix_sharing and not lora.lora_dropout and layers != "unsloth",
    )
    weights = job.weights(layout.itemsize)
    if not shards_base(model, weight_bytes=weights, card_bytes=total, cards=cards):
        cards = 1
    resident = _resident(job, layout, cards)
    free = total - (CONTEXT if on_gpu else 0) - sum(resident.values())
    at_once = min(most_at_once(job), max(tokens.trajectories, tokens.eval_trajectories))
    room, needs, asleep = None, 0, False
    sampling: dict[str, int] = {}
    beside: dict[str, int] = {}
    if settings.vllm_in_process:
        sampling, room, asleep = _sampled_by_vllm(job, layout, total)
        needs, beside = job.window, {"vLLM": ASLEEP} if asleep else sampling
    elif job.samples_in_process:
        sampling, room = _sampled_in_process(job, layout, tokens, at_once, free)
        needs = tokens.longest
    # Training's largest forward pass is the cap, or the step if smaller, or one sample if larger.
    cap = micro_batch_cap(training, on_gpu=on_gpu, hidden=shape.hidden)
    if training.max_rows_per_micro_batch is not None:
        cap = min(cap, training.max_rows_per_micro_batch * tokens.per_trajectory)
    batch = max(min(cap, tokens.per_step), tokens.longest)
    keep = keep_of(shape, training.gradient_checkpointing, layout, batch, free - sum(beside.values()))
    # What the update adds: what layers keep of a micro-batch, and the active layer or head.
    head = head_bytes(shape, layout, round(batch * tokens.trainable_share))
    activations = batch * shape.layers * kept_bytes(shape, layout, keep, tokens.longest)
    work = max(batch * work_bytes(shape, layout, keep, tokens.longest), head)
    parts = {"activations": activations, "backward pass": work}
    parts |= {} if on_gpu else {"heap": int(HEAP * activations)}
    return Memory(
        device_bytes=total,
        resident=resident,
        sampling=sampling,
        training=beside | parts,
        layout=layout,
        keep=keep,
        micro_batch_tokens=batch,
        cache_tokens=room,
        cache_needs=needs,
        at_once=at_once if room is None else max(min(at_once, room // tokens.per_trajectory), 1),
        cards=cards,
        vllm_sleeps=asleep,
    )


def keep_of(shape: Shape, checkpointing: Checkpointing, layout: Layout, batch: int, free: int) -> Keep:
    """What layers keep of a micro-batch of ``batch`` tokens, as the trainer chooses with ``free`` bytes left."""
    if layout.layers != "fused":
        least = layout.layers == "unsloth" or recomputes(checkpointing, on_gpu=layout.on_gpu)
        return Keep.INPUT if least else Keep.ALL
    numbers = {keep: batch * numbers_for(keep, layers=shape.layers, **shape.widths) for keep in Keep}
    return choose_keep(checkpointing, free, {keep: layout.itemsize * count for keep, count in numbers.items()})


def most_at_once(job: Job) -> int:
    """Trajectories that one engine samples concurrently if memory allows."""
    agent = job.settings.agent
    if job.samples_in_process:
        return budget.most_rows(agent, job.shape.parameters, on_gpu=job.on_gpu)
    return budget.rows_per_server(agent) if job.settings.has_servers else agent.max_batch_trajectories


def _resident(job: Job, layout: Layout, cards: int) -> dict[str, int]:
    shape, every = job.shape, job.weights(layout.itemsize)
    parts = {"weights": every}
    if cards > 1:  # this GPU's shard and what is gathered, as in ``policy.shard``
        embeddings = shape.embeddings * layout.itemsize
        head = embeddings if shape.tied else embeddings // 2
        part = 0 if job.settings.model.shard_offload else (every - head) // cards
        # The active layer and the next one; untied input embeddings are gathered separately.
        layers = 2 * ((every - embeddings) // shape.layers)
        parts = {"weights": head + part, "gathered": max(layers, embeddings - head)}
    parts |= {
        # float32 weights and gradients; fused layers multiply with copies in the base's dtype.
        "adapter": job.adapter * (8 + (layout.itemsize if layout.layers == "fused" else 0)),
        "optimizer": 8 * job.adapter,
        "runtime": WORKSPACES if layout.on_gpu else PROCESS,
    }
    if job.samples_in_process:
        matrices = sum(math.prod(shape.linears[name]) for name in layout.targets)
        merged = shape.layers * matrices * layout.itemsize
        parts["sampler's copy"] = merged if job.samples_merged else 4 * job.adapter
    return parts


def _sampled_by_vllm(job: Job, layout: Layout, total: int) -> tuple[dict[str, int], int, bool]:
    """In-process vLLM's bytes by part on each of its GPUs, its cache in tokens, and whether it sleeps at updates."""
    shape, agent, vllm, each = job.shape, job.settings.agent, job.settings.vllm, job.settings.engine_gpus
    share = int(vllm_share(agent, vllm, job.weights(), total))
    parts = {"vLLM": share}
    if layout.on_gpu and capture_sizes(agent, vllm, total):
        parts["CUDA graphs"] = graph_bytes(layers=shape.layers, hidden=shape.hidden)
    cache = max(share - job.weights() // each - VLLM_WORK, 0)
    trainer = None
    if layout.layers == "fused":
        sizes = {"weights": job.weights(layout.itemsize), "adapter": job.adapter, "itemsize": layout.itemsize}
        trainer = Trainer.of_sizes(job.settings.training, **sizes, layers=shape.layers, **shape.widths)
    return parts, cache * each // shape.cache_bytes(2), sleeps(agent, vllm, trainer, total)


def _sampled_in_process(job: Job, layout: Layout, tokens: Tokens, slots: int, free: int) -> tuple[dict[str, int], int]:
    """The same of the transformers engine, with ``free`` bytes left beside what is resident and CUDA's context."""
    shape, agent, place = job.shape, job.settings.agent, "cuda" if layout.on_gpu else "cpu"
    token, total = shape.cache_bytes(layout.itemsize), int(job.cluster.device.gib * GIB)
    width = 4 * shape.hidden + 3 * shape.queries + 2 * shape.keys + 3 * shape.ffn
    prefill = (agent.max_tokens_per_rollout_pass or budget.PREFILL_TOKENS[place]) * width * layout.itemsize
    # One token of each: float32 logits three times, and one layer's keys and values gathered.
    decode = slots * (4 * shape.vocab * 3 + 2 * tokens.per_trajectory * shape.keys * layout.itemsize)
    forward = max(prefill, decode)
    if agent.kv_cache_gib is None:
        # If its share is too large, the engine detects it and samples fewer at once.
        usable = free + (CONTEXT if layout.on_gpu else 0) - (1 - USABLE) * total
        room_bytes = min(budget.FREE_SHARE[place] * free, usable - forward)
    else:
        room_bytes = agent.kv_cache_gib * GIB
    room = budget.blocks_within(room_bytes, shape.layers, token) * budget.BLOCK
    wanted = slots * budget.blocks_of(tokens.per_trajectory) * budget.BLOCK * token * CACHE_GROWTH
    return {"KV cache": int(max(min(wanted, room_bytes), 0)), "forward": forward}, room
