"""What GPUs do: which train and which serve, or whether all do both in turn.

Every rank trains the configured number of questions, so a step grows with the ranks (weak scaling).
``docs/guides/scaling.md`` lists the assumptions beyond one GPU's figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from emailrl.base.plain import counted
from emailrl.plan.memory import Memory, plan_memory
from emailrl.plan.time import Seconds, plan_seconds, server_gpus
from emailrl.plan.tokens import Job, Tokens
from emailrl.settings import Settings
from emailrl.settings.names import changed

NEARLY: Final = 0.95
"""Share of the maximum tokens per second: the rest is not worth a larger batch."""


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


def use_of(job: Job, memory: Memory, trainers: int = 1, servers: int = 1) -> Split:
    """So many trainers of this ``memory``, and servers or engines, whether they are one GPU or many."""
    each = server_gpus(job) if job.settings.has_servers else job.settings.engine_gpus
    shared, tokens = not job.settings.has_servers, job.tokens(trainers)
    return Split(shared, trainers, servers, each, memory, tokens, *plan_seconds(job, memory, trainers, servers))


def one_of(job: Job, cards: int = 1) -> Split:
    """One GPU with its own trajectories, of the ``cards`` of its host."""
    return use_of(job, plan_memory(job, job.tokens(), cards=cards))


def whole_of(job: Job) -> Split:
    """What all GPUs do, or one of them if the run does not fit."""
    one = one_of(job, job.cluster.per_host if job.settings.has_servers else 1)
    return (split_of(job) if one.memory.fits else None) or one


def split_of(job: Job) -> Split | None:
    """What each of several GPUs does; None if the run does not fit, and for one GPU.

    In turn, every GPU trains and samples, alone or with its neighbors in one vLLM engine; with servers, the division
    is the one with the shortest step of those with about the most tokens per second.
    """
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
    return min(good, key=lambda split: split.seconds.step, default=None)
