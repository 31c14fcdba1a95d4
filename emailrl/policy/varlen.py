"""FlashAttention over samples of different lengths in one row, forward and backward, as PyTorch ships it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention within segments: ``query`` ``(P, heads, D)``, ``key`` and ``value`` ``(P, kv_heads, D)``.

    Returns the output ``(P, heads, D)`` and what ``varlen_backward`` needs: log-sum-exp and two states of the kernel.
    """
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse, rng_state, unused


def varlen_backward(
    grad: Tensor, saved: tuple[Tensor, ...], cu_seqlens: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``saved``: query, key, value and the four results of ``varlen_forward``."""
    query, key, value, out, lse, rng_state, unused = saved
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, rng_state, unused,
        scale=scale,
    )  # fmt: skip
    return gradients


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
    """``varlen_forward``'s output, differentiable. CUDA, bf16 or fp16 only."""
    out: Tensor = _Varlen.apply(query, key, value, cu_seqlens, longest, scale)
    return out
