"""Plan up to about a thousand GPUs: which train, which serve or whether all do both in turn, and the time per step.

Every rank trains the configured number of questions, so a step grows with the ranks (weak scaling).
``docs/scaling.md`` lists the assumptions beyond one GPU's figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from emailrl.engines import engine_gpus
from emailrl.engines.budget import most_requests, rows_per_server, server_share
from emailrl.engines.vllm.arguments import VLLM_WORK
from emailrl.plain import counted
from emailrl.plan.gpus import GIB, Device
from emailrl.plan.memory import Memory
from emailrl.plan.time import Sampling, Seconds, has_one_turn, scoring_passes
from emailrl.plan.tokens import Tokens
from emailrl.policy.shape import Shape
from emailrl.settings import Settings
from emailrl.training.idle import updates_per_step

BALANCE: Final = 0.98
"""Mean over maximum tokens per rank: load balance after distribution by tokens, in the worst simulated case."""
NVLINK: Final = 200e9
"""Bytes per second of a collective between the GPUs of a host with NVLink. Assumed."""
PCIE: Final = 20e9
"""The same without NVLink, and for reading from host memory. Assumed."""
LINKED: Final = ("B200", "H200", "H100", "A100-80", "A100-40")
"""GPUs usually connected by NVLink within a host."""
HOP: Final = 10e-6
"""Minimum seconds per ring step. Assumed."""
PLAYING: Final = 0.69 / 48
"""Rank 0's seconds per trajectory: templates, tokenizer, mailbox, audit and records, in a step of 48."""
RECORDING: Final = 0.16 / 48
"""The records' part of it, which stays with rank 0 if every rank plays its own conversations: the rest is then part of
each rank's sampling time, which was measured with it."""
NEARLY: Final = 0.95
"""Share of the maximum tokens per second: the rest is not worth a larger batch."""
SERVING: Final = 30e-6
"""Seconds per sampled token of a server's own Python, in series with its GPUs: fitted to 48 to 384 completions on 4B
with what ``emailrl serve`` starts, docs/performance.md."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """How the GPUs are connected."""

    per_host: int
    hosts: int
    inside: float
    """Bytes per second between the GPUs of a host."""
    between: float
    """Bytes per second between two hosts."""

    @classmethod
    def of(cls, device: Device, *, per_host: int, hosts: int, gigabits: float) -> Fabric:
        """The connections of ``hosts`` with ``per_host`` GPUs each and a network of ``gigabits`` per second."""
        return cls(per_host, hosts, _inside(device), gigabits * 1e9 / 8)

    def with_device(self, device: Device) -> Fabric:
        """The same with other GPUs."""
        return replace(self, inside=_inside(device))

    @property
    def gpus(self) -> int:
        """Total GPUs."""
        return self.per_host * self.hosts

    def reduce_seconds(self, size: int, ranks: int) -> float:
        """One ring all-reduce of ``size`` bytes: every link carries it twice, minus one part; the slowest decides."""
        if ranks == 1:
            return 0.0
        slowest = self.inside if ranks <= self.per_host else min(self.inside, self.between)
        return 2 * (ranks - 1) / ranks * size / slowest + 2 * (ranks - 1) * HOP

    def gather_seconds(self, size: int, cards: int, *, offload: bool) -> float:
        """Gather a base of ``size`` bytes from the ``cards`` of a host; from the host's memory with ``offload``."""
        return (cards - 1) / cards * size / self.inside + (size / cards / PCIE if offload else 0.0)


def _inside(device: Device) -> float:
    return NVLINK if device.name in LINKED else PCIE


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of trainers and servers, and the seconds per step."""

    shared: bool
    """Whether all GPUs do both in turn: then "servers" are engines in the trainers' processes."""
    trainers: int
    servers: int
    tensor_parallel: int
    """GPUs per server."""
    memory: Memory
    """Of one trainer."""
    tokens: Tokens
    """Of a step of all ranks, and of the run."""
    sampling: float
    """Seconds of the servers."""
    playing: float
    """Rank 0's seconds: it runs all conversations while the servers work; on shared GPUs it records them afterwards."""
    seconds: Seconds

    def __str__(self) -> str:
        if self.shared:
            engines = counted(self.servers, "engine")
            return f"{self.trainers:,} GPUs that train and sample in turn ({engines}, no VLLM_URLS)"
        trainers, servers = counted(self.trainers, "trainer"), counted(self.servers, "server")
        return f"{trainers} and {servers} (VLLM_URLS; emailrl serve)"

    @property
    def rank_0_decides(self) -> bool:
        """Whether rank 0 needs about the whole step for running the conversations, so that more GPUs are of no use."""
        return not self.shared and self.playing >= NEARLY * self.seconds.step

    @property
    def tokens_per_second(self) -> float:
        """Tokens of trajectories, including prompts and tool results."""
        return self.tokens.per_step / self.seconds.step


@dataclass(frozen=True, slots=True)
class Cluster:
    """The available GPUs, and one GPU's time for its part of a step.

    The settings have servers, or an engine in the trainer's process to plan ``shared`` GPUs.
    """

    shape: Shape
    settings: Settings
    device: Device
    fabric: Fabric
    tokens: Callable[[int], Tokens]
    """Tokens of a step, by number of ranks."""
    estimate: Callable[[Tokens, int], tuple[Memory, Seconds]]
    """Memory of one rank that trains these tokens, with its base sharded over this many GPUs if SHARD is set."""

    def best(self) -> Split | None:
        """The split with the shortest step among those within 5 % of the highest tokens per second.

        None if there are too few GPUs for a trainer and a server.
        """
        tried = (self.split(trainers) for trainers in range(1, self.fabric.gpus - self.tensor_parallel() + 1))
        splits = [split for split in tried if split]
        most = max((split.tokens_per_second for split in splits), default=0.0)
        good = [split for split in splits if split.tokens_per_second >= NEARLY * most]
        return min(good, key=lambda split: split.seconds.step, default=None)

    def split(self, trainers: int) -> Split | None:
        """This many ranks, and servers on all other GPUs; None if the trainers do not fit."""
        own, cards, tokens = self.tokens(1), min(trainers, self.fabric.per_host), self.tokens(trainers)
        memory, seconds = self.estimate(own, cards)
        if not memory.fits or (memory.cards > 1 and trainers % cards):
            return None
        if self.settings.model.shard == "host" and cards == 1 < self.fabric.per_host:
            return None  # train refuses it; with one GPU per host, find_obstacles says so
        servers = (self.fabric.gpus - trainers) // self.tensor_parallel()
        training, evaluation = self.settings.training, self.settings.evaluation
        one = Sampling(self.shape, self.settings, self.device.times(self.tensor_parallel()), own, memory)
        sampling = self._sampling(one, tokens.trajectories, servers, training.num_generations)
        playing = PLAYING * tokens.trajectories
        seconds = self._together(
            seconds,
            trainers,
            tokens,
            rollout=max(sampling, playing),
            evaluation=self._sampling(one.evaluating(), tokens.eval_trajectories, servers, evaluation.eval_samples),
        )
        return Split(
            shared=False,
            trainers=trainers,
            servers=servers,
            tensor_parallel=self.tensor_parallel(),
            memory=memory,
            tokens=tokens,
            sampling=sampling,
            playing=playing,
            seconds=replace(seconds, gather=self._exposed(memory, own, seconds)),
        )

    def shared(self) -> Split | None:
        """Every GPU trains, and samples in turn, alone or with its neighbors in one vLLM engine.

        None if a rank does not fit with its engine, or the ranks of a host cannot be divided into engines.
        """
        ranks, each = self.fabric.gpus, engine_gpus(self.settings)
        own, tokens = self.tokens(1), self.tokens(ranks)
        memory, seconds = self.estimate(own, 1)
        if not memory.fits or self.fabric.per_host % each:
            return None
        engines = ranks // each

        def sampling(trajectories: int, members: int, *, evaluating: bool = False) -> float:
            part = math.ceil(trajectories / engines)
            played, _ = self.estimate(replace(own, trajectories=part), 1)
            device = self.device.times(each)
            one = Sampling(self.shape, self.settings, device, own, played)
            return (one.evaluating() if evaluating else one).seconds(part, members=members)

        sampled = sampling(tokens.trajectories, self.settings.training.num_generations)
        recording = RECORDING * tokens.trajectories
        evaluation = sampling(tokens.eval_trajectories, self.settings.evaluation.eval_samples, evaluating=True)
        return Split(
            shared=True,
            trainers=ranks,
            servers=engines,
            tensor_parallel=each,
            memory=memory,
            tokens=tokens,
            sampling=sampled,
            playing=recording,
            seconds=self._together(seconds, ranks, tokens, rollout=sampled + recording, evaluation=evaluation),
        )

    def _together(self, alone: Seconds, ranks: int, tokens: Tokens, *, rollout: float, evaluation: float) -> Seconds:
        """The seconds of a step of ``ranks``, from those of one rank for its part."""
        balance = BALANCE if ranks > 1 else 1.0
        return replace(
            alone,
            rollout=rollout,
            score=alone.score / balance,
            train=alone.train / balance,
            evaluation=evaluation,
            steps=tokens.steps,
            evaluations=tokens.evaluations,
            reduce=self._reduce(ranks),
        )

    def _reduce(self, ranks: int) -> float:
        """Seconds of a step's all-reduces of the adapter's float32 gradients."""
        adapter = self.shape.lora_parameters(self.settings.lora.lora_rank, self.settings.lora.target_modules)
        return updates_per_step(self.settings) * self.fabric.reduce_seconds(4 * adapter, ranks)

    def tensor_parallel(self) -> int:
        """GPUs per server: as set, or as many of a host as leave half of their memory for the KV cache."""
        each = self.settings.vllm.vllm_tensor_parallel_size
        while each < self.fabric.per_host and self._served_bytes > each * self.device.gib * GIB / 2:
            each *= 2
        return each

    @property
    def _served_bytes(self) -> int:
        """Bytes of a server's base model."""
        return self.shape.weight_bytes(2, four_bit=self.settings.model.load_in_4bit)

    def _sampling(self, one: Sampling, trajectories: int, servers: int, members: int) -> float:
        """Seconds of ``one`` server for its share of the trajectories, with all servers running concurrently."""
        each, agent = self.tensor_parallel(), self.settings.agent
        room = each * server_share(self.settings.vllm) * self.device.gib * GIB - self._served_bytes - VLLM_WORK
        held = int(room // (self.shape.cache_bytes(2) * one.tokens.per_trajectory))
        asked = min(rows_per_server(agent), most_requests(agent, servers) // servers)
        sampling = replace(one, memory=replace(one.memory, at_once=max(min(held, asked), 1)))
        share = math.ceil(trajectories / servers)
        own = SERVING if has_one_turn(one.settings) else 0.0  # in conversations, the waits between turns hide it
        return sampling.seconds(share, members=members) + share * sampling.sampled * own

    def _exposed(self, memory: Memory, share: Tokens, seconds: Seconds) -> float:
        """Seconds of gathering that do not overlap with the previous layer's computation."""
        if memory.cards == 1:
            return 0.0
        weights, offload = self.shape.weight_bytes(memory.layout.itemsize), self.settings.model.shard_offload
        gather = self.fabric.gather_seconds(weights, memory.cards, offload=offload)
        batches = math.ceil(share.per_step / memory.micro_batch_tokens)
        in_training = 2 * batches * self.settings.training.update_epochs * gather
        in_scoring = batches * scoring_passes(self.settings) * gather
        return max(in_training - seconds.train, 0.0) + max(in_scoring - seconds.score, 0.0)
