"""Find which rank is missing: each remaining rank leaves a mark in the store and checks whose mark is absent.

It also has missing ranks of its host killed if they hang: torchrun's agent sends them SIGTERM and waits 30 s or more.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from emailrl.base.disk import replace_bytes
from emailrl.base.errors import EmailRLError
from emailrl.base.plain import first_line
from emailrl.ranks.activity import CONTINUE, Activity, said
from emailrl.ranks.alone import Ranks, T
from emailrl.ranks.place import Place
from emailrl.ranks.pulse import Call, Caller, Listener

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

SECONDS_TO_REPORT: Final = 3.0
"""How long a rank waits for the marks of the others after losing one."""

SECONDS_TO_FOLLOW: Final = 5.0
"""How long a missing rank, once one that missed it has ended, may take to end or notice that before it is killed."""

_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_NOTE: Final = "awake"
"""Beside the error file of a rank that has itself noticed the loss of another."""


def missing_ranks(store: Any, rank: int, world: int) -> list[int] | None:
    """Ranks that leave no mark in the store; None if the store itself is unreachable.

    Runs in a thread: a request to an unreachable host never returns.
    """
    found: list[list[int]] = []
    keys = [f"lost/{each}" for each in range(world)]

    def look() -> None:
        end = time.monotonic() + SECONDS_TO_REPORT
        with suppress(RuntimeError):
            store.set(keys[rank], "1")
            while True:
                missing = [each for each, key in enumerate(keys) if not store.check([key])]
                if not missing or time.monotonic() >= end:
                    found.append(missing)
                    return
                time.sleep(0.1)

    thread = threading.Thread(target=look, name="missing", daemon=True)
    thread.start()
    thread.join(SECONDS_TO_REPORT + 2)
    return found[0] if found else None


def note_missing(ranks: list[int]) -> None:
    """Record that this rank is awake, and let a process kill those of ``ranks`` on this host that are not.

    It does so seconds after this rank has ended and reported its error.
    """
    import psutil  # type: ignore[import-untyped]

    file = os.environ.get(_ERROR_FILE)
    if not file:
        return
    replace_bytes(Path(file).with_name(_NOTE), b"")
    beside = [child.pid for child in psutil.Process(os.getppid()).children() if _rank_of(child) in ranks]
    if beside:
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import kill_hung; kill_hung({os.getpid()}, {beside})"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # the agent ends the whole session of a rank
        )  # fmt: skip


def kill_hung(parent: int, pids: list[int]) -> None:
    """Once ``parent`` has ended, kill its sibling ranks ``pids`` that do not end and are not awake."""
    import psutil

    hung = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            hung.append(psutil.Process(pid))
    while os.getppid() == parent:
        time.sleep(0.1)
    for process in hung:
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:  # no signal but this one reaches it
                process.kill()
    for process in psutil.wait_procs(hung, SECONDS_TO_FOLLOW)[1]:
        with suppress(psutil.Error):
            if not Path(process.environ()[_ERROR_FILE]).with_name(_NOTE).exists():
                process.kill()


def _rank_of(process: Any) -> int | None:
    import psutil

    try:
        environ = process.environ()
    except psutil.Error:
        return None
    return int(environ["RANK"]) if _ERROR_FILE in environ else None


logger = logging.getLogger(__name__)


class LostRank(EmailRLError):
    """Another rank has ended or stopped responding."""


class RankGroup(Ranks):
    """This process as one of ``place.world`` ranks; created by `joined`."""

    def __init__(self, place: Place, store: Any, *, start_seconds: float, seconds: float) -> None:
        """``start_seconds`` limits every wait until ``started``, ``seconds`` every later one."""
        import torch.distributed as dist

        self.rank, self.world, self.local_rank = place.rank, place.world, place.local_rank
        self.local_world = place.local_world
        self.seconds = 0.0
        self._store, self._limit = store, seconds
        self._starting = dist.group.WORLD
        limit = timedelta(seconds=seconds)
        self._running = dist.new_group(timeout=limit, backend=dist.get_backend_config(self._starting))
        self._group: Any = self._starting
        pulses = dist.new_group(timeout=limit, backend="gloo")
        self._caller = Caller(pulses, seconds, self._lose) if self.is_first else None
        self._listener = None if self.is_first else Listener(pulses, seconds)
        self.on_stop = lambda: None
        self.activity = Activity()
        self._working = False
        self._agreed: Exception | None = None
        """The last error that all ranks raised."""
        self._wait_seconds = start_seconds

    # -- rank 0 calls, the others wait

    def rest(self, activity: Activity | None = None) -> None:
        """Rank 0 continues alone, and from now on signals the others every second that it is alive.

        With ``activity`` all ranks work on their own; this is rank 0's.
        """
        if self._caller is not None:
            self._caller.begin(lambda: self.on_stop(), activity or self.activity)

    def started(self) -> None:
        """See ``Ranks.started``."""
        self._group, self._wait_seconds = self._running, self._limit

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """See ``Ranks.at_work``. After an error raised on all ranks, the others wait again."""
        assert self._caller is not None
        self._caller.call(Call.WORK)
        self._raise_lost()
        self._working = True
        try:
            yield
        except Exception as error:
            if error is self._agreed:
                self._working = False
                self.rest()
            raise
        self._working = False
        self.rest()

    def follow(self, work: Callable[[], object]) -> None:
        """Do ``work`` whenever rank 0 calls, until it ends; rank 0 reports errors raised on all ranks."""
        assert self._listener is not None
        try:
            while self._hear() is Call.WORK:
                try:
                    work()
                except Exception as error:
                    if error is not self._agreed:
                        raise
                    if not isinstance(error, EmailRLError):
                        logger.exception("Rank %d of %d failed.", self.rank, self.world)
        except KeyboardInterrupt:
            self._listener.end()
            if self._listener.error is not None:
                self._lose(self._listener.error)
            self._raise_lost()
            if not self.is_over:
                raise

    def _hear(self) -> Call:
        assert self._listener is not None
        with self._guarded():
            return self._listener.listen()

    @property
    def is_over(self) -> bool:
        """Whether this rank, other than 0, was told to end."""
        assert self._listener is not None
        return self._listener.heard is Call.END or self._listener.error is not None

    def stop(self) -> None:
        """Tell rank 0 with the next pulse that this rank was asked to stop. Safe in a signal handler."""
        assert self._listener is not None
        self._listener.stopping = True

    def leave(self) -> None:
        """See ``Ranks.leave``."""
        if self._caller is not None and not self._working and self.lost is None:
            self._caller.call(Call.END)

    # -- collectives

    def broadcast(self, value: T) -> T:
        """See ``Ranks.broadcast``."""
        import torch.distributed as dist

        box = [value]
        with self._guarded():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def scatter(self, parts: Sequence[T] | None) -> T:
        """See ``Ranks.scatter``."""
        import torch.distributed as dist

        box: list[Any] = [None]
        with self._guarded():
            dist.scatter_object_list(box, list(parts) if parts is not None else None, src=0, group=self._group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """See ``Ranks.gather``."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        with self._guarded():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def collect(self, value: T) -> list[T]:
        """See ``Ranks.collect``."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world if self.is_first else []
        with self._guarded():
            dist.gather_object(value, values or None, dst=0, group=self._group)
        return values

    def all_reduce(self, tensor: Tensor) -> None:
        """See ``Ranks.all_reduce``."""
        import torch
        import torch.distributed as dist

        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # kernels still queued are not part of the sum
        begun = time.perf_counter()
        with self._guarded():
            # Not by ``_starting``: NCCL would connect both, with buffers for each on the GPU.
            dist.all_reduce(tensor, group=self._running)
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        self.seconds += time.perf_counter() - begun

    def exchange(self, value: T, failed: Exception | None = None) -> list[T]:
        """See ``Ranks.exchange``. The rank that failed keeps its own error."""
        every = self.gather((value, None if failed is None else said(failed)))
        for rank, (_, reason) in enumerate(every):
            if reason is not None:
                message, hint = reason
                self._agreed = failed or EmailRLError(f"Rank {rank}: {message}", hint)
                raise self._agreed
        return [each for each, _ in every]

    def agree(self, work: Callable[[], T]) -> T:
        """See ``Ranks.agree``."""
        failed: Exception | None = None
        try:
            result = work()
        except LostRank:
            raise
        except Exception as error:
            failed = error
        self.exchange(None, failed)
        return result

    def apart(self, work: Callable[[Activity], T]) -> T:
        """See ``Ranks.apart``; rank 0 and the others keep exchanging pulses."""
        if self._caller is None:
            return self._apart_from_first(work)
        self._working, activity = False, Activity()
        activity.note("starting")
        self.rest(activity)
        try:
            result = work(activity)
            activity.end()
            self._caller.wait_for_all()
        except KeyboardInterrupt:
            self.raise_failure()
            raise
        finally:
            activity.end()
        self.raise_failure()
        self._caller.call(Call.WORK)
        self._raise_lost()
        self._working = True
        return result

    def raise_failure(self) -> None:
        """On rank 0: raise what ended the work apart of all ranks, if it was interrupted for that."""
        self._raise_lost()
        if self._caller is not None and self._caller.failure is not None:
            raise self._caller.failure.as_error() from None

    def _apart_from_first(self, work: Callable[[Activity], T]) -> T:
        """Do ``work`` until rank 0 calls; KeyboardInterrupt if it calls to end."""
        assert self._listener is not None
        activity = Activity()
        activity.note("starting")
        self._listener.begin(lambda: self.on_stop(), activity)
        try:
            result = work(activity)
        except Exception as error:
            self._listener.fail(error)
            if not isinstance(error, EmailRLError):
                logger.exception("Rank %d of %d failed.", self.rank, self.world)
        finally:
            activity.end()
            self._listener.end()
        if self.is_over or self._hear() is not Call.WORK:
            raise KeyboardInterrupt
        return result

    def check_same(self, what: str, value: str) -> None:
        """See ``Ranks.check_same``."""
        values = self.gather(value)
        different = [str(rank) for rank, other in enumerate(values) if other != values[0]]
        if different:
            self._agreed = EmailRLError(
                f"{what} of rank {', '.join(different)} differs from rank 0's.",
                "All ranks need the same emailrl, torch and model files.",
            )
            raise self._agreed

    def host_mesh(self) -> DeviceMesh | None:
        """See ``Ranks.host_mesh``."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        if set(self.gather(self.local_world)) != {self.local_world} or self.local_world == 1:
            return None
        group, _ = dist.new_subgroups(group_size=self.local_world, timeout=timedelta(seconds=self._limit))
        return DeviceMesh.from_group(group, "cuda" if "nccl" in dist.get_backend_config(group) else "cpu")

    # -- lost ranks

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn torch's errors for a broken or timed-out connection into LostRank."""
        try:
            yield
        except RuntimeError as error:
            self._lose(error)
            self._raise_lost(error)

    def _raise_lost(self, cause: Exception | None = None) -> None:
        if self.lost is not None:
            raise self.lost from cause

    def _lose(self, error: Exception) -> EmailRLError:
        if self.lost is not None:
            return self.lost
        missing = missing_ranks(self._store, self.rank, self.world)
        note_missing(missing or [])
        if missing is None:
            message = f"Rank {self.rank} of {self.world} lost the connection to the host of rank 0."
        elif missing:
            ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.world}"
            silent = "timed out" in str(error).lower()  # otherwise a connection was closed
            hung = f"did not answer within {self._wait_seconds:g} s" if silent else "stopped responding"
            message = f"{ranks} ended or {hung}."
        else:
            message = f"Rank {self.rank} of {self.world} lost the connection to another rank ({first_line(error)})."
        self.lost = LostRank(message, CONTINUE)
        return self.lost
