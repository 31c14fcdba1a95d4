"""Causal attention of segments of different lengths in one row, forward and backward.

On a GPU, in half precision, the FlashAttention kernels that PyTorch ships; elsewhere SDPA segment by segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Segments:
    """What attends to what in a packed row of ``P`` tokens: n segments, the queries of one seeing its keys alone.

    A segment has at least as many keys as queries. Its last query sees all of them, each query before it one less.
    """

    query_bounds: tuple[int, ...]
    """Segment i's queries are ``query_bounds[i]:query_bounds[i + 1]`` of the row; n + 1 numbers, on the host."""
    key_bounds: tuple[int, ...]
    """The same of its keys, in the order of ``key_index``."""
    cu_queries: Tensor
    """``query_bounds``, ``(n + 1,)`` int32, on the model's device."""
    cu_keys: Tensor
    key_index: Tensor | None
    """Where in the row each key stands, ``(K,)``; None where the keys of every segment are its own tokens."""

    @classmethod
    def of(cls, num_queries: Sequence[int], num_keys: Sequence[int], key_index: Tensor) -> Segments:
        """Of each segment's number of queries and of keys; ``key_index`` is left out where it says nothing."""
        queries, keys = (tuple(accumulate(lengths, initial=0)) for lengths in (num_queries, num_keys))
        cu_queries, cu_keys = (torch.tensor(one, dtype=torch.int32, device=key_index.device) for one in (queries, keys))
        return cls(queries, keys, cu_queries, cu_keys, None if queries == keys else key_index)

    @property
    def most_queries(self) -> int:
        """Queries of the segment that has most."""
        return max(end - start for start, end in pairwise(self.query_bounds))

    @property
    def most_keys(self) -> int:
        """Keys of the segment that has most."""
        return max(end - start for start, end in pairwise(self.key_bounds))

    def spread(self, states: Tensor) -> Tensor:
        """Keys or values ``(P, ...)`` of the row to those of the segments, ``(K, ...)``."""
        return states if self.key_index is None else states.index_select(0, self.key_index)

    def gathered(self, grad: Tensor, num_tokens: int) -> Tensor:
        """Gradient of ``spread``: what reaches a token through all segments it is a key of, summed in float32."""
        if self.key_index is None:
            return grad
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((num_tokens, *grad.shape[1:]), dtype=wide)
        return total.index_add_(0, self.key_index, grad.to(wide)).to(grad.dtype)

    def parts(self) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Each segment's queries, keys, and mask ``(queries, keys)``; None where plain causal attention says it."""
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
    key, value = segments.spread(key), segments.spread(value)
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
    num_tokens = len(key)
    key, value = segments.spread(key), segments.spread(value)
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
    return by_query, segments.gathered(by_key, num_tokens), segments.gathered(by_value, num_tokens)


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
