"""Attention of many queries over conversations of different lengths, without copying keys for grouped-query heads.

With an explicit mask, transformers repeats keys and values once per query head before every call. The heads that share
a key head can instead be folded into the query length, which copies nothing that grows with the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "emailrl_blocks"

QUERY_BLOCK = 64
"""Queries per attention block on a CPU. Each block attends only as far as its last query may see; with a mask, the
kernel would compute the masked half too."""


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Iterator[Tensor],
    value: Iterator[Tensor],
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """``query`` [rows, heads, new, head_dim] over groups of successive rows, each with its own window.

    ``key`` and ``value`` are those groups, [rows, kv_heads, window, head_dim]; ``attention_mask``, [rows, 1, new,
    longest window], is added to the scores. Returns [rows, new, heads, head_dim].
    """
    outs = []
    start = 0
    for keys, values in zip(key, value, strict=True):
        rows = slice(start, start := start + len(keys))
        outs.append(_causal(query[rows], keys, values, attention_mask[rows, :, :, : keys.shape[2]], scaling))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.transpose(1, 2).contiguous(), None


def _causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention of one group, on a CPU in blocks of queries; [rows, heads, new, head_dim]."""
    new, window = query.shape[2], key.shape[2]
    block = QUERY_BLOCK if query.device.type == "cpu" else new
    pieces = []
    for start in range(0, new, block):
        end = min(start + block, new)
        seen = window - new + end  # no query of this block looks further in any row
        pieces.append(
            _folded(query[:, :, start:end], key[:, :, :seen], value[:, :, :seen], mask[:, :, start:end, :seen], scaling)
        )
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Attention with the query heads of one key head folded into the query dimension."""
    rows, heads, new, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    if groups > 1:
        query = query.reshape(rows, kv_heads, groups * new, head_dim)
        mask = mask.repeat(1, 1, groups, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).reshape(rows, heads, new, -1)


def causal_mask(positions: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """The attention mask of new tokens at ``positions`` [rows, new]: 0 up to the token itself, −inf after; [rows, 1,
    new, window]."""
    seen = torch.arange(window, device=positions.device) <= positions[:, None, :, None]
    return torch.zeros((), dtype=dtype, device=positions.device).where(seen, float("-inf"))


@contextmanager
def block_attention_in(config: Any) -> Iterator[None]:
    """Let the model of ``config`` attend with ``block_attention`` while inside."""
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


AttentionInterface.register(NAME, block_attention)
