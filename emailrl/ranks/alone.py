"""The interface of ranks, as one process alone fulfils it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from emailrl.errors import EmailRLError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Ranks:
    """One process alone: every method returns what it is given and costs nothing."""

    rank = 0
    world = 1
    local_rank = 0
    seconds = 0.0
    """What ``sum`` has taken so far."""
    lost: EmailRLError | None = None
    """Set once another rank is gone, or does not answer."""
    on_stop: Callable[[], None]
    """Called from another thread: on rank 0 when a rank is lost between updates or was asked to stop; on another rank
    when the run ends while it works apart."""

    @property
    def is_first(self) -> bool:
        """Whether this rank plays and records."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.world == 1

    def started(self) -> None:
        """The model is loaded everywhere: from now on RANK_TIMEOUT holds."""

    def broadcast(self, value: T) -> T:
        """The value that rank 0 gives."""
        return value

    def scatter(self, parts: Sequence[T] | None) -> T:
        """This rank's part of those that rank 0 gives, one for each rank."""
        assert parts is not None
        (part,) = parts
        return part

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in their order, on every rank. Values are pickled: tensors belong on the CPU."""
        return [value]

    def collect(self, value: T) -> list[T]:
        """The values of all ranks in their order on rank 0; an empty list on the others."""
        return [value]

    def sum(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over the ranks, which is bitwise equal on all of them."""

    def agree(self, work: Callable[[], T]) -> T:
        """Do ``work``, which calls no other rank; where it raises on one rank, every rank raises EmailRLError."""
        return work()

    def apart(self, work: Callable[[], T]) -> T:
        """Do ``work``, which calls no other rank and may take any time; go on once every rank has done its own.

        An error of rank 0 interrupts the others; one of theirs is raised by all in the end, as by ``agree``.
        """
        return work()

    def check_same(self, what: str, value: str) -> None:
        """Raise EmailRLError unless ``value`` is equal on all ranks; ``what`` names it."""

    def host_mesh(self) -> DeviceMesh | None:
        """The ranks of this host, over which a base may be sharded; None where they are one, or not as many on each."""
        return None

    def leave(self) -> None:
        """Rank 0 lets the others go, if they still listen; nothing is to be asked of them any more."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Rank 0 calls the others, which wait, to the work whose collectives are those of the block."""
        yield


ALONE: Final = Ranks()
