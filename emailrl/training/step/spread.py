"""Distribute a step's samples over the ranks so that each computes about as many tokens.

A prefix that several of a rank's trajectories share counts once. At each update all ranks wait for the slowest, so
every mini-batch is balanced separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emailrl.training.step.prefixes import shared_with_last
from emailrl.training.step.samples import TrainingSample

IntArray = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a step."""

    step: int
    samples: list[TrainingSample]
    paid: dict[str, float]
    """The reward of each of its trajectories, by id."""
    places: list[int]
    """Index of each of its samples in the step's list."""
    mini_batches: list[list[int]]
    """Indices of its samples by mini-batch; a list may be empty."""
    num_trajectories: int
    """Of all ranks."""


def make_shares(
    samples: Sequence[TrainingSample],
    paid: Mapping[str, float],
    mini_batches: Sequence[Sequence[int]],
    num_ranks: int,
    *,
    step: int,
    share_prefixes: bool,
) -> list[Share]:
    """Distribute whole trajectories over the ranks, one share each; a single rank gets the samples unchanged."""
    num_trajectories = len({sample.trajectory_id for sample in samples})
    if num_ranks == 1:
        minis = [list(mini) for mini in mini_batches]
        return [Share(step, list(samples), dict(paid), list(range(len(samples))), minis, num_trajectories)]
    shares = [Share(step, [], {}, [], [], num_trajectories) for _ in range(num_ranks)]
    for mini in mini_batches:
        for share, indices in zip(shares, deal(samples, mini, num_ranks, share_prefixes=share_prefixes), strict=True):
            begin = len(share.samples)
            share.samples.extend(samples[i] for i in indices)
            share.places.extend(indices)
            share.mini_batches.append(list(range(begin, len(share.samples))))
            share.paid.update({samples[i].trajectory_id: paid[samples[i].trajectory_id] for i in indices})
    return shares


def deal(
    samples: Sequence[TrainingSample], chosen: Sequence[int], num_ranks: int, *, share_prefixes: bool
) -> list[list[int]]:
    """Split the samples at ``chosen`` into one index list per rank; trajectories stay whole, groups if it pays off.

    Longest first, each piece goes to the rank with the fewest tokens including it (Graham's LPT rule), once by
    trajectory and once by group. The split with the smaller maximum wins; ties go to the smaller total.
    """
    cost = _Cost([samples[i].token_ids for i in chosen], num_ranks, share_prefixes=share_prefixes)
    ways = []
    for key in ("trajectory_id", "group_id"):
        pieces: dict[str, list[int]] = {}
        for row, i in enumerate(chosen):
            pieces.setdefault(getattr(samples[i], key), []).append(row)
        loads, parts = _longest_first(list(pieces.values()), cost, num_ranks)
        ways.append((max(loads), sum(loads), [[chosen[row] for row in sorted(rows)] for rows in parts]))
    return min(ways, key=lambda way: way[:2])[2]


class _Cost:
    """Tokens that rows add to those of each rank.

    Rows are kept in token order. Those with more in common than all rows have are neighbors there, so that only they
    are compared: a step may have thousands.
    """

    def __init__(self, rows: Sequence[Sequence[int]], num_ranks: int, *, share_prefixes: bool) -> None:
        self.num_ranks, self.nobody, self.piece = num_ranks, num_ranks, num_ranks + 1
        """Owners of a row: a rank, nobody, or the piece that is being added."""
        self._lengths = [len(row) for row in rows]
        order = list(range(len(rows)))
        shared = [0] * (len(rows) + 1)
        if share_prefixes:
            order.sort(key=lambda row: (rows[row], row))
            shared[:-1] = shared_with_last([rows[row] for row in order])
        self.place = {row: place for place, row in enumerate(order)}
        self._shared = np.array(shared)
        self._least = int(min(shared[1:-1], default=0))
        self._begins = np.flatnonzero(self._shared <= self._least)

    def owners(self) -> IntArray:
        """The owner of each place, so far nobody."""
        return np.full(len(self._lengths), self.nobody)

    def added(self, piece: Sequence[int], owners: IntArray, loads: IntArray) -> IntArray:
        """Tokens that the rows of ``piece`` add to each rank ``(ranks,)``, with its current owners and loads."""
        owners = owners if len(piece) == 1 else owners.copy()
        tokens = np.zeros(self.num_ranks, dtype=np.int64)
        common = np.zeros(self.num_ranks + 2, dtype=np.int64)
        for number, row in enumerate(piece):
            common[: self.num_ranks] = np.where(loads > 0, self._least, 0)
            common[self.piece] = self._least if number else 0
            near, prefixes = self._neighbors(self.place[row])
            np.maximum.at(common, owners[near], prefixes)
            tokens += self._lengths[row] - np.maximum(common[: self.num_ranks], common[self.piece])
            if len(piece) > 1:
                owners[self.place[row]] = self.piece
        return tokens

    def _neighbors(self, place: int) -> tuple[slice, IntArray]:
        """Places with more in common with this one than all have, and the length of each common prefix."""
        after = int(np.searchsorted(self._begins, place, side="right"))
        begin, end = int(self._begins[after - 1]), int(self._begins[after])
        left = np.minimum.accumulate(self._shared[begin + 1 : place + 1][::-1])[::-1]
        right = np.minimum.accumulate(self._shared[place + 1 : end])
        return slice(begin, end), np.concatenate([left, [0], right])


def _longest_first(pieces: list[list[int]], cost: _Cost, num_ranks: int) -> tuple[list[int], list[list[int]]]:
    """Tokens and rows of each rank."""
    loads, owners = np.zeros(num_ranks, dtype=np.int64), cost.owners()
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    alone = {id(piece): int(cost.added(piece, owners, loads)[0]) for piece in pieces}
    for piece in sorted(pieces, key=lambda piece: -alone[id(piece)]):
        grown = loads + cost.added(piece, owners, loads)
        fewest = int(grown.argmin())
        loads[fewest] = grown[fewest]
        parts[fewest] += piece
        owners[[cost.place[row] for row in piece]] = fewest
    return loads.tolist(), parts
