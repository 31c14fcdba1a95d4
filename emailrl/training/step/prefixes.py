"""Find common prefixes of samples, and split the samples so that shared tokens are computed as rarely as possible.

Sorted by tokens, samples are in the order of a walk through their prefix tree (a trie): whatever a sample shares with
any earlier one, it shares with the previous one. A batch of neighbors therefore costs each sample's tokens minus those
shared with its predecessor. Members of a group share their prompt, and more while they act the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Row = Sequence[int]
"""Token ids."""
Way = tuple[tuple[int, int, int], int]
"""A way to split the first n rows: its batches, tokens and sum of squares, and where its last batch starts."""


def shared_with_last(rows: Sequence[Row]) -> list[int]:
    """Number of leading tokens each row shares with the previous one; 0 for the first."""
    return [_common(last, row) for last, row in zip(([], *rows), rows, strict=False)]


def split_by_prefix(rows: Sequence[Row], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Split ``rows``, sorted by tokens, into batches of at most ``max_tokens``, shared tokens counted once.

    Minimizes the number of batches, then the tokens, then the imbalance. A row longer than ``max_tokens`` gets its own
    batch. Returns the rows' indices.
    """
    order = sorted(range(len(rows)), key=lambda i: (rows[i], i))
    ordered = [rows[i] for i in order]
    lengths = [len(row) for row in ordered]
    own = [length - shared for length, shared in zip(lengths, shared_with_last(ordered), strict=True)]
    before = list(accumulate(own, initial=0))
    best: list[Way] = [((0, 0, 0), 0)]
    for end in range(1, len(rows) + 1):
        ways: list[Way] = []
        for start in reversed(range(max(end - max_rows, 0), end)):
            tokens = lengths[start] + before[end] - before[start + 1]
            if tokens > max_tokens and ways:
                break
            batches, total, squares = best[start][0]
            ways.append(((batches + 1, total + tokens, squares + tokens**2), start))
        best.append(min(ways))
    cuts = [len(rows)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [order[start:end] for start, end in pairwise(cuts[::-1])]


def _common(first: Row, second: Row) -> int:
    """Length of the longest prefix of both."""
    differ = (n for n, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differ, min(len(first), len(second)))
