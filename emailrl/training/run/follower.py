"""The ranks besides the first: they load the model that rank 0 names, train what it deals out, and record nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from emailrl.policy.adapter import CONFIG, WEIGHTS
from emailrl.policy.load import load_policy
from emailrl.ranks import RankGroup, joined
from emailrl.settings import Settings
from emailrl.training.mix import resolve
from emailrl.training.step.update import Updater


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
        updater = self.ranks.agree(lambda: self._load(task))
        updater.synchronize()
        self.ranks.started()
        self.updater = updater

    def _load(self, task: Task) -> Updater:
        with TemporaryDirectory() as folder:
            for name, content in (task.adapter or {}).items():
                (Path(folder) / name).write_bytes(content)
            policy = load_policy(task.settings, adapter=Path(folder) if task.adapter else None, trainable=True)
        return Updater(policy, resolve(task.settings), task.settings, total_steps=task.total_steps, ranks=self.ranks)


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
