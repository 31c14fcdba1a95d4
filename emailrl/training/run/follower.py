"""The ranks besides the first: they load the model that rank 0 names, train what it deals out, and record nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING

from emailrl.errors import UsageError
from emailrl.policy.adapter import CONFIG, WEIGHTS
from emailrl.policy.load import load_policy
from emailrl.ranks import RankGroup, Ranks, joined
from emailrl.settings import Settings
from emailrl.training.mix import resolve
from emailrl.training.step.update import Updater

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Task:
    """What rank 0 tells the others before they load the model."""

    settings: Settings
    """Without secrets."""
    total_steps: int
    adapter: dict[str, bytes] | None
    """Files of the adapter to start from, whose folder other hosts may not see; None for a fresh one."""

    @classmethod
    def of(cls, settings: Settings, total_steps: int, adapter: Path | None) -> Task:
        """The task of a run that starts from the adapter in this folder."""
        files = None if adapter is None else {name: (adapter / name).read_bytes() for name in (CONFIG, WEIGHTS)}
        return cls(settings.without_secrets(), total_steps, files)


def follow(settings: Settings) -> None:
    """Be one of the ranks that wait for rank 0's samples, until it ends.

    ``settings`` say how to meet; all others come from rank 0. SIGINT and SIGTERM are passed on to it: the first lets it
    end the run in order, the second ends this process.
    """
    with joined(settings) as ranks:
        assert isinstance(ranks, RankGroup)
        with _asking(ranks):
            follower = Follower(ranks)
            ranks.follow(follower.work)


class Follower:
    """Does what rank 0 calls to: first to load the model, then to train."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks
        self.updater: Updater | None = None

    def work(self) -> None:
        """One call of rank 0."""
        if self.updater is not None:
            self.updater.follow()
            return
        task: Task | None = self.ranks.broadcast(None)
        assert task is not None
        mesh = mesh_of(task.settings, self.ranks)
        updater = self.ranks.agree(lambda: self._load(task, mesh))
        updater.synchronize()
        self.ranks.started()
        self.updater = updater

    def _load(self, task: Task, mesh: DeviceMesh | None) -> Updater:
        with TemporaryDirectory() as folder:
            for name, content in (task.adapter or {}).items():
                (Path(folder) / name).write_bytes(content)
            adapter = Path(folder) if task.adapter else None
            policy = load_policy(task.settings, adapter=adapter, trainable=True, mesh=mesh)
        return Updater(policy, resolve(task.settings), task.settings, total_steps=task.total_steps, ranks=self.ranks)


def mesh_of(settings: Settings, ranks: Ranks) -> DeviceMesh | None:
    """The ranks of this host, if a base may be sharded over them; UsageError for SHARD=host where there is only one."""
    mesh = None if settings.model.shard == "off" else ranks.host_mesh()
    if mesh is None and settings.model.shard == "host":
        raise UsageError(
            "SHARD=host needs at least two ranks on each host, and equally many on all.",
            "Start them with emailrl train --nproc N, or unset SHARD.",
        )
    return mesh


@contextmanager
def _asking(ranks: RankGroup) -> Iterator[None]:
    """Pass the first SIGINT or SIGTERM on to rank 0; the second is a KeyboardInterrupt."""
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        ranks.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
