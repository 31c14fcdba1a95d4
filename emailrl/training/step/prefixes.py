"""Which samples begin alike, and how to split them so that what they share is computed as few times as can be.

Sorted by their tokens, samples stand as in a walk through the tree of their prefixes (a trie): whatever a sample shares
with any before it, it shares with the last. So a batch of neighbors has the tokens of each, less what it shares with
the one before. Members of a group share their prompt, and go on sharing for as long as they act alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Row = Sequence[int]
"""Token ids."""
Way = tuple[tuple[int, int, int], int]
"""A way to cut the first so many rows: its batches, tokens and sum of squares, and where its last batch starts."""


def shared_with_last(rows: Sequence[Row]) -> list[int]:
    """How many first tokens each row has in common with the one before it; 0 for the first."""
    return [_common(last, row) for last, row in zip(([], *rows), rows, strict=False)]


def split_by_prefix(rows: Sequence[Row], max_tokens: int, max_rows: int) -> list[list[int]]:
    """Cut ``rows``, in the order of their tokens, into batches of at most ``max_tokens``, shared ones counted once.

    Of all ways to cut, one with the fewest batches; of these, one with the fewest tokens; of these, the evenest. A row
    longer than ``max_tokens`` stands alone. Returns the rows' indices.
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
