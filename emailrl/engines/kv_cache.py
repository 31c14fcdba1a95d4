"""A key-value cache in blocks of ``BLOCK`` tokens: a conversation takes the memory of what it holds, not of the longest.

PagedAttention's layout (Kwon et al. 2023, https://arxiv.org/abs/2309.06180) in plain torch. Per layer the keys are
``[blocks, BLOCK, kv_heads, head_dim]``, the values likewise; a conversation's table names its blocks in order. Attention
gets the blocks of rows of about one length gathered side by side, one layer at a time; the caller's mask hides what
lies beyond a row's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from emailrl.engines.budget import BLOCK, GROWTH, blocks_of

Gathered = list[Tensor]
"""Keys or values of successive rows, [rows, kv_heads, window, head_dim] each, every group with a window of its own."""

PADDING = {"cpu": 64, "cuda": 8192}
"""Rows are gathered together while that pads with no more tokens than this: so many cost as much as one more call."""
TOGETHER = {"cpu": 2048, "cuda": 1 << 30}
"""Most tokens gathered together: on a CPU what its cache holds until attention reads it."""


class Filled(Exception):
    """The last layer's keys and values are written: a pass that only fills the cache needs nothing more."""


class BlockCache(Cache):
    """The cache of all layers; ``place`` says before each forward pass where its new tokens go.

    A pass that only ``fills`` it ends in ``Filled``. Tables never hold more than ``most`` blocks together.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_BlockLayer(self, last=layer == num_layers - 1) for layer in range(num_layers)])
        self.most = 0
        self.blocks = 1
        """Those there are, block 0 included: it takes what padding writes."""
        self._free: list[int] = []
        self.fills = False
        """Nothing is wanted of this pass but its keys and values."""
        self.window = 0
        """Tokens that the longest row of this pass may see, whole blocks."""
        self.written = torch.empty(0)
        """Where the new tokens of this pass go: token by token, row after row, the place in all blocks laid in line."""
        self.groups: list[tuple[int, Tensor]] = []
        """Rows that are gathered together: how many, and the blocks they see [rows · blocks]."""

    @property
    def is_empty(self) -> bool:
        """Whether no block is in a table or in memory."""
        return self.blocks == 1

    def extend(self, table: list[int], tokens: int, spare: int = 0) -> bool:
        """Let a table reach so many tokens; False, with nothing taken, where that leaves fewer than ``spare`` blocks."""
        missing = blocks_of(tokens) - len(table)
        if missing <= 0:
            return True
        taken = self.blocks - 1 - len(self._free)
        if taken + missing + spare > self.most:
            return False
        if missing > len(self._free):
            grown = min(self.most + 1, max(self.blocks + missing - len(self._free), int(self.blocks * GROWTH)))
            self._free[:0] = range(grown - 1, self.blocks - 1, -1)
            self.blocks = grown
        for _ in range(missing):
            table.append(self._free.pop())
        return True

    def release(self, table: list[int]) -> None:
        """Take back all blocks of a table."""
        self._free += table[::-1]
        table.clear()

    def place(
        self, tables: Sequence[list[int]], starts: Sequence[int], new: int, device: torch.device, *, fills: bool
    ) -> Tensor:
        """Say where the next forward pass writes: rows of ``new`` tokens that begin at ``starts``, which rise.

        A row's table reaches its own tokens; what pads it beyond goes to block 0. Returns positions [rows, new].
        """
        for layer in self._block_layers():
            layer.grow()
        widths = [blocks_of(start + new) for start in starts]
        padded = [table[: widths[-1]] + [0] * (widths[-1] - len(table)) for table in tables]
        blocks = torch.tensor(padded, device=device)
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
        self.window = widths[-1] * BLOCK
        self.written = (blocks.gather(1, positions // BLOCK) * BLOCK + positions % BLOCK).flatten()
        self.groups = [
            (rows.stop - rows.start, blocks[rows, : widths[rows.stop - 1]].flatten())
            for rows in groups_of(widths, device.type)
        ]
        self.fills = fills
        return positions

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copy blocks onto others, one to one."""
        for layer in self._block_layers():
            layer.grow()
            if layer.is_initialized:
                for tensor in (layer.keys, layer.values):
                    tensor[targets] = tensor[sources]

    def free(self) -> None:
        """Drop all tensors; every table is void afterwards."""
        self.blocks = 1
        self._free.clear()
        for layer in self._block_layers():
            layer.free()

    def _block_layers(self) -> list[_BlockLayer]:
        layers: list[_BlockLayer] = self.layers  # type: ignore[assignment]
        return layers


def groups_of(widths: Sequence[int], device: str) -> list[slice]:
    """Rows of rising ``widths``, in blocks, that are gathered together: neighbours of about one length."""
    padding, most = PADDING[device] // BLOCK, TOGETHER[device] // BLOCK
    found, start, held = [], 0, 0
    for row, width in enumerate(widths):
        together = (row + 1 - start) * width
        if row > start and (together > most or together - held - width > padding):
            found.append(slice(start, row))
            start, held = row, 0
        held += width
    return [*found, slice(start, len(widths))]


class _BlockLayer(CacheLayerMixin):
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
            states.new_zeros(self.cache.blocks, BLOCK, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def grow(self) -> None:
        """Follow the cache's number of blocks."""
        if self.is_initialized and len(self.keys) < self.cache.blocks:
            self.keys = self._grown(self.keys)
            self.values = self._grown(self.values)

    def _grown(self, held: Tensor) -> Tensor:
        grown = held.new_zeros(self.cache.blocks, *held.shape[1:])
        grown[: len(held)] = held
        return grown

    def free(self) -> None:
        """Drop the tensors."""
        self.keys = self.values = torch.empty(0)
        self.is_initialized = False

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Gathered, Gathered]:
        """Write new tokens [rows, kv_heads, new, head_dim] at the placed positions; return all the pass may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            held.flatten(0, 1).index_copy_(0, cache.written, states.transpose(1, 2).flatten(0, 1))
        if self.last and cache.fills:
            raise Filled
        return self._gather(self.keys), self._gather(self.values)

    def _gather(self, held: Tensor) -> Gathered:
        return [
            held.index_select(0, blocks).view(rows, -1, *held.shape[2:]).transpose(1, 2)
            for rows, blocks in self.cache.groups
        ]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The caller gives the mask itself."""
        return 0, 0

    def get_seq_length(self) -> int:
        """Rows differ in length; the caller gives positions and mask itself."""
        return 0

    def get_max_length(self) -> int:
        """No limit but the budget."""
        return -1
