"""Several ranks: how they connect, exchange objects and sums, and notice one that is lost. A rank that loses the
connection finds out which one is missing: each remaining rank leaves a mark in the store, and checks whose mark is
absent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line
from emailrl.base.process import bounded, handled_by, is_importing
from emailrl.ranks.alone import ALONE, CONTINUE, Activity, Place, Ranks, T, said
from emailrl.ranks.pulse import Call, Pulse
from emailrl.settings import TrainingSettings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

SECONDS_TO_REPORT: Final = 3.0  # How long a rank waits for the marks of the others after losing one.
SECONDS_TO_FOLLOW: Final = 6  # How long a missing rank may live on: by then those that noticed have reported and ended.

logger = logging.getLogger(__name__)


class LostRank(EmailRLError):
    """Another rank has ended or stopped responding."""


class RankGroup(Ranks):
    """This process as one of ``place.world`` ranks, created by `joined`; the collectives are those of `Ranks`."""

    def __init__(self, place: Place, store: Any, *, start_seconds: float, seconds: float) -> None:
        """``start_seconds`` limits every wait until ``started``, ``seconds`` every later one."""
        import torch.distributed as dist

        self.rank, self.world, self.local_rank = place.rank, place.world, place.local_rank
        self.local_world = place.local_world
        self.seconds = 0.0
        self._store, self._limit = store, seconds
        limit = timedelta(seconds=seconds)
        self._group: Any = dist.group.WORLD
        self._running = dist.new_group(timeout=limit, backend=dist.get_backend_config(self._group))
        self._pulse = Pulse(dist.new_group(timeout=limit, backend="gloo"), seconds, self._lose)
        self.on_stop = lambda: None
        self.activity = Activity()
        self._working = False
        self._agreed: Exception | None = None  # The last error that all ranks raised.
        self._wait_seconds = start_seconds

    # -- rank 0 calls, the others wait

    def rest(self, activity: Activity | None = None) -> None:
        """Rank 0, or with ``activity`` every rank, goes on alone, and all learn every second that the others live."""
        if self.is_first:
            self._pulse.begin(lambda: self.on_stop(), activity or self.activity)

    def stop_with(self, stop: Callable[[], None]) -> None:
        self.on_stop = stop

    def started(self) -> None:
        self._group, self._wait_seconds = self._running, self._limit

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """See ``Ranks.at_work``. After an error raised on all ranks, the others wait again."""
        self._call_to_work()
        try:
            yield
        except Exception as error:
            if error is self._agreed:
                self._working = False
                self.rest()
            raise
        self._working = False
        self.rest()

    def _call_to_work(self) -> None:
        self._pulse.call(Call.WORK)
        self._raise_lost()
        self._working = True

    def follow(self, work: Callable[[], object]) -> None:
        """Do ``work`` whenever rank 0 calls, until it ends; rank 0 reports errors raised on all ranks."""
        try:
            while self._hear() is Call.WORK:
                try:
                    work()
                except Exception as error:
                    if error is not self._agreed:
                        raise
                    self._log(error)
        except KeyboardInterrupt:
            self._pulse.end()
            if self._pulse.error is not None:
                self._lose(self._pulse.error)
            self._raise_lost()
            if not self.is_over:
                raise

    def _hear(self) -> Call:
        with self._guarded():
            return self._pulse.listen()

    def _log(self, error: Exception) -> None:
        """Keep the traceback of an error that rank 0 reports on one line."""
        if not isinstance(error, EmailRLError):
            logger.exception("Rank %d of %d failed.", self.rank, self.world)

    @property
    def is_over(self) -> bool:
        """Whether this rank, other than 0, was told to end."""
        return self._pulse.heard is Call.END or self._pulse.error is not None

    def stop(self) -> None:
        """Tell rank 0 with the next pulse that this rank was asked to stop. Safe in a signal handler."""
        self._pulse.stopping = True

    def leave(self) -> None:
        if self.is_first and not self._working and self.lost is None:
            self._pulse.call(Call.END)

    # -- collectives

    def _exchange(self, name: str, *given: Any, **more: int) -> None:
        import torch.distributed as dist

        with self._guarded():
            getattr(dist, name)(*given, group=self._group, **more)

    def broadcast(self, value: T) -> T:
        box = [value]
        self._exchange("broadcast_object_list", box, src=0)
        return box[0]

    def scatter(self, parts: Sequence[T] | None) -> T:
        box: list[Any] = [None]
        self._exchange("scatter_object_list", box, list(parts) if parts is not None else None, src=0)
        return box[0]

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world
        self._exchange("all_gather_object", values, value)
        return values

    def collect(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world if self.is_first else []
        self._exchange("gather_object", value, values or None, dst=0)
        return values

    def all_reduce(self, tensor: Tensor) -> None:
        import torch
        import torch.distributed as dist

        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # kernels still queued are not part of the sum
        begun = time.perf_counter()
        with self._guarded():
            # Not by the group of the start: NCCL would connect both, with buffers for each on the GPU.
            dist.all_reduce(tensor, group=self._running)
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        self.seconds += time.perf_counter() - begun

    def agree(self, work: Callable[[], T]) -> T:
        """See ``Ranks.agree``. The rank that failed keeps its own error."""
        failed: Exception | None = None
        try:
            result = work()
        except LostRank:
            raise
        except Exception as error:
            failed = error
        for rank, reason in enumerate(self.gather(None if failed is None else said(failed))):
            if reason is not None:
                self._agreed = failed or EmailRLError(f"Rank {rank}: {reason[0]}", reason[1])
                raise self._agreed
        return result

    def apart(self, work: Callable[[Activity], T]) -> T:
        """See ``Ranks.apart``; rank 0 and the others keep exchanging pulses."""
        activity = Activity()
        activity.note("starting")
        if not self.is_first:
            self._pulse.begin(lambda: self.on_stop(), activity)
            try:
                result = work(activity)
            except Exception as error:
                self._pulse.fail(error)
                self._log(error)
            finally:
                activity.end()
                self._pulse.end()
            if self.is_over or self._hear() is not Call.WORK:
                raise KeyboardInterrupt
            return result
        self._working = False
        self.rest(activity)
        try:
            result = work(activity)
            activity.end()
            self._pulse.wait_for_all()
        except KeyboardInterrupt:
            self.raise_failure()
            raise
        finally:
            activity.end()
        self.raise_failure()
        self._call_to_work()
        return result

    def raise_failure(self) -> None:
        """On rank 0: raise what ended the work apart of all ranks, if it was interrupted for that."""
        self._raise_lost()
        if self._pulse.failure is not None:
            raise self._pulse.failure from None

    def host_mesh(self) -> DeviceMesh | None:
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
        missing = self._missing()
        if missing is None:
            message = f"Rank {self.rank} of {self.world} lost the connection to the host of rank 0."
        elif missing:
            ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.world}"
            silent = "timed out" in str(error).lower()  # otherwise a connection was closed
            hung = f"did not answer within {self._wait_seconds:g} s" if silent else "stopped responding"
            message = f"{ranks} ended or {hung}."
            _end_missing(missing)
        else:
            message = f"Rank {self.rank} of {self.world} lost the connection to another rank ({first_line(error)})."
        self.lost = LostRank(message, CONTINUE)
        return self.lost

    def _missing(self) -> list[int] | None:
        """Ranks that leave no mark in the store; None if the store itself is unreachable."""
        found: list[list[int]] = []
        keys = [f"lost/{each}" for each in range(self.world)]

        def look() -> None:
            end = time.monotonic() + SECONDS_TO_REPORT
            with suppress(RuntimeError):
                self._store.set(keys[self.rank], "1")
                while True:
                    missing = [each for each, key in enumerate(keys) if not self._store.check([key])]
                    if not missing or time.monotonic() >= end:
                        found.append(missing)
                        return
                    time.sleep(0.1)

        # In a thread: a request to an unreachable host never returns.
        thread = threading.Thread(target=look, name="missing", daemon=True)
        thread.start()
        thread.join(SECONDS_TO_REPORT + 2)
        return found[0] if found else None


def _end_missing(ranks: list[int]) -> None:
    """Let those of ``ranks`` that torchrun started on this host be killed in ``SECONDS_TO_FOLLOW``."""
    # No other signal reaches a stopped process, and torchrun's agent would wait for it for 30 s.
    import psutil  # type: ignore[import-untyped]

    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    beside = []
    for process in psutil.Process(os.getppid()).children():
        with suppress(psutil.Error):
            if process.environ().get("RANK") in map(str, ranks):
                beside.append(str(process.pid))
    if beside:
        kill = f"sleep {SECONDS_TO_FOLLOW}; kill -9 {' '.join(beside)} 2>/dev/null"
        subprocess.Popen(["sh", "-c", kill], start_new_session=True)  # the agent ends the session of a rank


@contextmanager
def joined(training: TrainingSettings, place: Place | None = None, *, device: str = "auto") -> Iterator[Ranks]:
    """Connect to the other ranks, if torchrun started any, and disconnect at the end; a single process is `ALONE`. Each
    rank takes the GPU of its local rank, unless ``device`` is cpu. Raises UsageError if a host has fewer GPUs than
    ranks, EmailRLError if the ranks do not connect within RANK_START_TIMEOUT. On rank 0 the loss of another rank
    interrupts the block, which then raises LostRank, also at its end."""
    place = place or Place.here()
    if place.world == 1:
        yield ALONE
        return
    import torch.distributed as dist

    with handled_by(signal.SIG_DFL):  # Python would handle a signal only after torch's wait for the others
        ranks = _meet(training, device, place)
    ranks.on_stop = _interrupt
    ranks.rest()
    try:
        yield ranks
    except KeyboardInterrupt:
        ranks.raise_failure()
        raise
    finally:
        ranks.on_stop = lambda: None  # losing a rank now interrupts nothing
        ranks.leave()
        if ranks.lost is None and dist.is_initialized():  # closing vLLM ends it
            with bounded():
                dist.destroy_process_group()
    if ranks.lost is not None:  # in the end, after the last work of all
        raise ranks.lost


def _meet(training: TrainingSettings, device: str, place: Place) -> RankGroup:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    on_gpu, local = device != "cpu" and torch.cuda.is_available(), place.local_world
    if on_gpu:
        if local > (gpus := torch.cuda.device_count()):
            hint = "Lower --nproc, or set EMAILRL_DEVICE=cpu to train on CPUs."
            raise UsageError(f"--nproc {local} needs {local} GPUs, but this host has {gpus}.", hint)
        if local > 1 and device.startswith("cuda:"):
            hint = "Unset it: each rank then takes its own GPU."
            raise UsageError(f"EMAILRL_DEVICE={device} is one GPU, but --nproc {local} needs one per rank.", hint)
        torch.cuda.set_device(place.local_rank)
    start = timedelta(seconds=training.rank_start_timeout)
    try:
        store, rank, world = next(rendezvous("env://", timeout=start))
        # An agent that restarts its ranks may keep their store, so each attempt has a prefix of its own. Agents on
        # different hosts may count differently, so with several hosts each rank counts for itself.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            attempt = store.add(f"attempts/{place.rank}", 1)
        store = PrefixStore(f"attempt/{attempt}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=start
        )
        ranks = RankGroup(place, store, start_seconds=training.rank_start_timeout, seconds=training.rank_timeout)
        if on_gpu:
            # NCCL connects on first use: do it now, not after a rollout.
            ranks.all_reduce(torch.zeros(1, device="cuda"))
    except (RuntimeError, ValueError) as error:
        what = f"Rank {place.rank} of {place.world} failed to meet the others: {first_line(error)}"
        hint = "Check the addresses, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, and RANK_START_TIMEOUT."
        raise EmailRLError(what, hint) from error
    return ranks


def _interrupt() -> None:
    """Interrupt the main thread once it is not importing, which would swallow that."""
    main = threading.main_thread().ident
    assert main is not None
    while is_importing(sys._current_frames().get(main)):
        time.sleep(0.05)
    signal.pthread_kill(main, signal.SIGINT)
