"""Time of a step and a run: operations divided by the speed measured for similar models.

Estimated without network or GPU; expect errors of about a third in the times, but not in the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from emailrl.engines.budget import most_requests, server_share
from emailrl.engines.vllm.arguments import VLLM_WORK
from emailrl.model.layout import Keep
from emailrl.model.shape import Shape
from emailrl.plan.devices import GIB, Device
from emailrl.plan.memory import Layout, Memory, most_at_once
from emailrl.plan.tokens import Job, Known, Tokens
from emailrl.settings import Settings
from emailrl.training.algorithms import needs_old_logprobs, resolve

Curve = tuple[tuple[int, float], ...]
UTILIZATION: Final[dict[str, Curve]] = {
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
"""Share of a GPU's training time that moving the shared keys takes, times the hidden size. Of 14.5 % shared tokens, the
0.6B, 4B and 14B shapes save 4.5, 9.4 and 12.0 % (``tests/gpu/bench_train_step.py``)."""
LAUNCH: Final = 4e-3
"""Minimum seconds of one fused layer per micro-batch, forward and backward: the 0.6B shape in 48 micro-batches."""
PER_LAYER: Final = {"vllm": 0.53e-3, "eager": 1.6e-3, "merged": 2.2e-3, "beside": 3.5e-3}
"""Minimum seconds of a layer for one token of every running trajectory, on a GPU. vLLM with and without CUDA graphs
and transformers with merged weights: from ``tests/gpu/bench_sampling.py`` and ``bench_grpo_step.py``, including waits
for other trajectories' turns; transformers with an unmerged adapter: assumed."""
ONE_TURN: Final = 0.107e-3
"""Seconds that vLLM with CUDA graphs adds per layer to reading weights and cache, if no other turns join: adapter,
norms, sampling. Measured: 15.0 ms for 38 rows of 2,680 tokens on 14B."""
READING: Final = 0.9
"""Share of the bandwidth reached there."""
GATHERED: Final = 2
"""How many times the in-process engine moves its cache on a GPU: blocks are gathered, then read."""
ON_CPU_PER_LAYER: Final = 0.3e-3
BANDWIDTH: Final = 0.7
"""Share of the bandwidth reached when reading weights and cache. Assumed."""
HANDOVER: Final = 0.7
"""Seconds to write an adapter, load it into vLLM and verify it: 0.54 and 0.68 were measured on 4B, 0.80 and 0.87 on
14B (``tests/gpu/bench_grpo_trl.py`` and ``bench_grpo_step.py``)."""
HANDED_OVER: Final = 0.5
"""The trainer's part of it if servers do the rest during the next update: it saves the adapter, reads it and copies it
into its model. 0.42 were measured on 4B and 0.58 on 14B, in the same steps."""
WAKING: Final = 0.55
"""Seconds in which vLLM on a trainer's GPU wakes and goes to sleep, besides moving its weights."""
MOVED: Final = 25e9
"""Bytes of weights that it moves per second. Both were fitted to 0.87 s on 4B and 1.71 on 14B, in the same steps."""
TYPICAL_SAMPLED: Final = 0.25
"""Share of a trajectory that is sampled, if everything after the prompt is trained."""

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


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds of a step by phase, and of the run with its evaluations."""

    rollout: float
    handover: float
    """Of the trainer for the new adapter, and in which in-process vLLM wakes and goes to sleep."""
    score: float
    """Log-probabilities of the reference, and of the old policy if it differs from the current one."""
    train: float
    evaluation: float
    """Of one evaluation."""
    steps: int
    evaluations: int
    utilization: float
    """Assumed share of the device's FLOP/s in training."""
    overlaps: bool
    """Whether the next step is sampled while this one trains."""
    confirmed: float = 0.0
    """As in ``Tokens``."""
    gather: float = 0.0
    """Gathering a sharded base, as far as computation does not hide it."""
    reduce: float = 0.0
    """All-reduces of the adapter's gradients."""

    @property
    def update(self) -> float:
        """Everything of a step but the rollouts."""
        return self.handover + self.score + self.train + self.gather + self.reduce

    @property
    def step(self) -> float:
        """Per step, without evaluation: the slower side, or the sum of both if they alternate."""
        return max(self.rollout, self.update) if self.overlaps else self.rollout + self.update

    @property
    def run(self) -> float:
        """The whole run, including evaluations."""
        return self.steps * self.step + self.evaluating

    @property
    def evaluating(self) -> float:
        """All evaluations of the run, and the last one of best_model on other questions."""
        return (self.evaluations + self.confirmed) * self.evaluation


def plan_seconds(job: Job, memory: Memory, ranks: int = 1, engines: int = 1) -> tuple[float, float, Seconds]:
    """Seconds of the ``engines`` per step, of rank 0 for conversations or records, and of everything, on ``ranks``.

    ``memory`` is that of one rank.
    """
    settings, training, cluster, layout = job.settings, job.settings.training, job.cluster, memory.layout
    own, tokens, passes = job.tokens(), job.tokens(ranks), scoring_passes(settings)
    share = job.known.utilization or (reached(job.shape, layout) if job.on_gpu else ON_CPU)
    speed = cluster.device.tflops * 1e12 * share * (BALANCE if ranks > 1 else 1.0)
    spared = 1 - max(prefix_share(job, memory) - (MOVING / job.shape.hidden if job.on_gpu else 0.0), 0.0)
    train = spared * training_flops(job.shape, layout, memory.keep, own) / speed
    if layout.layers == "fused":
        batches = math.ceil(own.trajectories / max(memory.micro_batch_tokens // own.per_trajectory, 1))
        train = max(train, batches * job.shape.layers * LAUNCH / (BALANCE if ranks > 1 else 1.0))
    train *= training.update_epochs
    score, gather = passes * spared * forward_flops(job.shape, own) / speed, 0.0
    if memory.cards > 1:  # what does not overlap with the previous layer's computation
        offload = settings.model.shard_offload
        once = cluster.gather_seconds(job.weights(layout.itemsize), memory.cards, offload=offload)
        once *= math.ceil(own.per_step / memory.micro_batch_tokens)
        gather = max(2 * training.update_epochs * once - train, 0.0) + max(passes * once - score, 0.0)
    engine = sampling_of(job, memory, engines)
    sampling = engine.seconds(math.ceil(tokens.trajectories / engines), members=training.num_generations)
    evaluated, members = math.ceil(tokens.eval_trajectories / engines), settings.evaluation.eval_samples
    playing = tokens.trajectories * (PLAYING if settings.has_servers else RECORDING if ranks > 1 else 0.0)
    seconds = Seconds(
        rollout=max(sampling, playing) if settings.has_servers else sampling + playing,
        handover=_handover(job, vllm_sleeps=memory.vllm_sleeps),
        score=score,
        train=train,
        evaluation=engine.evaluating().seconds(evaluated, members=members),
        steps=tokens.steps,
        evaluations=tokens.evaluations,
        confirmed=tokens.confirmed,
        utilization=share,
        overlaps=_overlaps(job),
        gather=gather,
        reduce=settings.training.updates_per_step * cluster.reduce_seconds(4 * job.adapter, ranks),  # float32
    )
    return sampling, playing, seconds


def _overlaps(job: Job) -> bool:
    """Whether servers sample the next step while this one trains."""
    return job.settings.has_servers and job.settings.vllm.staleness(servers=True) > 0


def _handover(job: Job, *, vllm_sleeps: bool) -> float:
    """Seconds per step for which neither rollouts nor training can go on; 0 with the transformers engine."""
    if job.settings.agent.engine != "vllm":
        return 0.0
    if _overlaps(job):
        return HANDED_OVER
    return HANDOVER + (WAKING + job.weights() / job.settings.engine_gpus / MOVED if vllm_sleeps else 0.0)


def reached(shape: Shape, layout: Layout) -> float:
    """Interpolate ``UTILIZATION`` in the logarithm of the hidden size."""
    curve = UTILIZATION[layout.layers]
    if shape.hidden <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if shape.hidden <= right:
            return low + (high - low) * math.log(shape.hidden / left) / math.log(right / left)
    return curve[-1][1]


def prefix_share(job: Job, memory: Memory) -> float:
    """Share of a step's tokens in common prefixes within a micro-batch: the prompts of groups."""
    if not memory.layout.shares:
        return 0.0
    tokens = job.tokens()
    alike = 1 - tokens.trainable_share if job.has_one_turn else PROMPT_SHARE
    together = max(memory.micro_batch_tokens // tokens.per_trajectory, 1)
    return alike * (1 - 1 / min(job.settings.training.num_generations, together))


def training_flops(shape: Shape, layout: Layout, keep: Keep, tokens: Tokens) -> float:
    """Operations of one pass over a step, forward and backward, including recomputation.

    A frozen weight costs 2 operations per token forward and 2 for the gradient of its input. Causal attention over T
    tokens costs 2·T·queries per token forward and twice that backward.
    """
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


def forward_flops(shape: Shape, tokens: Tokens) -> float:
    """Operations of one pass over a step without gradients."""
    layer = 2 * shape.layer_matrix + 2 * tokens.per_trajectory * shape.queries
    head = 2 * shape.hidden * shape.vocab * tokens.trainable_share
    return tokens.per_step * (shape.layers * layer + head)


def scoring_passes(settings: Settings) -> int:
    """Passes without gradients before the first update of a step."""
    beta = settings.algorithm.beta
    old = needs_old_logprobs(resolve(settings), kl_coef=beta, updates=settings.training.updates_per_step)
    return (beta > 0) + old


def server_gpus(job: Job) -> int:
    """GPUs per server: as set, or as many of a host as leave half of their memory for the KV cache."""
    each = job.settings.vllm.vllm_tensor_parallel_size
    while each < job.cluster.per_host and job.weights() > each * job.cluster.device.gib * GIB / 2:
        each *= 2
    return each


def sampling_of(job: Job, memory: Memory, engines: int) -> Sampling:
    """One of the ``engines`` that sample: in a trainer's process with its ``memory``, or a server."""
    agent, device, itemsize = job.settings.agent, job.cluster.device, memory.layout.itemsize
    if job.cluster.gpus == 1 or not job.settings.has_servers:  # one GPU's servers stand elsewhere, of unknown size
        each, room = job.settings.engine_gpus, memory.cache_tokens
        return Sampling(job, job.tokens(), itemsize, device.times(each), most_at_once(job), room)
    each = server_gpus(job)
    free = server_share(job.settings.vllm) * each * device.gib * GIB - job.weights() - VLLM_WORK
    asked = min(most_at_once(job), most_requests(agent, engines) // engines)
    return Sampling(job, job.tokens(), itemsize, device.times(each), asked, int(free // job.shape.cache_bytes(2)))


@dataclass(frozen=True, slots=True)
class Sampling:
    """Time of sampling trajectories with one engine."""

    job: Job
    tokens: Tokens
    itemsize: int
    device: Device
    """All its GPUs together."""
    most: int
    """Trajectories that it may sample at once."""
    room: int | None
    """Tokens of its KV cache; None if there is none to consider."""

    def seconds(self, trajectories: int, *, members: int) -> float:
        """Prefill of unsampled tokens, a group's prompt once for its ``members``; then decoding.

        A GPU step takes the longest of kernel launches, memory traffic and computation.
        """
        job, mean = self.job, self.tokens.per_trajectory
        rollout_mode = job.settings.training.mode == "rollout"
        sampled = mean * (TYPICAL_SAMPLED if rollout_mode else self.tokens.trainable_share)
        read = (mean - sampled) * trajectories * (1 - (1 if job.has_one_turn else PROMPT_SHARE) * (1 - 1 / members))
        held = self.most if self.room is None else min(self.most, self.room // mean)
        slots = min(max(held, 1), trajectories)
        # In conversations the waits between turns hide the server's own time.
        serving = trajectories * sampled * SERVING if job.settings.has_servers and job.has_one_turn else 0.0
        step = self._steady_step(slots, mean - sampled / 2) if self._is_steady() else self._step(slots)
        return read * self._flop_seconds() + trajectories * sampled / slots * step + serving

    def evaluating(self) -> Sampling:
        """Evaluations play whole conversations in mode simple too."""
        if self.job.settings.training.mode != "simple":
            return self
        job = replace(self.job.with_settings(mode="masked"), known=Known())
        return replace(self, job=job, tokens=job.tokens())

    def _step(self, slots: int) -> float:
        """Seconds for one token of ``slots`` trajectories whose turns end at different times, caches half full."""
        moving = self._moved(slots, self.tokens.per_trajectory / 2) / (self.device.bandwidth * BANDWIDTH)
        working, starting = max(moving, slots * self._flop_seconds()), self.job.shape.layers * self._per_layer()
        return max(starting, working) if self.device.is_gpu else starting + working

    def _steady_step(self, slots: int, context: float) -> float:
        """The same if no prompt joins later, with ``context`` tokens of each in the cache."""
        moving = self._moved(slots, context) / (self.device.bandwidth * READING)
        return max(moving, slots * self._flop_seconds()) + self.job.shape.layers * ONE_TURN

    def _moved(self, slots: int, context: float) -> float:
        """Bytes of the weights, and of ``slots`` caches of ``context`` tokens."""
        cache = slots * context * self.job.shape.cache_bytes(self.itemsize)
        if self.device.is_gpu and self.job.settings.agent.engine != "vllm":
            cache *= GATHERED
        return self.job.weights(self.itemsize) + cache

    def _flop_seconds(self) -> float:
        """Seconds of computation per token."""
        return 2 * self.job.shape.layers * self.job.shape.layer_matrix / (self.device.tflops * 1e12)

    def _is_steady(self) -> bool:
        """Whether vLLM replays CUDA graphs all along: every trajectory has one turn, so no prompt joins later."""
        agent, vllm = self.job.settings.agent, self.job.settings.vllm
        graphs = self.device.is_gpu and agent.engine == "vllm" and not vllm.vllm_enforce_eager
        return graphs and self.job.has_one_turn

    def _per_layer(self) -> float:
        if not self.device.is_gpu:
            return ON_CPU_PER_LAYER
        if self.job.settings.agent.engine != "vllm":
            return PER_LAYER["merged" if self.job.samples_merged else "beside"]
        return PER_LAYER["eager" if self.job.settings.vllm.vllm_enforce_eager else "vllm"]
