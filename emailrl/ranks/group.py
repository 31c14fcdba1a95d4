"""Several processes under torch.distributed: objects travel over gloo, gradients over NCCL where they are on a GPU.

Every wait has a limit. A rank that is gone or hangs raises LostRank on all others, which says which one is missing:
each writes a mark into the store and looks whose mark does not come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from emailrl.errors import EmailRLError
from emailrl.ranks.alone import Ranks, T
from emailrl.ranks.place import Place
from emailrl.ranks.pulse import Call, Caller, Listener

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

SECONDS_TO_REPORT: Final = 3.0
"""How long a rank that has lost another waits for the marks of the rest."""


class LostRank(EmailRLError):
    """Another rank is gone, or does not answer."""


class RankGroup(Ranks):
    """This process among ``place.world``; see `joined`, which makes it."""

    def __init__(self, place: Place, store: Any, *, start_seconds: float, seconds: float) -> None:
        """``start_seconds`` bounds every wait until ``started``, ``seconds`` every later one."""
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
        self._listener = None if self.is_first else Listener(pulses)
        self.lost: LostRank | None = None
        self.on_stop = lambda: None
        self._working = False
        self._agreed: Exception | None = None
        """The last error that all ranks raised."""
        self._wait_seconds = start_seconds

    # -- rank 0 calls, the others wait

    def rest(self) -> None:
        """Rank 0 goes on alone; from now on it tells the others every few seconds that it is alive."""
        if self._caller is not None:
            self._caller.begin(lambda: self.on_stop())

    def started(self) -> None:
        """See ``Ranks.started``."""
        self._group, self._wait_seconds = self._running, self._limit

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """See ``Ranks.at_work``. After an error that all ranks raise, the others wait again."""
        assert self._caller is not None
        self._caller.call(Call.WORK)
        self._raise_lost()
        self._working = True
        try:
            yield
        except EmailRLError as error:
            self._working = error is not self._agreed
            raise
        else:
            self._working = False
        finally:
            if not self._working:
                self.rest()

    def follow(self, work: Callable[[], object]) -> None:
        """Do ``work`` whenever rank 0 calls to it, until it ends; an error that all ranks raise is rank 0's to tell."""
        while self._hear() is Call.WORK:
            try:
                work()
            except EmailRLError as error:
                if error is not self._agreed:
                    raise

    def _hear(self) -> Call:
        assert self._listener is not None
        with self._guarded():
            return self._listener.listen()

    def stop(self) -> None:
        """This rank, not the first, was asked to stop: rank 0 hears of it with the next pulse. Safe in a handler."""
        assert self._listener is not None
        self._listener.stopping = True

    def leave(self) -> None:
        """Let the others go, where they still listen."""
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

    def sum(self, tensor: Tensor) -> None:
        """See ``Ranks.sum``."""
        import torch.distributed as dist

        begun = time.perf_counter()
        with self._guarded():
            dist.all_reduce(tensor, group=self._group)
            if tensor.is_cuda:
                import torch

                torch.cuda.synchronize(tensor.device)
        self.seconds += time.perf_counter() - begun

    def agree(self, work: Callable[[], T]) -> T:
        """See ``Ranks.agree``. The rank that raised keeps its own error."""
        failed: Exception | None = None
        try:
            result = work()
        except LostRank:
            raise
        except Exception as error:
            failed = error
        said = self.gather(None if failed is None else _said(failed))
        for rank, words in enumerate(said):
            if words is not None:
                message, hint = words
                self._agreed = failed or EmailRLError(f"Rank {rank}: {message}", hint)
                raise self._agreed
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

    # -- ranks that are gone

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn torch's errors of a connection that broke or timed out into LostRank."""
        try:
            yield
        except RuntimeError as error:
            self._lose(error)
            self._raise_lost(error)

    def _raise_lost(self, cause: Exception | None = None) -> None:
        if self.lost is not None:
            raise self.lost from cause

    def _lose(self, error: Exception) -> None:
        if self.lost is not None:
            return
        missing = self._missing()
        if missing is None:
            message = f"Rank {self.rank} of {self.world} lost the connection to the host of rank 0."
        elif missing:
            ranks = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {self.world}"
            message = f"{ranks} ended or did not answer within {self._wait_seconds:g} s."
        else:
            message = f"Rank {self.rank} of {self.world} lost the connection to another rank ({_first_line(error)})."
        self.lost = LostRank(message, "Continue from the last checkpoint with --resume latest.")

    def _missing(self) -> list[int] | None:
        """Ranks that leave no mark in the store; None where the store itself is out of reach.

        On a thread: a request to a host that the network has lost never returns.
        """
        found: list[list[int]] = []
        keys = [f"lost/{rank}" for rank in range(self.world)]

        def look() -> None:
            end = time.monotonic() + SECONDS_TO_REPORT
            with suppress(RuntimeError):
                self._store.set(keys[self.rank], "1")
                while True:
                    missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    if not missing or time.monotonic() >= end:
                        found.append(missing)
                        return
                    time.sleep(0.1)

        thread = threading.Thread(target=look, name="missing", daemon=True)
        thread.start()
        thread.join(SECONDS_TO_REPORT + 2)
        return found[0] if found else None


def _said(error: Exception) -> tuple[str, str]:
    """What the other ranks say of an error."""
    if isinstance(error, EmailRLError):
        return error.message, error.hint
    return f"{type(error).__name__}: {_first_line(error)}", ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
