"""Time of a step and a run, and what several GPUs do: which train and which serve, or that all do both in turn. Times
are operations divided by the speed measured for similar models; expect errors of about a third in them, but not in the
memory. Every rank trains the configured number of questions, so a step grows with the ranks (weak scaling).
``docs/guides/scaling.md`` lists the assumptions beyond one GPU's figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from emailrl.base.plain import counted
from emailrl.engines.budget import most_requests, server_share
from emailrl.engines.vllm.arguments import VLLM_WORK
from emailrl.model.layout import Keep
from emailrl.model.shape import Shape
from emailrl.plan.devices import GIB
from emailrl.plan.memory import Layout, Memory, most_at_once, plan_memory
from emailrl.plan.tokens import Job, Known, Tokens

UTILIZATION: Final = {
    # Of 790 TFLOP/s on an H200, recomputation counted as work: docs/evidence/performance.md, shapes 0.6B, 4B and 14B.
    "fused": ((1024, 0.31), (2560, 0.49), (5120, 0.63)),
    "unsloth": ((1024, 0.28), (2560, 0.48), (5120, 0.62)),
    "transformers": ((1024, 0.11), (2560, 0.26), (5120, 0.39)),
}
"""Share of a GPU's FLOP/s that training reaches, by hidden size; constant beyond the ends of the curve."""
ON_CPU: Final = 0.5
PROMPT_SHARE: Final = 0.2
"""Share of a trajectory that is the prompt of its group, as in ``tests/gpu/bench_train_step.py``."""
MOVING: Final = 128
"""Share of a GPU's training time that moving the shared keys takes, times the hidden size. Of 14.5% shared tokens, the
0.6B, 4B and 14B shapes save 4.5, 9.4 and 12.0% (``tests/gpu/bench_train_step.py``)."""
LAUNCH: Final = 4e-3
"""Minimum seconds of one fused layer per micro-batch, forward and backward: the 0.6B shape in 48 micro-batches."""
PER_LAYER: Final = {"vllm": 0.53e-3, "eager": 1.6e-3, "merged": 2.2e-3, "beside": 3.5e-3}
"""Minimum seconds of a layer for one token of every running trajectory, on a GPU. vLLM with and without CUDA graphs
and transformers with merged weights: from ``tests/gpu/bench_grpo_step.py``, including waits for other trajectories'
turns; transformers with an unmerged adapter: assumed."""
ONE_TURN: Final = 0.107e-3
"""Seconds that vLLM with CUDA graphs adds per layer to reading weights and cache, if no other turns join: adapter,
norms, sampling. Measured: 15.0 ms for 38 rows of 2,680 tokens on 14B."""
READING: Final = 0.9  # Share of the bandwidth reached there.
GATHERED: Final = 2  # How many times the in-process engine moves its cache on a GPU: blocks are gathered, then read.
ON_CPU_PER_LAYER: Final = 0.3e-3
BANDWIDTH: Final = 0.7  # Share of the bandwidth reached when reading weights and cache. Assumed.
HANDOVER: Final = 0.7
"""Seconds to write an adapter, load it into vLLM and verify it: 0.54 and 0.68 were measured on 4B, 0.80 and 0.87 on
14B (``tests/gpu/bench_grpo_step.py``)."""
HANDED_OVER: Final = 0.5
"""The trainer's part of it if servers do the rest during the next update: it saves the adapter, reads it and copies it
into its model. 0.42 were measured on 4B and 0.58 on 14B, in the same steps."""
WAKING: Final = 0.55  # Seconds in which vLLM on a trainer's GPU wakes and goes to sleep, besides moving its weights.
MOVED: Final = 25e9
"""Bytes of weights that it moves per second. Both were fitted to 0.87 s on 4B and 1.71 on 14B, in the same steps."""
TYPICAL_SAMPLED: Final = 0.25  # Share of a trajectory that is sampled, if everything after the prompt is trained.

BALANCE: Final = 0.98
"""Mean over maximum tokens per rank: load balance after distribution by tokens, in the worst simulated case."""
PLAYING: Final = 0.69 / 48
"""Rank 0's seconds per trajectory: templates, tokenizer, mailbox, audit and records, in a step of 48."""
RECORDING: Final = 0.16 / 48
"""The records' part of it, which stays with rank 0 if every rank plays its own conversations: the rest is then part of
each rank's sampling time, which was measured with it."""
SERVING: Final = 30e-6
"""Seconds per sampled token of a server's own Python, in series with its GPUs: fitted to 48 to 384 completions on 4B
with what ``emailrl serve`` starts, docs/evidence/performance.md."""
NEARLY: Final = 0.95  # Share of the maximum tokens per second of several GPUs: the rest is not worth a larger batch.


@dataclass(frozen=True, slots=True)
class Use:
    """What each GPU does, and the seconds of a step by phase."""

    shared: bool  # Whether all GPUs do both in turn: then "servers" are engines in the trainers' processes.
    trainers: int
    servers: int
    tensor_parallel: int  # GPUs per server.
    memory: Memory  # Of one trainer.
    tokens: Tokens  # Of a step of all ranks, and of the run.
    sampling: float  # Of the servers.
    playing: float
    """Of rank 0: it runs all conversations while the servers work; on shared GPUs it records them afterwards."""
    handover: float  # Of the trainer for the new adapter, and in which in-process vLLM wakes and goes to sleep.
    score: float  # Log-probabilities of the reference, and of the old policy if it differs from the current one.
    train: float
    gather: float  # Gathering a sharded base, as far as computation does not hide it.
    reduce: float  # All-reduces of the adapter's gradients.
    evaluation: float  # Of one evaluation.
    utilization: float  # Assumed share of the device's FLOP/s in training.
    overlaps: bool  # Whether the next step is sampled while this one trains.

    def __str__(self) -> str:
        if self.shared:
            engines = counted(self.servers, "engine")
            return f"{self.trainers:,} GPUs that train and sample in turn ({engines}, no VLLM_URLS)"
        trainers, servers = counted(self.trainers, "trainer"), counted(self.servers, "server")
        return f"{trainers} and {servers} (VLLM_URLS; emailrl serve)"

    @property
    def rollout(self) -> float:
        return self.sampling + self.playing if self.shared else max(self.sampling, self.playing)

    @property
    def update(self) -> float:
        return self.handover + self.score + self.train + self.gather + self.reduce

    @property
    def step(self) -> float:
        """Per step, without evaluation: the slower side, or the sum of both if they alternate."""
        return max(self.rollout, self.update) if self.overlaps else self.rollout + self.update

    @property
    def evaluating(self) -> float:
        """All evaluations of the run, and the last one of best_model on other questions."""
        return (self.tokens.evaluations + self.tokens.confirmed) * self.evaluation

    @property
    def run(self) -> float:
        return self.tokens.steps * self.step + self.evaluating

    @property
    def rank_0_decides(self) -> bool:
        """Whether rank 0 needs about the whole step for running the conversations, so that more GPUs are of no use."""
        return not self.shared and self.playing >= NEARLY * self.step

    @property
    def tokens_per_second(self) -> float:
        """Tokens of trajectories, including prompts and tool results."""
        return self.tokens.per_step / self.step


def whole_of(job: Job) -> Use:
    """What all GPUs do, or one of them if the run does not fit."""
    one = one_of(job, job.cluster.per_host if job.settings.has_servers else 1)
    return (split_of(job) if one.memory.fits else None) or one


def one_of(job: Job, cards: int = 1) -> Use:
    """One GPU with its own trajectories, of the ``cards`` of its host."""
    return use_of(job, plan_memory(job, job.tokens(), cards=cards))


def split_of(job: Job) -> Use | None:
    """What each of several GPUs does; None if the run does not fit, and for one GPU. In turn, every GPU trains and
    samples, alone or with its neighbors in one vLLM engine; with servers, the division is the one with the shortest
    step of those with about the most tokens per second."""
    gpus, per_host, own = job.cluster.gpus, job.cluster.per_host, job.tokens()
    if gpus == 1:
        return None
    if not job.settings.has_servers:
        memory, each = plan_memory(job, own), job.settings.engine_gpus
        return use_of(job, memory, gpus, gpus // each) if memory.fits and not per_host % each else None
    each, least = server_gpus(job), 2 if job.settings.model.shard == "host" and per_host > 1 else 1
    memories = {cards: plan_memory(job, own, cards=cards) for cards in range(1, per_host + 1)}
    splits = [
        use_of(job, memory, trainers, (gpus - trainers) // each)
        for trainers in range(least, gpus - each + 1)
        if (memory := memories[min(trainers, per_host)]).fits and not trainers % memory.cards
    ]
    most = max((split.tokens_per_second for split in splits), default=0.0)
    good = [split for split in splits if split.tokens_per_second >= NEARLY * most]
    return min(good, key=lambda split: split.step, default=None)


def use_of(job: Job, memory: Memory, ranks: int = 1, engines: int = 1) -> Use:
    """So many trainers of this ``memory``, and servers or engines, whether they are one GPU or many."""
    settings, training, cluster, layout = job.settings, job.settings.training, job.cluster, memory.layout
    own, tokens, passes = job.tokens(), job.tokens(ranks), job.scoring_passes
    share = reached(job.shape, layout) if job.on_gpu else ON_CPU
    speed = cluster.device.tflops * 1e12 * share * (BALANCE if ranks > 1 else 1.0)
    spared = 1 - max(prefix_share(job, memory) - (MOVING / job.shape.hidden if job.on_gpu else 0.0), 0.0)
    train = spared * training_flops(job.shape, layout, memory.keep, own) / speed
    if layout.layers == "fused":
        batches = math.ceil(own.trajectories / max(memory.micro_batch_tokens // own.per_trajectory, 1))
        train = max(train, batches * job.shape.layers * LAUNCH / (BALANCE if ranks > 1 else 1.0))
    train *= training.update_epochs
    layer = 2 * job.shape.layer_matrix + 2 * own.per_trajectory * job.shape.queries
    head = 2 * job.shape.hidden * job.shape.vocab * own.trainable_share
    forward = own.per_step * (job.shape.layers * layer + head)  # operations of a pass without gradients
    score, gather = passes * spared * forward / speed, 0.0
    if memory.cards > 1:  # what does not overlap with the previous layer's computation
        offload = settings.model.shard_offload
        once = cluster.gather_seconds(job.weights(layout.itemsize), memory.cards, offload=offload)
        once *= math.ceil(own.per_step / memory.micro_batch_tokens)
        gather = max(2 * training.update_epochs * once - train, 0.0) + max(passes * once - score, 0.0)
    evaluated = job  # evaluations play whole conversations in mode simple too
    if training.mode == "simple":
        evaluated = replace(job.with_settings(mode="masked"), known=Known())
    shares = [math.ceil(count / engines) for count in (tokens.trajectories, tokens.eval_trajectories)]
    served = settings.has_servers
    overlaps = served and settings.staleness > 0
    handover = 0.0  # seconds for which neither rollouts nor training can go on
    if overlaps:
        handover = HANDED_OVER
    elif settings.agent.engine == "vllm":
        handover = HANDOVER
        if memory.vllm_sleeps:
            handover += WAKING + job.weights() / settings.engine_gpus / MOVED
    return Use(
        shared=not served,
        trainers=ranks,
        servers=engines,
        tensor_parallel=server_gpus(job) if served else settings.engine_gpus,
        memory=memory,
        tokens=tokens,
        sampling=sampling_seconds(job, memory, engines, shares[0], members=training.num_generations),
        playing=tokens.trajectories * (PLAYING if served else RECORDING if ranks > 1 else 0.0),
        handover=handover,
        score=score,
        train=train,
        gather=gather,
        reduce=training.updates_per_step * cluster.reduce_seconds(4 * job.adapter, ranks),  # float32
        evaluation=sampling_seconds(evaluated, memory, engines, shares[1], members=settings.evaluation.eval_samples),
        utilization=share,
        overlaps=overlaps,
    )


def reached(shape: Shape, layout: Layout) -> float:
    """Interpolate ``UTILIZATION`` in the logarithm of the hidden size."""
    curve = UTILIZATION[layout.layers]
    return curve[0][1] + sum(
        (high - low) * min(max(math.log(shape.hidden / left) / math.log(right / left), 0.0), 1.0)
        for (left, low), (right, high) in pairwise(curve)
    )


def prefix_share(job: Job, memory: Memory) -> float:
    """Share of a step's tokens in common prefixes within a micro-batch: the prompts of groups."""
    if not memory.layout.shares:
        return 0.0
    tokens = job.tokens()
    alike = 1 - tokens.trainable_share if job.has_one_turn else PROMPT_SHARE
    together = max(memory.micro_batch_tokens // tokens.per_trajectory, 1)
    return alike * (1 - 1 / min(job.settings.training.num_generations, together))


def training_flops(shape: Shape, layout: Layout, keep: Keep, tokens: Tokens) -> float:
    """Operations of one pass over a step, forward and backward, including recomputation. A frozen weight costs 2
    operations per token forward and 2 for the gradient of its input. Causal attention over T tokens costs 2·T·queries
    per token forward and twice that backward."""
    attention = tokens.per_trajectory * shape.queries * 2
    products, attentions = 4 * shape.layer_matrix, 3 * attention
    down = 2 * shape.hidden * shape.ffn
    if layout.layers != "fused":
        again = 2 * shape.layer_matrix + attention if keep == Keep.INPUT else 0
    else:
        again = {
            Keep.ALL: 0,
            Keep.HIDDEN: 2 * down,
            Keep.ATTENTION: 2 * shape.layer_matrix - down,
            Keep.INPUT: 2 * shape.layer_matrix - down + attention,
        }[keep]
    head = (4 if layout.fused_head else 6) * shape.hidden * shape.vocab * tokens.trainable_share
    return tokens.per_step * (shape.layers * (products + attentions + again) + head)


def server_gpus(job: Job) -> int:
    """GPUs per server: as set, or as many of a host as leave half of their memory for the KV cache."""
    each = job.settings.vllm.vllm_tensor_parallel_size
    while each < job.cluster.per_host and job.weights() > each * job.cluster.device.gib * GIB / 2:
        each *= 2
    return each


def sampling_seconds(job: Job, memory: Memory, engines: int, trajectories: int, *, members: int) -> float:
    """Of one of the ``engines`` for so many ``trajectories``: prefill of unsampled tokens, a group's prompt once for
    its ``members``; then decoding. The engine is in a trainer's process with its ``memory``, or a server. A token of
    all running trajectories takes the longest of launches, memory traffic and computation."""
    agent, vllm, shape, tokens = job.settings.agent, job.settings.vllm, job.shape, job.tokens()
    most, each = most_at_once(job), job.settings.engine_gpus
    room, itemsize = memory.cache_tokens, memory.layout.itemsize
    if job.cluster.gpus > 1 and job.settings.has_servers:  # one GPU's servers stand elsewhere, of unknown size
        each = server_gpus(job)
        free = server_share(vllm) * each * job.cluster.device.gib * GIB - job.weights() - VLLM_WORK
        most, room = min(most, most_requests(agent, engines) // engines), int(free // shape.cache_bytes(2))
    device, mean = job.cluster.device.times(each), tokens.per_trajectory
    flop_seconds = 2 * shape.layers * shape.layer_matrix / (device.tflops * 1e12)  # of computation per token
    sampled = mean * (TYPICAL_SAMPLED if job.settings.training.mode == "rollout" else tokens.trainable_share)
    read = (mean - sampled) * trajectories * (1 - (1 if job.has_one_turn else PROMPT_SHARE) * (1 - 1 / members))
    slots = min(max(most if room is None else min(most, room // mean), 1), trajectories)
    on_vllm, eager = agent.engine == "vllm", vllm.vllm_enforce_eager
    # vLLM replays CUDA graphs all along if no prompt joins later. Else turns end at different times, and caches are
    # half full.
    steady = device.is_gpu and on_vllm and not eager and job.has_one_turn
    cache = slots * (mean - sampled / 2 if steady else mean / 2) * shape.cache_bytes(itemsize)
    if device.is_gpu and not on_vllm:
        cache *= GATHERED
    moving = (job.weights(itemsize) + cache) / (device.bandwidth * (READING if steady else BANDWIDTH))
    one = max(moving, slots * flop_seconds)
    if steady:
        one += shape.layers * ONE_TURN
    elif not device.is_gpu:
        one += shape.layers * ON_CPU_PER_LAYER
    else:
        way = "merged" if job.samples_merged else "beside"
        if on_vllm:
            way = "eager" if eager else "vllm"
        one = max(shape.layers * PER_LAYER[way], one)
    # In conversations the waits between turns hide the server's own time.
    serving = trajectories * sampled * SERVING if job.settings.has_servers and job.has_one_turn else 0.0
    return read * flop_seconds + trajectories * sampled / slots * one + serving
