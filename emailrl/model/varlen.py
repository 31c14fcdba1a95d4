"""Causal attention of segments of different lengths in one row, forward and backward.

On a GPU, in half precision, the FlashAttention kernels that PyTorch ships; elsewhere SDPA segment by segment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from emailrl.model.segments import Segments


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
