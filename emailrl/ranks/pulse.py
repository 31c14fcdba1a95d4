"""How rank 0 and the ranks that wait for it know that the other side is alive, for as long as rank 0 plays.

A rollout may take seconds or hours. Meanwhile a thread of rank 0 and the waiting ranks meet every few seconds in a tiny
all-reduce. It carries what rank 0 wants (go on waiting, work, end) and whether a rank was asked to stop. A rank that is
gone or hangs makes it fail within the time limit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

LONGEST_INTERVAL: Final = 5.0
"""Seconds between two pulses at most; a quarter of the time limit where that is shorter."""


class Call(IntEnum):
    """What rank 0 wants of the others."""

    WAIT = 0
    WORK = 1
    END = 2


class Caller:
    """Rank 0's side: a thread between two calls."""

    def __init__(self, group: Any, limit: float, failed: Callable[[Exception], None]) -> None:
        """``failed`` takes the error of a pulse, on the thread."""
        self._group, self._interval, self._failed = group, min(LONGEST_INTERVAL, limit / 4), failed
        self._call = Call.WAIT
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = False
        self._parent = os.getppid()

    def begin(self, stop: Callable[[], None]) -> None:
        """Send pulses until the next call.

        ``stop`` is called on the thread where a rank is lost or was asked to stop, or where the launcher is gone.
        """
        self._call = Call.WAIT
        self._wake.clear()
        self._thread = threading.Thread(target=self._beat, args=(stop,), name="pulse", daemon=True)
        self._thread.start()

    def call(self, call: Call) -> None:
        """Send ``call`` with the next pulse, at once, and end the pulses."""
        if self._thread is None:
            return
        self._call = call
        self._wake.set()
        self._thread.join()
        self._thread = None

    def _beat(self, stop: Callable[[], None]) -> None:
        while True:
            self._wake.wait(self._interval)
            call = self._call
            try:
                _, stopping = exchange(self._group, call, stopping=os.getppid() != self._parent)
            except RuntimeError as error:
                self._failed(error)
                stop()
                return
            if stopping and not self._asked:
                self._asked = True
                stop()
            if call is not Call.WAIT:
                return


class Listener:
    """The side of a rank that waits."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.stopping = False
        """This rank was asked to stop."""

    def listen(self) -> Call:
        """Answer pulses until one says something else than to wait."""
        while True:
            call, _ = exchange(self._group, Call.WAIT, stopping=self.stopping)
            if call is not Call.WAIT:
                return call


def exchange(group: Any, call: Call, *, stopping: bool) -> tuple[Call, bool]:
    """One pulse: rank 0's call, and whether any rank was asked to stop."""
    import torch
    import torch.distributed as dist

    flags = torch.tensor([int(call), int(stopping)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    call_now, stops = flags.tolist()
    return Call(call_now), bool(stops)
