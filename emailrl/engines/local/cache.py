"""A key-value cache in blocks of ``BLOCK`` tokens: PagedAttention's layout (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180) in plain torch. Per layer the keys are ``[blocks, kv_heads, BLOCK, head_dim]``, the
values likewise; a conversation's table names its blocks in order, and common prefixes share blocks. Attention gets the
blocks of rows of similar length gathered together, one layer at a time; the caller's mask hides what lies past a row's
tokens. transformers repeats keys and values once per query head if there is a mask: here the heads that share a key
head are folded into the query length, which copies nothing that grows with the conversation."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

from emailrl.engines.budget import BLOCK, GROWTH, blocks_of

Table: TypeAlias = "array[int]"
"""The blocks of a conversation, in order; a buffer, since a step over long conversations reads ten thousand of them."""
Gathered = Iterator[Tensor]
"""Keys or values of successive rows, [rows, kv_heads, window, head_dim] each, every group with its own window."""

PADDING = {"cpu": 32, "cuda": 8192}  # most in rows gathered together: so many tokens cost as much as one more call
TOGETHER = {"cpu": 1024, "cuda": 1 << 30}  # most tokens gathered: on a CPU, what its cache holds until they are read
ATTENTION = "emailrl_blocks"  # transformers' name for ``block_attention``
QUERY_BLOCK = 64
"""Queries per attention block on a CPU. Each attends only as far as its last query may see, and its scores stay small:
memory for larger ones comes from the system each time."""


class Filled(Exception):
    """Raised when the last layer's keys and values are written, to end a pass that only fills the cache."""


class BlockCache(Cache):
    """The cache of all layers; call ``place`` before each forward pass to set where its new tokens go. A pass that only
    ``fills`` it ends with ``Filled``. All tables together never hold more than ``most`` blocks."""

    layers: list[BlockLayer]  # type: ignore[assignment]

    def __init__(self, num_layers: int, kv_heads: int) -> None:
        super().__init__(layers=[BlockLayer(self, last=layer == num_layers - 1) for layer in range(num_layers)])
        self.kv_heads = kv_heads
        self.most = 0
        self.users = [0]  # reference count of each block; block 0 is in no table: it receives padding writes
        self._free: list[int] = []
        # Of this pass:
        self.fills = False  # whether it only needs keys and values
        self.window = 0  # tokens of its longest row, in whole blocks
        self.written = torch.empty(0)  # places of its new tokens, among those of all blocks and heads, flat
        self.groups: list[tuple[int, Tensor]] = []  # rows gathered together: how many, and the block heads they see

    @property
    def taken(self) -> int:
        """Blocks that are in tables."""
        return len(self.users) - 1 - len(self._free)

    def extend(self, table: Table, tokens: int, spare: int = 0) -> bool:
        """Grow a table to hold ``tokens``; False, taking nothing, if fewer than ``spare`` blocks would be left."""
        missing = blocks_of(tokens) - len(table)
        if missing <= 0:
            return True
        blocks = len(self.users)
        if self.taken + missing + spare > self.most:
            return False
        if missing > len(self._free):
            grown = min(self.most + 1, max(blocks + missing - len(self._free), int(blocks * GROWTH)))
            self.users += [0] * (grown - blocks)
            self._free[:0] = range(grown - 1, blocks - 1, -1)
        self.share([self._free.pop() for _ in range(missing)], table)
        return True

    def share(self, blocks: Sequence[int], table: Table) -> None:
        """Append blocks that other tables may share; shared blocks are read-only from then on."""
        for block in blocks:
            self.users[block] += 1
        table.extend(blocks)

    def release(self, table: Table, keep: int = 0) -> None:
        """Release all blocks of a table but the first ``keep``."""
        for block in reversed(table[keep:]):
            self.users[block] -= 1
            if not self.users[block]:
                self._free.append(block)
        del table[keep:]

    def place(
        self, tables: Sequence[Table], starts: Sequence[int], new: int, device: torch.device, *, fills: bool
    ) -> Tensor:
        """Set where the next forward pass writes: rows of ``new`` tokens beginning at ascending ``starts``. A row's
        table covers its own tokens; padding goes to block 0. Returns positions [rows, new]."""
        for layer in self.layers:
            layer.grow()
        widths = [blocks_of(start + new) for start in starts]
        padded = np.zeros((len(tables), widths[-1]), dtype=np.int64)
        for row, table in enumerate(tables):
            padded[row, : len(table)] = table[: widths[-1]]
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
        # Heads of blocks [rows, kv_heads, width].
        heads = torch.arange(self.kv_heads, device=device)[:, None]
        blocks = torch.from_numpy(padded).to(device)[:, None] * self.kv_heads + heads
        at = (positions // BLOCK)[:, None].expand(-1, self.kv_heads, -1)
        self.written = (blocks.gather(2, at) * BLOCK + (positions % BLOCK)[:, None]).flatten()
        self.window = widths[-1] * BLOCK
        self.groups = [
            (rows.stop - rows.start, blocks[rows, :, : widths[rows.stop - 1]].flatten())
            for rows in groups_of(widths, device.type)
        ]
        self.fills = fills
        return positions

    def free(self) -> None:
        """Drop all tensors, which invalidates every table."""
        self._free.clear()
        self.users = [0]
        for layer in self.layers:
            layer.free()


def groups_of(widths: Sequence[int], device: str) -> list[slice]:
    """Group rows of ascending ``widths``, in blocks, so that neighbors of similar length are gathered together."""
    padding, most = PADDING[device] // BLOCK, TOGETHER[device] // BLOCK
    found, start, held = [], 0, 0
    for row, width in enumerate(widths):
        together = (row + 1 - start) * width
        if row > start and (together > most or together - held - width > padding):
            found.append(slice(start, row))
            start, held = row, 0
        held += width
    return [*found, slice(start, len(widths))]


class BlockLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False

    def __init__(self, cache: BlockCache, *, last: bool) -> None:
        super().__init__()
        self.cache = cache
        self.last = last
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not garbage: a masked weight of 0 times NaN would still be NaN.
        self.keys, self.values = (
            states.new_zeros(len(self.cache.users), states.shape[1], BLOCK, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def grow(self) -> None:
        if self.is_initialized and len(self.keys) < len(self.cache.users):
            self.keys = self.grown(self.keys)  # one after the other: the budget has room for one copy
            self.values = self.grown(self.values)

    def grown(self, held: Tensor) -> Tensor:
        return pad(held, (0, 0) * 3 + (0, len(self.cache.users) - len(held)))

    def free(self) -> None:
        self.keys = self.values = torch.empty(0)
        self.is_initialized = False

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Gathered, Gathered]:
        """Write new tokens [rows, kv_heads, new, head_dim] at the placed positions; returns what the pass may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            held.flatten(0, 2).index_copy_(0, cache.written, states.flatten(0, 2))
        if self.last and cache.fills:
            raise Filled
        return self._gather(self.keys), self._gather(self.values)

    def _gather(self, held: Tensor) -> Gathered:
        """One group at a time, on demand, so that a copied group is still in cache when attention reads it."""
        for rows, blocks in self.cache.groups:
            yield held.flatten(0, 1).index_select(0, blocks).view(rows, held.shape[1], -1, held.shape[3])

    # The caller gives positions and mask itself, and nothing but the budget limits the length.

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 0, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def block_attention(
    module: Any, query: Tensor, key: Gathered, value: Gathered, mask: Tensor, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """``query`` [rows, heads, new, head_dim] over groups of successive rows, each with its own window. ``key`` and
    ``value`` are those groups, [rows, kv_heads, window, head_dim]; ``mask``, [rows, 1, new, longest window], is
    added to the scores. Returns [rows, new, heads, head_dim]."""
    outs, begun, (heads, new, head_dim), on_cpu = [], 0, query.shape[1:], query.device.type == "cpu"
    block = QUERY_BLOCK if on_cpu else new
    attend = in_bf16 if on_cpu and query.dtype == torch.bfloat16 else scaled_dot_product_attention
    for keys, values in zip(key, value, strict=True):
        rows, kv_heads, pieces = slice(begun, begun := begun + len(keys)), keys.shape[1], []
        for start in range(0, new, block):
            end = min(start + block, new)
            seen = slice(keys.shape[2] - new + end)  # no query of this block looks further in any row
            asked = query[rows, :, start:end].reshape(len(keys), kv_heads, -1, head_dim)
            masked = mask[rows, :, start:end, seen].repeat(1, 1, heads // kv_heads, 1)
            found = attend(asked, keys[:, :, seen], values[:, :, seen], masked, scale=scaling)
            pieces.append(found.reshape(len(keys), heads, end - start, -1))
        outs.append(torch.cat(pieces, dim=2))
    return torch.cat(outs).transpose(1, 2).contiguous(), None


def in_bf16(query: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor, *, scale: float | None) -> Tensor:
    """As ``scaled_dot_product_attention``, in half its time on a CPU: products of bf16 numbers, summed in float32."""
    # Only here: elsewhere positions are multiplied, which need all their bits.
    with torch.backends.mkldnn.flags(enabled=True, allow_tf32=None, fp32_precision="bf16"):
        scores = query.float() @ keys.float().mT
        torch.add(attn_mask, scores, alpha=scale or query.shape[-1] ** -0.5, out=scores)
        return (torch.softmax(scores, -1, out=scores) @ values.float()).to(query.dtype)


def causal_mask(positions: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """The mask of new tokens at ``positions`` [rows, new]: 0 up to the token itself, −inf after. [rows, 1,
    new, window]."""
    seen = torch.arange(window, device=positions.device) <= positions[:, None, :, None]
    return torch.zeros((), dtype=dtype, device=positions.device).where(seen, float("-inf"))


AttentionInterface.register(ATTENTION, block_attention)
