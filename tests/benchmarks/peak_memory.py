"""The peak of what a process and its children hold in memory together, watched from a process beside them."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from types import TracebackType

import psutil

_SECONDS = 0.2


class PeakMemory:
    """``with PeakMemory() as memory: …``, then ``memory.mebibytes``: resident, a page that several processes share
    counted once (proportional set size)."""

    def __enter__(self) -> PeakMemory:
        self.mebibytes = 0.0
        self._ours, theirs = multiprocessing.Pipe()
        self._watcher = multiprocessing.get_context("spawn").Process(target=_watch, args=(os.getpid(), theirs))
        self._watcher.start()
        self._ours.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.send(None)
        self.mebibytes = self._ours.recv() / 2**20
        self._watcher.join()


def _watch(pid: int, pipe: Connection) -> None:
    peak, watched = 0, psutil.Process(pid)
    pipe.send(None)
    while not pipe.poll(_SECONDS):
        total = 0
        for process in (watched, *watched.children(recursive=True)):
            if process.pid != os.getpid():
                try:
                    total += process.memory_full_info().pss
                except psutil.NoSuchProcess:
                    continue
        peak = max(peak, total)
    pipe.send(peak)
