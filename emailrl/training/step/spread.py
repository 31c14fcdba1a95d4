"""Distribute a step's samples over the ranks so that each computes about as many tokens.

A prefix that several of a rank's trajectories share counts once. At each update all ranks wait for the slowest, so
every mini-batch is balanced separately.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from emailrl.training.step.prefixes import shared_with_last
from emailrl.training.step.samples import TrainingSample


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
    cost = _Cost([samples[i].token_ids for i in chosen], share_prefixes=share_prefixes)
    ways = []
    for key in ("trajectory_id", "group_id"):
        pieces: dict[str, list[int]] = {}
        for row, i in enumerate(chosen):
            pieces.setdefault(getattr(samples[i], key), []).append(row)
        ranks = _longest_first(list(pieces.values()), cost, num_ranks)
        loads = [rank.tokens for rank in ranks]
        ways.append((max(loads), sum(loads), [[chosen[row] for row in sorted(rank.rows)] for rank in ranks]))
    return min(ways, key=lambda way: way[:2])[2]


@dataclass(slots=True)
class _Rank:
    rows: list[int] = field(default_factory=list)
    ordered: list[int] = field(default_factory=list)
    """Positions of its rows in token order."""
    tokens: int = 0


class _Cost:
    """Tokens that rows add to those a rank already has."""

    def __init__(self, rows: Sequence[Sequence[int]], *, share_prefixes: bool) -> None:
        self.lengths = [len(row) for row in rows]
        self._share_prefixes = share_prefixes
        if share_prefixes:
            order = sorted(range(len(rows)), key=lambda row: (rows[row], row))
            self._place = {row: place for place, row in enumerate(order)}
            self._shared = shared_with_last([rows[row] for row in order])

    def add(self, piece: Sequence[int], rank: _Rank) -> _Rank:
        """The rank with these rows added."""
        ordered, tokens = list(rank.ordered), rank.tokens
        for row in piece:
            tokens += self.lengths[row]
            if self._share_prefixes:
                place = self._place[row]
                at = bisect(ordered, place)
                # In token order, the row with the longest common prefix is a neighbor.
                before = self._common(ordered[at - 1], place) if at else 0
                after = self._common(place, ordered[at]) if at < len(ordered) else 0
                tokens -= max(before, after)
                ordered.insert(at, place)
        return _Rank([*rank.rows, *piece], ordered, tokens)

    def _common(self, first: int, second: int) -> int:
        """Length of the common prefix of the rows at two positions."""
        return min(self._shared[first + 1 : second + 1])


def _longest_first(pieces: list[list[int]], cost: _Cost, num_ranks: int) -> list[_Rank]:
    ranks = [_Rank() for _ in range(num_ranks)]
    alone = {id(piece): cost.add(piece, _Rank()).tokens for piece in pieces}
    for piece in sorted(pieces, key=lambda piece: -alone[id(piece)]):
        grown = [cost.add(piece, rank) for rank in ranks]
        fewest = min(range(num_ranks), key=lambda n: grown[n].tokens)
        ranks[fewest] = grown[fewest]
    return ranks
