"""Decode steps as CUDA graphs: one launch instead of a thousand short ones.

A small model on a GPU is launch-bound. A graph is captured per number of rows and window width, both rounded up, once a
few steps have needed it. Padding rows and blocks read and write block 0, which belongs to no conversation. A graph
refers to weights and keys by address: call ``forget`` when weights change; graphs are dropped automatically when the
cache moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from emailrl.base.plain import first_line
from emailrl.engines.base import report
from emailrl.engines.budget import BLOCK, blocks_of
from emailrl.engines.local.cache import BlockCache, Table, causal_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

USES: Final = 3
"""Steps of a shape that run without a graph before one is captured: a capture costs about two steps."""
WIDTHS: Final = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Maximum window in blocks; wider steps run without a graph."""
MOST_GATHERED: Final = 1 << 30
"""Maximum bytes of keys (or values) that a layer copies per step; beyond it, copying dominates launch overhead."""


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    packed: Tensor
    logits: Tensor


class DecodeGraphs:
    """The graphs of one model on a CUDA device over one cache.

    ``most_rows`` is the maximum number of concurrent conversations, ``most_tokens`` the context window.
    """

    def __init__(self, model: PreTrainedModel, cache: BlockCache, *, most_rows: int, most_tokens: int) -> None:
        self._model = model
        self._cache = cache
        self._most_rows = most_rows
        self._last_position = most_tokens - 1
        self._usable = True
        self._moves = -1
        self._uses: dict[tuple[int, int], int] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None

    def forget(self) -> None:
        """Drop every graph and its memory."""
        self._graphs.clear()
        self._uses.clear()
        self._pool = None

    def logits(self, tables: Sequence[Table], starts: Sequence[int], ids: Sequence[int]) -> Tensor | None:
        """Logits [rows, vocabulary] after the token ``ids`` of each row, at ``starts``; also writes their keys.

        Valid until the next call. Returns None, without side effects, if this step has no graph.
        """
        shape = self._shape(len(ids), max(starts))
        if shape is None:
            return None
        self._cache.grow()
        if self._moves != self._cache.moves:
            self.forget()
            self._moves = self._cache.moves
        self._uses[shape] = self._uses.get(shape, 0) + 1
        if self._uses[shape] <= USES:
            return None
        packed = pack(tables, starts, ids, *shape)
        graph = self._graphs.get(shape) or self._capture(shape, packed)
        if graph is None:
            return None
        graph.packed.copy_(packed)
        graph.graph.replay()
        return graph.logits[: len(ids)]

    def _shape(self, rows: int, last: int) -> tuple[int, int] | None:
        """Rows and blocks of a step's graph, if the step is eligible."""
        if not self._usable or not self._cache.in_memory:
            return None
        width = next((width for width in WIDTHS if width >= blocks_of(last + 1)), None)
        count = min(1 << (rows - 1).bit_length(), self._most_rows)
        if width is None or count * width * self._cache.block_bytes > MOST_GATHERED:
            return None
        return count, width

    def _capture(self, shape: tuple[int, int], packed: Tensor) -> _Graph | None:
        device = self._model.device
        try:
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.device(device):
                inputs = packed.to(device)
                # The first call loads kernels and allocates memory, which a capture forbids.
                padded_step(self._model, self._cache, inputs, self._last_position)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool=self._pool):
                    logits = padded_step(self._model, self._cache, inputs, self._last_position)
        except RuntimeError as error:  # includes out of memory
            self._usable = False
            self.forget()
            report(f"Sampling continues without CUDA graphs: {first_line(error)}")
            return None
        found = self._graphs[shape] = _Graph(graph, inputs, logits)
        return found


def pack(tables: Sequence[Table], starts: Sequence[int], ids: Sequence[int], rows: int, width: int) -> Tensor:
    """A step as one tensor [rows, 2 + width]: token, its position, and the row's blocks; 0 elsewhere."""
    packed = np.zeros((rows, 2 + width), dtype=np.int64)
    packed[: len(ids), 0] = ids
    packed[: len(starts), 1] = starts
    for row, table in enumerate(tables):
        held = min(len(table), width)
        packed[row, 2 : 2 + held] = table[:held]
    return torch.from_numpy(packed)


def padded_step(model: PreTrainedModel, cache: BlockCache, packed: Tensor, last_position: int) -> Tensor:
    """Decode the output of ``pack`` in fixed shapes; returns logits [rows, vocabulary]."""
    ids, starts, table = packed[:, :1], packed[:, 1:2], packed[:, 2:]
    cache.place_packed(table, starts)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": causal_mask(starts, table.shape[1] * BLOCK, model.dtype),
        "position_ids": starts.clamp(max=last_position),
        "past_key_values": cache,
        "use_cache": True,
        "logits_to_keep": 1,
    }
    logits: Tensor = model(**inputs).logits
    return logits[:, -1]
