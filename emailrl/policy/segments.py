"""What attends to what in a packed row: segments of queries, each with keys of its own, and of others where shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The K keys of all segments, one segment behind the other, where some stand in the row as another's tokens."""

    index: Tensor
    """Which token of the row each key is, ``(K,)``."""
    own: Tensor
    """Which key each token of the row is in its own segment, ``(P,)``."""
    borrowed: Tensor
    """The other keys, ``(C,)``."""
    lent: Tensor
    """The tokens of the row that these are, each once, ``(U,)``."""
    lender: Tensor
    """Which of ``lent`` each of ``borrowed`` is, ``(C,)``."""

    @classmethod
    def of(cls, index: Tensor, is_own: Tensor) -> SharedKeys:
        """From the token that each key is, and whether it is its own segment's; these stand in the row's order."""
        own, borrowed = is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]
        lent, lender = index[borrowed].unique(return_inverse=True)
        return cls(index, own, borrowed, lent, lender)

    def spread(self, states: Tensor) -> Tensor:
        """Keys or values ``(P, ...)`` of the row to those of the segments, ``(K, ...)``."""
        return states[self.index]

    def gathered(self, grad: Tensor) -> Tensor:
        """Gradient of ``spread``: what reaches a token through all segments whose key it is."""
        total = grad[self.own]
        # A prompt may have hundreds of borrowers: their sum would stand still in half precision.
        wide = torch.promote_types(grad.dtype, torch.float32)
        through_others = grad.new_zeros((len(self.lent), *grad.shape[1:]), dtype=wide)
        through_others.index_add_(0, self.lender, grad[self.borrowed].to(wide))
        return total.index_add_(0, self.lent, through_others.to(grad.dtype))


@dataclass(frozen=True, slots=True)
class Segments:
    """Segment i's queries see its keys and no others: the last query all of them, each query before it one less."""

    query_bounds: tuple[int, ...]
    """Segment i's queries are ``query_bounds[i]:query_bounds[i + 1]`` of the row; n + 1 numbers, on the host."""
    key_bounds: tuple[int, ...]
    """The same of its keys; as many as queries, or more."""
    cu_queries: Tensor
    """``query_bounds``, ``(n + 1,)`` int32, on the model's device."""
    cu_keys: Tensor
    keys: SharedKeys | None
    """None where the keys of every segment are its own tokens, in the row's order."""

    @classmethod
    def of(cls, num_queries: Sequence[int], num_keys: Sequence[int], index: Tensor, is_own: Tensor) -> Segments:
        """From each segment's number of queries and of keys; the tensors as ``SharedKeys.of`` takes them."""
        queries, keys = (tuple(accumulate(lengths, initial=0)) for lengths in (num_queries, num_keys))
        cu_queries, cu_keys = (torch.tensor(one, dtype=torch.int32, device=index.device) for one in (queries, keys))
        return cls(queries, keys, cu_queries, cu_keys, None if queries == keys else SharedKeys.of(index, is_own))

    @property
    def most_queries(self) -> int:
        """Queries of the segment that has most."""
        return max(end - start for start, end in pairwise(self.query_bounds))

    @property
    def most_keys(self) -> int:
        """Keys of the segment that has most."""
        return max(end - start for start, end in pairwise(self.key_bounds))

    def parts(self) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Each segment's queries, keys, and mask ``(queries, keys)``; None where plain causal attention says it."""
        for queries, keys in zip(pairwise(self.query_bounds), pairwise(self.key_bounds), strict=True):
            rows, columns = queries[1] - queries[0], keys[1] - keys[0]
            mask = None
            if rows < columns:
                visible = torch.ones(rows, columns, dtype=torch.bool, device=self.cu_queries.device)
                mask = visible.tril(columns - rows)
            yield slice(*queries), slice(*keys), mask
