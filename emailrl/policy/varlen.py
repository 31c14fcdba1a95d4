"""Causal attention over samples of different lengths in one row, forward and backward.

On a GPU, in half precision, the FlashAttention kernels that PyTorch ships; elsewhere SDPA sample by sample.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention within segments: ``query`` ``(P, heads, D)``, ``key`` and ``value`` ``(P, kv_heads, D)``.

    Returns the output ``(P, heads, D)`` and what ``varlen_backward`` needs: log-sum-exp and two states of the kernel.
    """
    if not uses_flash(query):
        out = _by_sample(query, key, value, cu_seqlens, scale)
        nothing = out.new_empty(0)
        return out, nothing, nothing, nothing
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse, rng_state, unused


def varlen_backward(
    grad: Tensor, saved: tuple[Tensor, ...], cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``saved``: query, key, value and the four results of ``varlen_forward``."""
    query, key, value, out, lse, rng_state, unused = saved
    if not uses_flash(query):
        leaves = [one.detach().requires_grad_() for one in (query, key, value)]
        with torch.enable_grad():
            again = _by_sample(leaves[0], leaves[1], leaves[2], cu_seqlens, scale)
        by_query, by_key, by_value = torch.autograd.grad(again, leaves, grad)
        return by_query, by_key, by_value
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, rng_state, unused,
        scale=scale,
    )  # fmt: skip
    return gradients


def uses_flash(query: Tensor) -> bool:
    """Whether FlashAttention takes ``query``."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _by_sample(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    bounds = cu_seqlens.tolist()
    parts = []
    for start, end in pairwise(bounds):
        heads = [states[start:end].transpose(0, 1)[None] for states in (query, key, value)]
        attended = nn.functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True, scale=scale, enable_gqa=True
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float
    ) -> Tensor:
        results = varlen_forward(query, key, value, cu_seqlens, longest, scale)
        ctx.save_for_backward(query, key, value, *results, cu_seqlens)
        ctx.longest, ctx.scale = longest, scale
        return results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, cu_seqlens = ctx.saved_tensors
        gradients = varlen_backward(grads[0].contiguous(), tuple(saved), cu_seqlens, ctx.longest, ctx.scale)
        return *gradients, None, None, None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> Tensor:
    """``varlen_forward``'s output, differentiable."""
    out: Tensor = _Varlen.apply(query, key, value, cu_seqlens, longest, scale)
    return out
