"""The ranks interface: a process's rank, what it is working on, and the collectives of a single process."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeVar

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Place:
    """A process's rank: ranks are counted over all hosts, local ranks per host."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read this process's place from the environment; UsageError for values that torchrun does not set."""
        names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        given = {name: environ.get(name, default) for name, default in names.items()}
        wrong = [f"{name}={text}, not a number" for name, text in given.items() if not re.fullmatch("[0-9]+", text)]
        place = cls(*map(int, given.values())) if not wrong else cls()
        if place.rank >= place.world:
            unset = "" if "WORLD_SIZE" in environ else " (not set)"
            wrong.append(f"RANK={place.rank}, but WORLD_SIZE={place.world}{unset}")
        elif place.world > 1 and "RANK" not in environ:
            wrong.append(f"WORLD_SIZE={place.world}, but no RANK")
        if wrong:
            hint = "torchrun sets these variables; unset them to train without it."
            raise UsageError(f"The environment has {wrong[0]}.", hint)
        return place


CONTINUE: Final = "If a checkpoint was saved, continue from it with --resume latest."
"""What to do about a rank that is lost."""


class Failure(EmailRLError):
    def __init__(self, message: str, hint: str = "", seconds: float = math.inf) -> None:
        """``seconds``: without progress; infinite for an error, which takes precedence."""
        super().__init__(message, hint)
        self.seconds = seconds


class Activity:
    """What a thread is working on, as noted by itself; other threads check whether it makes progress."""

    def __init__(self) -> None:
        self._what: str | None = None

    def note(self, what: str, count: Callable[[], int] = lambda: 0) -> None:
        """There is progress; ``what`` comes next, as part of a sentence. While ``count`` grows, there is more."""
        self._since = time.monotonic()  # first: another thread may read in between
        self._count, self._last, self._what = count, count(), what

    def end(self) -> None:
        self._what = None

    @property
    def is_under_way(self) -> bool:
        return self._what is not None

    def stalled(self, who: str, limit: float) -> Failure | None:
        """The failure of ``who`` if there has been no progress for more than ``limit`` seconds. For one thread only."""
        if (what := self._what) is None:
            return None
        if (now := self._count()) != self._last:
            self._last, self._since = now, time.monotonic()
        if (seconds := time.monotonic() - self._since) <= limit:
            return None
        more = f"If that may take longer, raise RANK_TIMEOUT. {CONTINUE}"
        return Failure(f"{who} made no progress for {limit:g} s: {what}.", more, seconds)


def said(error: Exception) -> tuple[str, str]:
    """How the other ranks report an error: message and hint."""
    if isinstance(error, EmailRLError):
        return error.message, error.hint
    name, text = type(error).__name__, first_line(error)
    return (text if text == name else f"{name}: {text}"), ""


T = TypeVar("T")


class Ranks:
    """A single process: every method returns its argument and costs nothing."""

    rank = 0
    world = 1
    local_rank = 0
    seconds = 0.0  # Time spent in `all_reduce` so far.
    activity = Activity()
    """What rank 0 does while the others wait; several ranks end if it makes no progress for RANK_TIMEOUT seconds."""
    lost: EmailRLError | None = None  # Set once another rank has ended or stopped responding.

    @property
    def is_first(self) -> bool:
        """Whether this rank samples and records."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world == 1

    def stop_with(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` from another thread: on rank 0 when a rank is lost between updates or was asked to stop; on
        other ranks when the run ends while they work on their own."""

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

    def collect(self, value: T) -> list[T]:
        """The values of all ranks in rank order on rank 0; an empty list on the others."""
        return [value]

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` with its sum over the ranks, bitwise equal on all of them."""

    def agree(self, work: Callable[[], T]) -> T:
        """Do ``work``, which must not use collectives; if it raises on one rank, every rank raises EmailRLError."""
        return work()

    def apart(self, work: Callable[[Activity], T]) -> T:
        """Do ``work``, which must not use collectives and may take any time; return once every rank is done. It notes
        its progress in the ``Activity``. If it raises on one rank, or one makes no progress for RANK_TIMEOUT seconds,
        all ranks end at once: rank 0 raises EmailRLError, the others are interrupted."""
        return work(Activity())

    def check_same(self, what: str, value: str) -> None:
        """Raise EmailRLError unless ``value`` is equal on all ranks; ``what`` names it."""
        first = self.broadcast(value)

        def compare() -> None:
            if value != first:
                hint = "All ranks need the same emailrl, torch and model files."
                raise EmailRLError(f"{what} differs from rank 0's.", hint)

        self.agree(compare)

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
