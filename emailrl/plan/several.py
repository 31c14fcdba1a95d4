"""Several GPUs: which train and which serve, or whether all do both in turn, and the time of a step.

Every rank trains the configured number of questions, so a step grows with the ranks (weak scaling).
``docs/guides/scaling.md`` lists the assumptions beyond one GPU's figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from emailrl.base.plain import counted
from emailrl.engines.budget import most_requests, rows_per_server, server_share
from emailrl.engines.vllm.arguments import VLLM_WORK
from emailrl.model.shape import Shape
from emailrl.plan.devices import GIB, Device
from emailrl.plan.memory import Memory, plan_memory
from emailrl.plan.time import Sampling, Seconds, has_one_turn, plan_seconds, scoring_passes
from emailrl.plan.tokens import Known, Tokens, count_tokens
from emailrl.settings import Settings
from emailrl.settings.names import changed
from emailrl.training.passes import updates_per_step

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
with what ``emailrl serve`` starts, docs/evidence/performance.md."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs of one kind, and how they are connected."""

    device: Device
    per_host: int = 1
    hosts: int = 1
    network: float = 100.0
    """Gbit/s between two hosts."""

    @property
    def gpus(self) -> int:
        """Total GPUs."""
        return self.per_host * self.hosts

    @property
    def inside(self) -> float:
        """Bytes per second between the GPUs of a host."""
        return NVLINK if self.device.name in LINKED else PCIE

    def reduce_seconds(self, size: int, ranks: int) -> float:
        """One ring all-reduce of ``size`` bytes: every link carries it twice, minus one part; the slowest decides."""
        if ranks == 1:
            return 0.0
        slowest = self.inside if ranks <= self.per_host else min(self.inside, self.network * 1e9 / 8)
        return 2 * (ranks - 1) / ranks * size / slowest + 2 * (ranks - 1) * HOP

    def gather_seconds(self, size: int, cards: int, *, offload: bool) -> float:
        """Gather a base of ``size`` bytes from the ``cards`` of a host; from the host's memory with ``offload``."""
        return (cards - 1) / cards * size / self.inside + (size / cards / PCIE if offload else 0.0)


@dataclass(frozen=True, slots=True)
class Split:
    """What each GPU of several does, and the seconds per step."""

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


def with_servers(settings: Settings) -> Settings:
    """The same run with vLLM servers on GPUs of their own."""
    return changed(settings, engine="vllm", vllm_urls=settings.vllm.vllm_urls or "http://servers")


def in_turn(settings: Settings) -> Settings:
    """The same run with vLLM in the trainers' processes."""
    return changed(settings, engine="vllm", vllm_urls="", max_staleness=None)


@dataclass(frozen=True, slots=True)
class Job:
    """A run to estimate: a model, its settings, the GPUs it gets, and what else is known of it."""

    shape: Shape
    settings: Settings
    cluster: Cluster
    known: Known

    def tokens(self, ranks: int = 1) -> Tokens:
        """Tokens of a step with this many ranks."""
        return count_tokens(self.shape, self.settings, self.known, ranks=ranks)

    def rank(self, cards: int = 1, tokens: Tokens | None = None) -> tuple[Memory, Seconds]:
        """Memory and time of one GPU for its own trajectories, or ``tokens``; one of ``cards`` ranks on its host."""
        shape, settings, device = self.shape, self.settings, self.cluster.device
        tokens = tokens or self.tokens()
        memory = plan_memory(shape, settings, device, tokens, cards=cards)
        return memory, plan_seconds(shape, settings, device, tokens, memory, utilization=self.known.utilization)

    def whole(self) -> tuple[Memory, Seconds]:
        """Memory of one trainer and seconds of all GPUs, or of one if the run does not fit."""
        memory, seconds = self.rank(self.cluster.per_host if self.settings.has_servers else 1)
        split = self.split() if memory.fits else None
        return (split.memory, split.seconds) if split else (memory, seconds)

    def split(self) -> Split | None:
        """What each of several GPUs does; None if the run does not fit, and for one GPU."""
        if self.cluster.gpus == 1:
            return None
        return self._best_division() if self.settings.has_servers else self._in_turn()

    def _best_division(self) -> Split | None:
        """Of trainers and servers with about the most tokens per second, those with the shortest step."""
        ranks = {cards: self.rank(cards) for cards in range(1, self.cluster.per_host + 1)}
        tried = [self._divided(trainers, ranks) for trainers in range(1, self.cluster.gpus)]
        splits = [split for split in tried if split]
        most = max((split.tokens_per_second for split in splits), default=0.0)
        good = [split for split in splits if split.tokens_per_second >= NEARLY * most]
        return min(good, key=lambda split: split.seconds.step, default=None)

    def _divided(self, trainers: int, ranks: dict[int, tuple[Memory, Seconds]]) -> Split | None:
        """This many trainers, and servers on all other GPUs; None if either does not fit."""
        per_host, settings, each = self.cluster.per_host, self.settings, self._server_gpus()
        cards, servers = min(trainers, per_host), (self.cluster.gpus - trainers) // each
        memory, seconds = ranks[cards]
        if not servers or not memory.fits or (memory.cards > 1 and trainers % cards):
            return None
        if settings.model.shard == "host" and cards == 1 < per_host:
            return None  # train refuses it; with one GPU per host, find_obstacles says so
        own, tokens = self.tokens(), self.tokens(trainers)
        one = Sampling(self.shape, settings, self.cluster.device.times(each), own, memory)
        sampling = self._served(one, tokens.trajectories, servers, settings.training.num_generations)
        evaluated, members = tokens.eval_trajectories, settings.evaluation.eval_samples
        playing = PLAYING * tokens.trajectories
        together = self._together(seconds, trainers, tokens)
        together = replace(
            together,
            rollout=max(sampling, playing),
            evaluation=self._served(one.evaluating(), evaluated, servers, members),
            gather=self._exposed(memory, own, together),
        )
        return Split(False, trainers, servers, each, memory, tokens, sampling, playing, together)

    def _in_turn(self) -> Split | None:
        """Every GPU trains, and samples in turn, alone or with its neighbors in one vLLM engine.

        None if a rank does not fit with its engine, or the ranks of a host cannot be divided into engines.
        """
        ranks, each, settings = self.cluster.gpus, self.settings.engine_gpus, self.settings
        own, tokens = self.tokens(), self.tokens(ranks)
        memory, seconds = self.rank()
        if not memory.fits or self.cluster.per_host % each:
            return None
        engines, device = ranks // each, self.cluster.device.times(each)

        def engine(trajectories: int) -> tuple[int, Sampling]:
            part = math.ceil(trajectories / engines)
            played, _ = self.rank(tokens=replace(own, trajectories=part))
            return part, Sampling(self.shape, settings, device, own, played)

        part, one = engine(tokens.trajectories)
        sampling = one.seconds(part, members=settings.training.num_generations)
        part, one = engine(tokens.eval_trajectories)
        recording = RECORDING * tokens.trajectories
        together = replace(
            self._together(seconds, ranks, tokens),
            rollout=sampling + recording,
            evaluation=one.evaluating().seconds(part, members=settings.evaluation.eval_samples),
        )
        return Split(True, ranks, engines, each, memory, tokens, sampling, recording, together)

    def _together(self, alone: Seconds, ranks: int, tokens: Tokens) -> Seconds:
        """The seconds of a step's training by all ``ranks``, from those of one for its part."""
        balance = BALANCE if ranks > 1 else 1.0
        adapter = self.shape.lora_parameters(self.settings.lora.lora_rank, self.settings.lora.target_modules)
        return replace(
            alone,
            score=alone.score / balance,
            train=alone.train / balance,
            steps=tokens.steps,
            evaluations=tokens.evaluations,
            reduce=updates_per_step(self.settings) * self.cluster.reduce_seconds(4 * adapter, ranks),  # float32
        )

    @property
    def _served_bytes(self) -> int:
        """Bytes of a server's base model."""
        return self.shape.weight_bytes(2, four_bit=self.settings.model.load_in_4bit)

    def _server_gpus(self) -> int:
        """GPUs per server: as set, or as many of a host as leave half of their memory for the KV cache."""
        each = self.settings.vllm.vllm_tensor_parallel_size
        while each < self.cluster.per_host and self._served_bytes > each * self.cluster.device.gib * GIB / 2:
            each *= 2
        return each

    def _served(self, one: Sampling, trajectories: int, servers: int, members: int) -> float:
        """Seconds of ``one`` server for its share of the trajectories, with all servers running concurrently."""
        agent, vllm, memory = (
            self.settings.agent,
            self.settings.vllm,
            self._server_gpus() * self.cluster.device.gib * GIB,
        )
        room = server_share(vllm) * memory - self._served_bytes - VLLM_WORK
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
        gather = self.cluster.gather_seconds(weights, memory.cards, offload=offload)
        batches = math.ceil(share.per_step / memory.micro_batch_tokens)
        in_training = 2 * batches * self.settings.training.update_epochs * gather
        in_scoring = batches * scoring_passes(self.settings) * gather
        return max(in_training - seconds.train, 0.0) + max(in_scoring - seconds.score, 0.0)
