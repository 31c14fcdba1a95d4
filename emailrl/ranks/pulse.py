"""Heartbeat between rank 0 and the other ranks while rank 0, or every rank, runs rollouts.

A rollout may take seconds or hours. Meanwhile all ranks run a tiny all-reduce every second. It carries rank 0's call
(keep waiting, work, end), whether a rank was asked to stop, whether one is busy, and whether the work of one has failed
or makes no progress; then rank 0 gathers the reasons. If a rank ends or hangs, it fails within the timeout.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NoReturn

from emailrl.base.errors import EmailRLError
from emailrl.base.process import SECONDS, bounded, report
from emailrl.ranks.alone import Activity, Failure

LONGEST_INTERVAL: Final = 1.0
"""Maximum seconds between pulses; a quarter of the timeout if that is shorter."""

SHORTEST_INTERVAL: Final = 0.02
"""Seconds between pulses while rank 0 only waits for the others."""


class Call(IntEnum):
    """Rank 0's call to the others."""

    WAIT = 0
    WORK = 1
    END = 2


class Pulses:
    """The exchange of pulses by one rank; all ranks take part in each of them."""

    def __init__(self, group: Any, limit: float) -> None:
        """``limit``: seconds that work may go without progress."""
        import torch.distributed as dist

        self._group, self._limit = group, limit
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        self._activity: Activity | None = None
        self._own: Failure | None = None
        self._told = False
        self.failure: Failure | None = None
        """On rank 0: why the work on all ranks must end."""

    def watch(self, activity: Activity) -> None:
        """From now on report the failures of this work."""
        self._activity, self._own, self._told, self.failure = activity, None, False, None

    def fail(self, error: Exception) -> None:
        """Report with the next pulse that this rank's work raised ``error``."""
        self._own = Failure.of(self._rank, error)

    def exchange(self, call: Call, *, stopping: bool, busy: bool) -> tuple[Call, bool, bool]:
        """One pulse: rank 0's call, whether any rank was asked to stop, and whether any is busy.

        The first failure after ``watch`` is gathered with it.
        """
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
    def is_working(self) -> bool:
        """Whether the work of this rank is under way."""
        return self._activity is not None and self._activity.is_under_way

    def _failing(self) -> Failure | None:
        if self._own is not None or self._activity is None:
            return self._own
        return self._activity.stalled(f"Rollouts on rank {self._rank} of {self._world}", self._limit)


class Caller:
    """Rank 0's side: a thread between calls."""

    def __init__(self, group: Any, limit: float, lost: Callable[[Exception], EmailRLError]) -> None:
        """``lost`` gets a pulse's error, on the thread, and returns what to report; ``limit``: see ``Pulses``."""
        self._pulses, self._longest, self._lost = Pulses(group, limit), min(LONGEST_INTERVAL, limit / 4), lost
        self._interval = self._longest
        self._call = Call.WAIT
        self._wake, self._all_idle = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._asked = False
        self._parent = os.getppid()

    def begin(self, stop: Callable[[], None], activity: Activity) -> None:
        """Send pulses until the next call.

        ``stop`` is called on the thread if a rank is lost, was asked to stop or failed in its own work, or if the
        launcher has ended. If this rank's work, described by ``activity``, still runs seconds after a loss or failure,
        the process exits.
        """
        self._call, self._interval = Call.WAIT, self._longest
        self._wake.clear()
        self._all_idle.clear()
        self._pulses.watch(activity)
        self._thread = threading.Thread(target=self._beat, args=(stop,), name="pulse", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Failure | None:
        """Why the work that began last must end."""
        return self._pulses.failure

    def wait_for_all(self) -> None:
        """Wait until no rank is busy, or one is lost or has failed."""
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
        failed_at: float | None = None
        while True:
            self._wake.wait(self._interval)
            self._wake.clear()
            call = self._call
            try:
                _, stopping, busy = self._pulses.exchange(call, stopping=os.getppid() != self._parent, busy=False)
            except RuntimeError as error:
                lost = self._lost(error)
                self._all_idle.set()
                stop()
                self._leave_within(SECONDS, lost)
                return
            if failed_at is not None:
                self._check_left(failed_at)
            elif self.failure is not None:
                failed_at, self._interval = time.monotonic(), self._longest
                if self._pulses.is_working:
                    stop()
            if not busy or self.failure is not None:
                self._all_idle.set()
            if stopping and not self._asked:
                self._asked = True
                stop()
            if call is not Call.WAIT:
                return

    def _leave_within(self, seconds: float, error: EmailRLError) -> None:
        """Exit if native code, such as a collective with the lost rank, keeps this one in its work for longer."""
        end = time.monotonic() + seconds
        while self._pulses.is_working:
            if time.monotonic() > end:
                _exit(error)
            time.sleep(SHORTEST_INTERVAL)

    def _check_left(self, failed_at: float) -> None:
        """Exit if native code keeps this rank in its work, where no signal interrupts it."""
        if time.monotonic() - failed_at > SECONDS and self._pulses.is_working and self.failure is not None:
            _exit(self.failure.as_error())


def _exit(error: EmailRLError) -> NoReturn:
    report(f"error: {error}")
    os._exit(1)


class Listener:
    """The side of a rank that waits or works on its own."""

    def __init__(self, group: Any, limit: float) -> None:
        self._pulses = Pulses(group, limit)
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
            self.heard, _, _ = self._pulses.exchange(Call.WAIT, stopping=self.stopping, busy=False)
        return self.heard

    def begin(self, interrupt: Callable[[], None], activity: Activity) -> None:
        """Answer pulses from a thread, as a busy rank, until ``end``.

        ``interrupt`` is called on the thread if rank 0 ends the run or is lost. If ``end`` does not follow within
        seconds, the process exits: its work may be waiting for rank 0 in native code.
        """
        self.heard = Call.WAIT
        self._done.clear()
        self._pulses.watch(activity)
        self._thread = threading.Thread(target=self._answer, args=(interrupt,), name="pulse", daemon=True)
        self._thread.start()

    def fail(self, error: Exception) -> None:
        """Tell rank 0 that the work raised ``error``."""
        self._pulses.fail(error)

    def end(self) -> None:
        """Stop being busy."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _answer(self, interrupt: Callable[[], None]) -> None:
        try:
            while self.heard is Call.WAIT and not self._done.is_set():
                self.heard, _, _ = self._pulses.exchange(Call.WAIT, stopping=self.stopping, busy=True)
        except RuntimeError as error:
            self.error = error
        if self.error is not None or self.heard is not Call.WAIT:
            interrupt()
            with bounded():
                self._done.wait()
