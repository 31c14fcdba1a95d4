"""Heartbeat between rank 0 and the other ranks while rank 0, or every rank, runs rollouts. A rollout may take seconds
or hours. Meanwhile all ranks run a tiny all-reduce every second. It carries rank 0's call (keep waiting, work, end),
whether a rank was asked to stop, whether one is busy, and whether the work of one has failed or makes no progress; then
rank 0 gathers the reasons. If a rank ends or hangs, it fails within the timeout."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NoReturn

from emailrl.base.errors import EmailRLError
from emailrl.base.process import SECONDS, bounded, report
from emailrl.ranks.alone import Activity, Failure, said

LONGEST_INTERVAL: Final = 1.0  # Maximum seconds between pulses; a quarter of the timeout if that is shorter.
SHORTEST_INTERVAL: Final = 0.02  # Seconds between pulses while rank 0 only waits for the others.


class Call(IntEnum):
    """Rank 0's call to the others."""

    WAIT = 0
    WORK = 1
    END = 2


class Pulse:
    """One rank's side: rank 0 sends calls, the others hear them; all take part in each pulse."""

    def __init__(self, group: Any, limit: float, lost: Callable[[Exception], EmailRLError]) -> None:
        """``limit``: seconds that work may go without progress. ``lost``, on rank 0's thread, turns the error of a
        pulse into what to report."""
        import torch.distributed as dist

        self._group, self._limit, self._lost = group, limit, lost
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._interval = self._longest = min(LONGEST_INTERVAL, limit / 4)
        self._thread: threading.Thread | None = None
        self._wake, self._done = threading.Event(), threading.Event()
        """``_done``: on rank 0, no rank is busy; on another, its own work has ended."""
        self._activity: Activity | None = None
        self._own: Failure | None = None
        self._told = self._asked = False
        self._parent = os.getppid()
        self._call = Call.WAIT
        self.failure: Failure | None = None  # On rank 0: why the work that began last must end on all ranks.
        self.stopping = False  # This rank, other than 0, was asked to stop.
        self.heard = Call.WAIT  # Rank 0's last call.
        self.error: RuntimeError | None = None  # Why this rank, other than 0, hears no more pulses.

    def begin(self, stop: Callable[[], None], activity: Activity) -> None:
        """Pulse from a thread while this rank works, as described by ``activity``: until the next ``call`` of rank 0,
        or until ``end`` on a busy rank. ``stop`` is called on the thread. On rank 0: if a rank is lost, was asked to
        stop or failed in its own work, or if the launcher has ended. On another: if rank 0 ends the run or is lost. If
        the work still runs seconds after a loss or failure, maybe in native code, where no signal interrupts it, the
        process exits."""
        self._call = self.heard = Call.WAIT
        self._interval = self._longest
        self._activity, self._own, self._told, self.failure = activity, None, False, None
        self._wake.clear()
        self._done.clear()
        beat = self._answer if self._rank else self._lead
        self._thread = threading.Thread(target=beat, args=(stop,), name="pulse", daemon=True)
        self._thread.start()

    # -- rank 0

    def wait_for_all(self) -> None:
        """Wait until no rank is busy, or one is lost or has failed."""
        self._interval = SHORTEST_INTERVAL
        self._wake.set()
        self._done.wait()

    def call(self, call: Call) -> None:
        """Send ``call`` with an immediate pulse, and stop pulsing."""
        if self._thread is not None:
            self._call = call
            self._wake.set()
            self._thread.join()
            self._thread = None

    def _lead(self, stop: Callable[[], None]) -> None:
        failed_at = math.inf
        call = Call.WAIT
        while call is Call.WAIT:
            self._wake.wait(self._interval)
            self._wake.clear()
            call = self._call
            try:
                _, stopping, busy = self._exchange(call, stopping=os.getppid() != self._parent, busy=False)
            except RuntimeError as error:
                lost, end = self._lost(error), time.monotonic() + SECONDS
                self._done.set()
                stop()
                while self._is_working:
                    if time.monotonic() > end:
                        _exit(lost)
                    time.sleep(SHORTEST_INTERVAL)
                return
            if self.failure is not None and failed_at == math.inf:
                failed_at, self._interval = time.monotonic(), self._longest
                if self._is_working:
                    stop()
            if self.failure is not None and self._is_working and time.monotonic() - failed_at > SECONDS:
                _exit(self.failure)
            if not busy or self.failure is not None:
                self._done.set()
            if stopping and not self._asked:
                self._asked = True
                stop()

    # -- the others

    def listen(self) -> Call:
        """Answer pulses until one carries a call other than to wait."""
        self.heard = Call.WAIT
        while self.heard is Call.WAIT:
            self.heard, _, _ = self._exchange(Call.WAIT, stopping=self.stopping, busy=False)
        return self.heard

    def fail(self, error: Exception) -> None:
        """Tell rank 0 with the next pulse that this rank's work raised ``error``."""
        message, hint = said(error)
        self._own = Failure(f"Rank {self._rank}: {message}", hint)

    def end(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _answer(self, interrupt: Callable[[], None]) -> None:
        try:
            while self.heard is Call.WAIT and not self._done.is_set():
                self.heard, _, _ = self._exchange(Call.WAIT, stopping=self.stopping, busy=True)
        except RuntimeError as error:
            self.error = error
        if self.error is not None or self.heard is not Call.WAIT:
            interrupt()
            with bounded():
                self._done.wait()

    # -- all

    def _exchange(self, call: Call, *, stopping: bool, busy: bool) -> tuple[Call, bool, bool]:
        """One pulse: rank 0's call, whether any rank was asked to stop or is busy; the first failure comes with it."""
        import torch
        import torch.distributed as dist

        own = None if self._told else self._failing()
        flags = torch.tensor([int(call), int(stopping), int(busy), int(own is not None)])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        call_now, stops, works, fails = flags.tolist()
        if fails:
            self._told = True
            failures: list[Failure | None] = [None] * self._world if self._rank == 0 else []
            dist.gather_object(self._failing() or own, failures or None, dst=0, group=self._group)
            self.failure = max((one for one in failures if one), key=lambda one: one.seconds, default=None)
        return Call(call_now), bool(stops), bool(works)

    @property
    def _is_working(self) -> bool:
        return self._activity is not None and self._activity.is_under_way

    def _failing(self) -> Failure | None:
        if self._own is not None or self._activity is None:
            return self._own
        return self._activity.stalled(f"Rollouts on rank {self._rank} of {self._world}", self._limit)


def _exit(error: EmailRLError) -> NoReturn:
    report(f"error: {error}")
    os._exit(1)
