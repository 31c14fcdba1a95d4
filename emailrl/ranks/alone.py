"""The ranks interface for a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

from emailrl.base.errors import EmailRLError
from emailrl.ranks.activity import Activity

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Ranks:
    """A single process: every method returns its argument and costs nothing."""

    rank = 0
    world = 1
    local_rank = 0
    seconds = 0.0
    """Time spent in ``all_reduce`` so far."""
    activity = Activity()
    """What rank 0 does while the others wait; several ranks end if it makes no progress for RANK_TIMEOUT seconds."""
    lost: EmailRLError | None = None
    """Set once another rank has ended or stopped responding."""
    on_stop: Callable[[], None]
    """Called from another thread: on rank 0 when a rank is lost between updates or was asked to stop; on other ranks
    when the run ends while they work on their own."""

    @property
    def is_first(self) -> bool:
        """Whether this rank samples and records."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return self.world == 1

    def started(self) -> None:
        """The model is loaded everywhere: RANK_TIMEOUT applies from now on."""

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        return value

    def scatter(self, parts: Sequence[T] | None) -> T:
        """This rank's item of rank 0's list, which has one per rank."""
        assert parts is not None
        (part,) = parts
        return part

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in rank order, on every rank. Values are pickled: keep tensors on the CPU."""
        return [value]

    def exchange(self, value: T, failed: Exception | None = None) -> list[T]:
        """Like ``gather``, but if an error is given on one rank, every rank raises EmailRLError."""
        if failed is not None:
            raise failed
        return [value]

    def collect(self, value: T) -> list[T]:
        """The values of all ranks in rank order on rank 0; an empty list on the others."""
        return [value]

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` with its sum over the ranks, bitwise equal on all of them."""

    def agree(self, work: Callable[[], T]) -> T:
        """Do ``work``, which must not use collectives; if it raises on one rank, every rank raises EmailRLError."""
        return work()

    def apart(self, work: Callable[[Activity], T]) -> T:
        """Do ``work``, which must not use collectives and may take any time; return once every rank is done.

        It notes its progress in the ``Activity``. If it raises on one rank, or one makes no progress for RANK_TIMEOUT
        seconds, all ranks end at once: rank 0 raises EmailRLError, the others are interrupted.
        """
        return work(Activity())

    def check_same(self, what: str, value: str) -> None:
        """Raise EmailRLError unless ``value`` is equal on all ranks; ``what`` names it."""

    def host_mesh(self) -> DeviceMesh | None:
        """This host's ranks, over which a base may be sharded; None if it has only one, or hosts differ in number."""
        return None

    def leave(self) -> None:
        """Rank 0 releases the others, if they still listen; they must not be called again."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """On rank 0: call the waiting ranks to work; theirs has the same collectives as the block."""
        yield

    @contextmanager
    def accompanied(self) -> Iterator[None]:
        """Run the block's one forward pass of a sharded base on the other ranks too."""
        with self.at_work():
            self.scatter([None] * self.world)
            yield


ALONE: Final = Ranks()
