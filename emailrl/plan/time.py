"""Time of a step and a run on one GPU: operations divided by the speed measured for similar models.

Estimated without network or GPU; expect errors of about a third in the times, but not in the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from emailrl.model.layout import Keep
from emailrl.model.shape import Shape
from emailrl.plan.devices import Device
from emailrl.plan.memory import Layout, Memory, samples_merged
from emailrl.plan.tokens import Tokens, count_tokens
from emailrl.settings import Settings
from emailrl.settings.names import changed
from emailrl.training.mix import resolve
from emailrl.training.passes import needs_old_logprobs, needs_reference, updates_per_step

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


def plan_seconds(
    shape: Shape,
    settings: Settings,
    device: Device,
    tokens: Tokens,
    memory: Memory,
    *,
    utilization: float | None = None,
) -> Seconds:
    """Seconds on ``device``; ``utilization`` overrides the measured share."""
    layout, training = memory.layout, settings.training
    share = utilization or (reached(shape, layout) if device.is_gpu else ON_CPU)
    speed = device.tflops * 1e12 * share
    moving = MOVING / shape.hidden if device.is_gpu else 0.0
    spared = 1 - max(prefix_share(settings, memory, tokens) - moving, 0.0)
    train = spared * training_flops(shape, layout, memory.keep, tokens) / speed
    if layout.layers == "fused":
        together = max(memory.micro_batch_tokens // tokens.per_trajectory, 1)
        train = max(train, math.ceil(tokens.trajectories / together) * shape.layers * LAUNCH)
    sampling = Sampling(shape, settings, device.times(settings.engine_gpus), tokens, memory)
    return Seconds(
        rollout=sampling.seconds(tokens.trajectories, members=training.num_generations),
        handover=_handover(shape, settings, vllm_sleeps=memory.vllm_sleeps),
        score=scoring_passes(settings) * spared * forward_flops(shape, tokens) / speed,
        train=train * training.update_epochs,
        evaluation=sampling.evaluating().seconds(tokens.eval_trajectories, members=settings.evaluation.eval_samples),
        steps=tokens.steps,
        evaluations=tokens.evaluations,
        confirmed=tokens.confirmed,
        utilization=share,
        overlaps=overlaps(settings),
    )


def overlaps(settings: Settings) -> bool:
    """Whether servers sample the next step while this one trains."""
    return settings.has_servers and settings.vllm.staleness(servers=True) > 0


def _handover(shape: Shape, settings: Settings, *, vllm_sleeps: bool) -> float:
    """Seconds per step for which neither rollouts nor training can go on; 0 with the transformers engine."""
    if settings.agent.engine != "vllm":
        return 0.0
    if settings.has_servers:
        return HANDED_OVER if overlaps(settings) else HANDOVER
    weights = shape.weight_bytes(2, four_bit=settings.model.load_in_4bit)
    return HANDOVER + (WAKING + weights / settings.engine_gpus / MOVED if vllm_sleeps else 0.0)


def reached(shape: Shape, layout: Layout) -> float:
    """Interpolate ``UTILIZATION`` in the logarithm of the hidden size."""
    curve = UTILIZATION[layout.layers]
    if shape.hidden <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in pairwise(curve):
        if shape.hidden <= right:
            return low + (high - low) * math.log(shape.hidden / left) / math.log(right / left)
    return curve[-1][1]


def prefix_share(settings: Settings, memory: Memory, tokens: Tokens) -> float:
    """Share of a step's tokens in common prefixes within a micro-batch: the prompts of groups."""
    if not memory.layout.shares:
        return 0.0
    alike = 1 - tokens.trainable_share if has_one_turn(settings) else PROMPT_SHARE
    together = min(settings.training.num_generations, max(memory.micro_batch_tokens // tokens.per_trajectory, 1))
    return alike * (1 - 1 / together)


def has_one_turn(settings: Settings) -> bool:
    """Whether a trajectory is a prompt and one completion."""
    return settings.training.mode == "simple" or settings.agent.max_turns == 1


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
    old = needs_old_logprobs(resolve(settings), kl_coef=beta, updates=updates_per_step(settings))
    return needs_reference(beta) + old


@dataclass(frozen=True, slots=True)
class Sampling:
    """Time of sampling trajectories on one device."""

    shape: Shape
    settings: Settings
    device: Device
    tokens: Tokens
    memory: Memory

    def seconds(self, trajectories: int, *, members: int) -> float:
        """Prefill of unsampled tokens, a group's prompt once for its ``members``; then decoding.

        A GPU step takes the longest of kernel launches, memory traffic and computation.
        """
        alike = 1 if has_one_turn(self.settings) else PROMPT_SHARE
        read = (self.tokens.per_trajectory - self.sampled) * trajectories * (1 - alike * (1 - 1 / members))
        slots = min(self.memory.at_once, trajectories)
        step = self._steady_step(slots) if self._is_steady() else self._step(slots)
        return read * self._flop_seconds() + trajectories * self.sampled / slots * step

    def evaluating(self) -> Sampling:
        """Evaluations play whole conversations in mode simple too."""
        if self.settings.training.mode != "simple":
            return self
        settings = changed(self.settings, mode="masked")
        tokens, room, memory = count_tokens(self.shape, settings), self.memory.cache_tokens, self.memory
        if room is not None:
            memory = replace(memory, at_once=max(min(memory.at_once, room // tokens.per_trajectory), 1))
        return replace(self, settings=settings, tokens=tokens, memory=memory)

    @property
    def sampled(self) -> float:
        """Sampled tokens per trajectory."""
        rollout_mode = self.settings.training.mode == "rollout"
        return self.tokens.per_trajectory * (TYPICAL_SAMPLED if rollout_mode else self.tokens.trainable_share)

    def _step(self, slots: int) -> float:
        """Seconds for one token of ``slots`` trajectories whose turns end at different times, caches half full."""
        moving = self._moved(slots, self.tokens.per_trajectory / 2) / (self.device.bandwidth * BANDWIDTH)
        working, starting = max(moving, slots * self._flop_seconds()), self.shape.layers * self._per_layer()
        return max(starting, working) if self.device.is_gpu else starting + working

    def _steady_step(self, slots: int) -> float:
        """The same if no prompt joins later."""
        moving = self._moved(slots, self.tokens.per_trajectory - self.sampled / 2) / (self.device.bandwidth * READING)
        return max(moving, slots * self._flop_seconds()) + self.shape.layers * ONE_TURN

    def _moved(self, slots: int, context: float) -> float:
        """Bytes of the weights, and of ``slots`` caches of ``context`` tokens."""
        itemsize = self.memory.layout.itemsize
        cache = slots * context * self.shape.cache_bytes(itemsize)
        if self.device.is_gpu and self.settings.agent.engine != "vllm":
            cache *= GATHERED
        return self.shape.weight_bytes(itemsize, four_bit=self.settings.model.load_in_4bit) + cache

    def _flop_seconds(self) -> float:
        """Seconds of computation per token."""
        return 2 * self.shape.layers * self.shape.layer_matrix / (self.device.tflops * 1e12)

    def _is_steady(self) -> bool:
        """Whether vLLM replays CUDA graphs all along: every trajectory has one turn, so no prompt joins later."""
        agent, vllm = self.settings.agent, self.settings.vllm
        graphs = self.device.is_gpu and agent.engine == "vllm" and not vllm.vllm_enforce_eager
        return graphs and has_one_turn(self.settings)

    def _per_layer(self) -> float:
        if not self.device.is_gpu:
            return ON_CPU_PER_LAYER
        if self.settings.agent.engine != "vllm":
            return PER_LAYER["merged" if samples_merged(self.shape, self.settings) else "beside"]
        return PER_LAYER["eager" if self.settings.vllm.vllm_enforce_eager else "vllm"]
