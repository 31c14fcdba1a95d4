"""A key-value cache with one slot per conversation, so that rows of different lengths share a forward pass.

Per layer the keys and values are ``[slots, kv_heads, capacity, head_dim]``; each row writes at its own offset and the
caller's mask hides what lies beyond. The rows of a forward pass are slots in rising order: a view of
neighbours, or gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 1.5
BLOCK = 64
"""Capacities are multiples of this many tokens."""


class Filled(Exception):
    """The last layer's keys and values are written: a pass that only fills the cache needs nothing more."""


class SlotCache(Cache):
    """The cache of all layers; ``place`` says before each forward pass where its new tokens go.

    A pass that only ``fills`` it ends in ``Filled``.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_SlotLayer(self, last=layer == num_layers - 1) for layer in range(num_layers)])
        self.slots = 0
        self.capacity = 0
        self.rows = torch.empty(0)
        """The slots of this pass [rows]."""
        self.view: slice | None = None
        """The same slots where they are neighbours, to be seen without a copy."""
        self.fills = False
        """Nothing is wanted of this pass but its keys and values."""
        self.positions = torch.empty(0)
        """Where the new tokens of this pass go [rows, new]."""
        self.window = 0
        """Tokens of a slot that this pass may see."""

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for so many slots of so many tokens, keeping what is there."""
        if slots > self.slots:
            self.slots = slots
        if capacity > self.capacity:
            self.capacity = -(-max(capacity, int(self.capacity * GROWTH)) // BLOCK) * BLOCK
        for layer in self._slot_layers():
            layer.grow()

    def place(self, slots: Sequence[int], positions: Tensor, window: int, *, fills: bool) -> None:
        """Say where the next forward pass writes: rising ``slots``, ``positions`` [rows, new], how far it may look."""
        self.rows = torch.tensor(slots, device=positions.device)
        first, last = slots[0], slots[-1]
        self.view = slice(first, last + 1) if last - first + 1 == len(slots) else None
        self.positions, self.window, self.fills = positions, window, fills

    def copy(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first ``length`` tokens of one slot into others."""
        for layer in self._slot_layers():
            if layer.is_initialized:
                for tensor in (layer.keys, layer.values):
                    # A copy: where ``length`` is the whole capacity, torch sees source and target as one memory.
                    tensor[targets, :, :length] = tensor[source, :, :length].clone().unsqueeze(0)

    def swap(self, one: int, other: int, length: int) -> None:
        """Exchange the first ``length`` tokens of two slots."""
        for layer in self._slot_layers():
            if layer.is_initialized:
                for tensor in (layer.keys, layer.values):
                    tensor[[one, other], :, :length] = tensor[[other, one], :, :length]

    def free(self) -> None:
        """Drop all tensors; every slot is empty afterwards."""
        self.slots = self.capacity = 0
        for layer in self._slot_layers():
            layer.free()

    def _slot_layers(self) -> list[_SlotLayer]:
        layers: list[_SlotLayer] = self.layers  # type: ignore[assignment]
        return layers


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    is_sliding = False

    def __init__(self, cache: SlotCache, *, last: bool) -> None:
        super().__init__()
        self.cache = cache
        self.last = last
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not garbage: a masked weight of 0 times NaN would still be NaN.
        size = (self.cache.slots, key_states.shape[1], self.cache.capacity)
        self.keys = key_states.new_zeros(*size, key_states.shape[-1])
        self.values = value_states.new_zeros(*size, value_states.shape[-1])
        self.is_initialized = True

    def grow(self) -> None:
        """Follow the cache's number of slots and capacity."""
        if not self.is_initialized or self.keys.shape[:3:2] == (self.cache.slots, self.cache.capacity):
            return
        old = (self.keys, self.values)
        self.lazy_initialization(*old)
        for new, held in zip((self.keys, self.values), old, strict=True):
            new[: held.shape[0], :, : held.shape[2]] = held

    def free(self) -> None:
        """Drop the tensors."""
        self.keys = self.values = torch.empty(0)
        self.is_initialized = False

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens [rows, kv_heads, new, head_dim] at the placed positions; return all the pass may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        self.keys[cache.rows[:, None], :, cache.positions] = key_states.transpose(1, 2)
        self.values[cache.rows[:, None], :, cache.positions] = value_states.transpose(1, 2)
        if self.last and cache.fills:
            raise Filled
        # Cut before gathering, so that only what is seen gets copied.
        where = cache.rows if cache.view is None else cache.view
        return self.keys[:, :, : cache.window][where], self.values[:, :, : cache.window][where]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys of this pass."""
        return self.cache.window, 0

    def get_seq_length(self) -> int:
        """Rows differ in length; the caller gives positions and mask itself."""
        return 0

    def get_max_length(self) -> int:
        """No limit: the cache grows."""
        return -1
