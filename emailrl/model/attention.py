"""Causal attention in a packed row: segments of queries with their own keys, and shared keys of other segments.

Forward and backward; on a GPU, in half precision, with the FlashAttention kernels that PyTorch ships; elsewhere with
SDPA segment by segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The K keys of all segments in order, if some of them are tokens of another segment in the row."""

    index: Tensor
    """Token of the row for each key, ``(K,)``."""
    own: Tensor
    """Key in its own segment for each token of the row, ``(P,)``."""
    borrowed: Tensor
    """The other keys, ``(C,)``."""
    lent: Tensor
    """Distinct tokens of the row that are borrowed, ``(U,)``."""
    lender: Tensor
    """Index into ``lent`` for each of ``borrowed``, ``(C,)``."""

    @classmethod
    def of(cls, index: Tensor, is_own: Tensor) -> SharedKeys:
        """Build from each key's token and whether it belongs to its own segment; own keys are in the row's order."""
        own, borrowed = is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]
        lent, lender = index[borrowed].unique(return_inverse=True)
        return cls(index, own, borrowed, lent, lender)

    def spread(self, states: Tensor) -> Tensor:
        """Expand keys or values of the row, ``(P, ...)``, to those of the segments, ``(K, ...)``."""
        return states[self.index]

    def gathered(self, grad: Tensor) -> Tensor:
        """Gradient of ``spread``: the sum for each token over all segments that use it as a key."""
        total = grad[self.own]
        # A prompt may have hundreds of borrowers: their sum would stand still in half precision.
        wide = torch.promote_types(grad.dtype, torch.float32)
        through_others = grad.new_zeros((len(self.lent), *grad.shape[1:]), dtype=wide)
        through_others.index_add_(0, self.lender, grad[self.borrowed].to(wide))
        return total.index_add_(0, self.lent, through_others.to(grad.dtype))


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of a row; the last query of a segment sees all of its keys, each earlier query one key less."""

    query_bounds: tuple[int, ...]
    """Queries of segment i: ``query_bounds[i]:query_bounds[i + 1]`` of the row; n + 1 numbers, on the host."""
    key_bounds: tuple[int, ...]
    """The same for its keys, at least as many as queries."""
    cu_queries: Tensor
    """``query_bounds``, ``(n + 1,)`` int32, on the model's device."""
    cu_keys: Tensor
    keys: SharedKeys | None
    """None if the keys of every segment are its own tokens, in the row's order."""

    @classmethod
    def of(cls, num_queries: Sequence[int], num_keys: Sequence[int], index: Tensor, is_own: Tensor) -> Segments:
        """Build from each segment's numbers of queries and keys, with the tensors of ``SharedKeys.of``."""
        queries, keys = (tuple(accumulate(lengths, initial=0)) for lengths in (num_queries, num_keys))
        cu_queries, cu_keys = (torch.tensor(one, dtype=torch.int32, device=index.device) for one in (queries, keys))
        return cls(queries, keys, cu_queries, cu_keys, None if queries == keys else SharedKeys.of(index, is_own))

    @property
    def most_queries(self) -> int:
        """Maximum number of queries in a segment."""
        return max(end - start for start, end in pairwise(self.query_bounds))

    @property
    def most_keys(self) -> int:
        """Maximum number of keys in a segment."""
        return max(end - start for start, end in pairwise(self.key_bounds))

    def parts(self) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield each segment's queries, keys, and mask ``(queries, keys)``, None for plain causal attention."""
        for queries, keys in zip(pairwise(self.query_bounds), pairwise(self.key_bounds), strict=True):
            rows, columns = queries[1] - queries[0], keys[1] - keys[0]
            mask = None
            if rows < columns:
                visible = torch.ones(rows, columns, dtype=torch.bool, device=self.cu_queries.device)
                mask = visible.tril(columns - rows)
            yield slice(*queries), slice(*keys), mask


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention within segments: ``query`` ``(P, heads, D)``, ``key`` and ``value`` ``(P, kv_heads, D)``.

    Returns the output ``(P, heads, D)`` and what ``varlen_backward`` needs: log-sum-exp and two states of the kernel.
    """
    if segments.keys is not None:
        key, value = segments.keys.spread(key), segments.keys.spread(value)
    if not uses_flash(query):
        out = _by_segment(query, key, value, segments, scale)
        nothing = out.new_empty(0)
        return out, nothing, nothing, nothing
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, segments.cu_queries, segments.cu_keys, segments.most_queries, segments.most_keys,
        0.0, True, False, scale=scale,
    )  # fmt: skip
    return out, lse, rng_state, unused


def varlen_backward(
    grad: Tensor, saved: tuple[Tensor, ...], segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``saved``: query, key, value and the four results of ``varlen_forward``."""
    query, key, value, out, lse, rng_state, unused = saved
    if segments.keys is not None:
        key, value = segments.keys.spread(key), segments.keys.spread(value)
    if uses_flash(query):
        by_query, by_key, by_value = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, segments.cu_queries, segments.cu_keys, segments.most_queries,
            segments.most_keys, 0.0, True, rng_state, unused, scale=scale,
        )  # fmt: skip
    else:
        leaves = [one.detach().requires_grad_() for one in (query, key, value)]
        with torch.enable_grad():
            again = _by_segment(leaves[0], leaves[1], leaves[2], segments, scale)
        by_query, by_key, by_value = torch.autograd.grad(again, leaves, grad)
    if segments.keys is not None:
        by_key, by_value = segments.keys.gathered(by_key), segments.keys.gathered(by_value)
    return by_query, by_key, by_value


def uses_flash(query: Tensor) -> bool:
    """Whether FlashAttention takes ``query``."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _by_segment(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    parts = []
    for queries, keys, mask in segments.parts():
        heads = [one.transpose(0, 1)[None] for one in (query[queries], key[keys], value[keys])]
        attended = nn.functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        results = varlen_forward(query, key, value, segments, scale)
        ctx.save_for_backward(query, key, value, *results)
        ctx.segments, ctx.scale = segments, scale
        return results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = varlen_backward(grads[0].contiguous(), tuple(ctx.saved_tensors), ctx.segments, ctx.scale)
        return *gradients, None, None


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """``varlen_forward``'s output, differentiable."""
    out: Tensor = _Varlen.apply(query, key, value, segments, scale)
    return out
