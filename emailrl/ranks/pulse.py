"""Heartbeat between rank 0 and the waiting ranks while rank 0 runs rollouts.

A rollout may take seconds or hours. Meanwhile a thread of rank 0 and the waiting ranks run a tiny all-reduce every few
seconds. It carries rank 0's call (keep waiting, work, end), whether a rank was asked to stop, and whether one is busy.
If a rank ends or hangs, it fails within the timeout.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

from emailrl.ending import bounded

LONGEST_INTERVAL: Final = 5.0
"""Maximum seconds between pulses; a quarter of the timeout if that is shorter."""

SHORTEST_INTERVAL: Final = 0.02
"""Seconds between pulses while rank 0 only waits for the others."""


class Call(IntEnum):
    """Rank 0's call to the others."""

    WAIT = 0
    WORK = 1
    END = 2


class Caller:
    """Rank 0's side: a thread between calls."""

    def __init__(self, group: Any, limit: float, failed: Callable[[Exception], None]) -> None:
        """``failed`` is called with a pulse's error, on the thread."""
        self._group, self._longest, self._failed = group, min(LONGEST_INTERVAL, limit / 4), failed
        self._interval = self._longest
        self._call = Call.WAIT
        self._wake, self._all_idle = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = False
        self._parent = os.getppid()

    def begin(self, stop: Callable[[], None]) -> None:
        """Send pulses until the next call.

        ``stop`` is called on the thread if a rank is lost or was asked to stop, or if the launcher has ended.
        """
        self._call, self._interval = Call.WAIT, self._longest
        self._wake.clear()
        self._all_idle.clear()
        self._thread = threading.Thread(target=self._beat, args=(stop,), name="pulse", daemon=True)
        self._thread.start()

    def wait_for_all(self) -> None:
        """Wait until no rank is busy, or one is lost."""
        self._interval = SHORTEST_INTERVAL
        self._wake.set()
        self._all_idle.wait()

    def call(self, call: Call) -> None:
        """Send ``call`` with an immediate pulse, and stop pulsing."""
        if self._thread is None:
            return
        self._call = call
        self._wake.set()
        self._thread.join()
        self._thread = None

    def _beat(self, stop: Callable[[], None]) -> None:
        while True:
            self._wake.wait(self._interval)
            self._wake.clear()
            call = self._call
            try:
                _, stopping, busy = exchange(self._group, call, stopping=os.getppid() != self._parent, busy=False)
            except RuntimeError as error:
                self._failed(error)
                self._all_idle.set()
                stop()
                return
            if not busy:
                self._all_idle.set()
            if stopping and not self._asked:
                self._asked = True
                stop()
            if call is not Call.WAIT:
                return


class Listener:
    """The side of a rank that waits or works on its own."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.stopping = False
        """This rank was asked to stop."""
        self.heard = Call.WAIT
        """The last call."""
        self.error: RuntimeError | None = None
        """Why there are no more pulses."""

    def listen(self) -> Call:
        """Answer pulses until one carries a call other than to wait."""
        self.heard = Call.WAIT
        while self.heard is Call.WAIT:
            self.heard, _, _ = exchange(self._group, Call.WAIT, stopping=self.stopping, busy=False)
        return self.heard

    def begin(self, interrupt: Callable[[], None]) -> None:
        """Answer pulses from a thread, as a busy rank, until ``end``.

        ``interrupt`` is called on the thread if rank 0 ends the run or is lost. If ``end`` does not follow within
        seconds, the process exits: its work may be waiting for rank 0 in native code.
        """
        self.heard = Call.WAIT
        self._done.clear()
        self._thread = threading.Thread(target=self._answer, args=(interrupt,), name="pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop being busy."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _answer(self, interrupt: Callable[[], None]) -> None:
        try:
            while self.heard is Call.WAIT and not self._done.is_set():
                self.heard, _, _ = exchange(self._group, Call.WAIT, stopping=self.stopping, busy=True)
        except RuntimeError as error:
            self.error = error
        if self.error is not None or self.heard is not Call.WAIT:
            interrupt()
            with bounded():
                self._done.wait()


def exchange(group: Any, call: Call, *, stopping: bool, busy: bool) -> tuple[Call, bool, bool]:
    """One pulse: rank 0's call, whether any rank was asked to stop, and whether any is busy."""
    import torch
    import torch.distributed as dist

    flags = torch.tensor([int(call), int(stopping), int(busy)])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    call_now, stops, works = flags.tolist()
    return Call(call_now), bool(stops), bool(works)
