"""What the ranks that train one policy exchange during a step."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from emailrl.model.lora import checksum
from emailrl.model.policy import enough_memory
from emailrl.ranks import ALONE, Ranks

T = TypeVar("T")


class Across:
    """The exchanges of a step; every rank makes the same ones in the same order. A single process gets its own back."""

    def __init__(self, ranks: Ranks = ALONE, *, sharded: bool = False) -> None:
        """``sharded``: every forward pass involves all ranks, so those that wait for a rank's part end when it does."""
        self.rank, self.world = ranks.rank, ranks.world
        self._ranks, self._sharded = ranks, sharded

    @property
    def seconds(self) -> float:
        """Time spent in ``gradients`` so far."""
        return self._ranks.seconds

    @contextmanager
    def shared(self, shares: Sequence[T]) -> Iterator[T]:
        """On rank 0: call the waiting ranks to work, each on its share, and yield rank 0's own."""
        with self._ranks.at_work():
            yield self._ranks.scatter(shares)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, which must not be on a GPU."""
        return self._ranks.gather(value)

    def agree(self, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank; return its result here. An error on one rank is raised on all, but with a sharded
        base, where the others wait in the middle of theirs."""
        return work() if self._sharded else self._ranks.agree(work)

    def gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients over the ranks, as one flat float32 tensor; one that only some have is 0 on others."""
        if self.world == 1:
            return
        every = zip(*self.gather([parameter.grad is not None for parameter in parameters]), strict=True)
        parameters = [parameter for parameter, has in zip(parameters, every, strict=True) if any(has)]
        if not parameters:
            return

        @enough_memory("summing gradients")
        def flatten() -> Tensor:
            grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
            return torch.cat([grad.flatten().float() for grad in grads])

        flat = self.agree(flatten)
        self._ranks.all_reduce(flat)
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def synchronize(
        self, parameters: Sequence[nn.Parameter], state: Callable[[], Any], load: Callable[[Any], None]
    ) -> None:
        """Copy rank 0's parameters and its ``state`` to all ranks; EmailRLError if a parameter differs afterwards."""
        if self.world == 1:
            return
        mine = io.BytesIO()
        if self.rank == 0:
            torch.save({"weights": [parameter.detach() for parameter in parameters], "state": state()}, mine)
        saved = io.BytesIO(self._ranks.broadcast(mine.getvalue()))

        def take() -> None:
            theirs = torch.load(saved, map_location="cpu", weights_only=True)
            load(theirs["state"])
            with torch.no_grad():  # not through ``data``: fused layers notice changes by a tensor's version
                for parameter, value in zip(parameters, theirs["weights"], strict=True):
                    parameter.copy_(value)

        self._ranks.agree(take)
        self._ranks.check_same("The adapter", checksum(parameters))
