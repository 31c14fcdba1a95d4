"""The other ranks: they load the model that rank 0 names, run the work it assigns, and record nothing."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

from emailrl.base.errors import UsageError
from emailrl.base.process import handled_by
from emailrl.engines import OpenPolicy, build_engine
from emailrl.model.load import load_policy
from emailrl.model.policy import Policy
from emailrl.model.shard import check_shardable
from emailrl.ranks import ALONE, RankGroup, Ranks, joined
from emailrl.settings import Settings
from emailrl.training.across import Across
from emailrl.training.batch import Share
from emailrl.training.mix import resolve
from emailrl.training.run.resume import seed_generators
from emailrl.training.run.team import ORDERS, Member, Order, plays_on_all, read_adapter, write_adapter
from emailrl.training.update import Updater

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


LARGEST_GAP = 1.0
"""Mean absolute difference of servers' log-probabilities, in nats. Rounding stays below 0.1 in 16 bits; the policies of
``MAX_STALENESS`` steps differ in single tokens, but not by a factor of e on average. The probe scores one completion
per server and version; this compares every trained token, which costs nothing."""
TIMES_TOLERANCE = 10
"""The limit is at least this multiple of VLLM_PROBE_TOLERANCE, which allows for another base or precision."""


@dataclass(frozen=True, slots=True)
class Task:
    """What rank 0 sends the others before they load the model."""

    settings: Settings
    """Without secrets."""
    total_steps: int
    adapter: dict[str, bytes] | None
    """Files of the initial adapter, since other hosts may not see its folder; None for a new one."""

    @classmethod
    def of(cls, settings: Settings, total_steps: int, adapter: Path | None) -> Task:
        """The task for a run that starts from the adapter in this folder."""
        return cls(settings.without_secrets(), total_steps, read_adapter(adapter))


def follow(settings: Settings) -> None:
    """Run as a rank that works for rank 0, until rank 0 ends.

    ``settings`` are used to connect; all others come from rank 0. SIGINT and SIGTERM are passed on to rank 0: the first
    lets it end the run cleanly, a SIGINT after it ends this process.
    """
    with joined(settings) as ranks:
        assert isinstance(ranks, RankGroup)
        with _asking(ranks), closing(Follower(ranks)) as follower:
            ranks.follow(follower.work)


class Follower:
    """Carries out rank 0's calls: first load the model, then sample and train."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.updater: Updater | None = None
        self.member: Member | None = None

    def work(self) -> None:
        """Handle one call from rank 0."""
        if self.updater is None:
            self._load()
            return
        order: Order | Share | None = self.ranks.scatter(None)
        if isinstance(order, ORDERS):
            assert self.member is not None
            self.member.do(order)
        elif order is None:
            self.updater.forward.pass_along()
        else:
            self.updater.take(order)

    def close(self) -> None:
        """Close the engine, if there is one."""
        if self.member is not None:
            self.member.close()

    def _load(self) -> None:
        task: Task | None = self.ranks.broadcast(None)
        assert task is not None
        seed_generators(task.settings.training.seed + self.ranks.rank)  # so that no environment draws as on rank 0
        mesh = mesh_of(task.settings, self.ranks)
        updater = self.ranks.agree(lambda: self._load_policy(task, mesh))
        updater.synchronize()
        self.ranks.started()
        self.updater = updater

    def _load_policy(self, task: Task, mesh: DeviceMesh | None) -> Updater:
        settings = task.settings
        with TemporaryDirectory() as folder:
            adapter = write_adapter(task.adapter, Path(folder))
            policy = load_trained(settings, adapter, self.ranks, mesh)
        if plays_on_all(settings, self.ranks):
            opened = OpenPolicy(settings, policy, build_engine(settings, policy))
            self.member = Member(self.ranks, settings, opened)
        return build_updater(policy, settings, total_steps=task.total_steps, ranks=self.ranks)


def load_trained(settings: Settings, adapter: Path | None, ranks: Ranks, mesh: DeviceMesh | None) -> Policy:
    """The policy that a run trains, the same on every rank; ``mesh`` is that of ``mesh_of``."""
    return load_policy(
        settings,
        adapter=adapter,
        trainable=True,
        critic=resolve(settings).has_critic,
        mesh=mesh,
        accompanied=ranks.accompanied,
    )


def build_updater(
    policy: Policy, settings: Settings, *, total_steps: int | None = None, ranks: Ranks = ALONE
) -> Updater:
    """The updater of a run, the same on every rank."""
    return Updater(
        policy,
        resolve(settings),
        settings.training,
        settings.algorithm,
        settings.agent,
        total_steps=total_steps,
        across=Across(ranks, sharded=policy.sharded),
        largest_gap=max(LARGEST_GAP, TIMES_TOLERANCE * (settings.vllm.vllm_probe_tolerance or 0.0))
        if settings.has_servers
        else math.inf,
    )


def mesh_of(settings: Settings, ranks: Ranks) -> DeviceMesh | None:
    """This host's ranks, if a base may be sharded over them; UsageError for SHARD=host with only one rank."""
    mesh = None if settings.model.shard == "off" else ranks.host_mesh()
    if mesh is None and settings.model.shard == "host":
        raise _too_few_ranks()
    return mesh


def check_shard(settings: Settings, ranks: Ranks) -> None:
    """Raise the UsageErrors of SHARD=host that need neither the model nor the other ranks."""
    if settings.model.shard == "host":
        check_shardable(settings.model, settings.agent, settings.vllm)
        if ranks.is_alone:
            raise _too_few_ranks()


def _too_few_ranks() -> UsageError:
    return UsageError(
        "SHARD=host needs at least two ranks per host, the same number on every host.",
        "Start them with emailrl train --nproc N, or unset SHARD.",
    )


@contextmanager
def _asking(ranks: RankGroup) -> Iterator[None]:
    """Pass SIGINT or SIGTERM on to rank 0; a SIGINT after it is a KeyboardInterrupt."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if ranks.is_over or (asked and number == signal.SIGINT):
            raise KeyboardInterrupt
        asked.append(number)
        ranks.stop()

    with handled_by(handle):
        yield
