"""A micro-batch with everything fixed before a step's first update; can be halved if too large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from emailrl.training.step.batches import MicroBatch
from emailrl.training.step.samples import TrainingSample

Part = TypeVar("Part", "Prepared", MicroBatch)


@dataclass
class Prepared:
    """Every tensor is ``(B, T)``."""

    batch: MicroBatch
    samples: list[TrainingSample]
    """The rows."""
    old_logprobs: Tensor | None = None
    """None with one update per step, whose own pass provides them."""
    ref_logprobs: Tensor | None = None
    """None without a KL penalty."""
    old_values: Tensor | None = None
    """None without a critic."""
    advantages: Tensor | None = None
    """None until the whole step is scored (``shaping``)."""
    returns: Tensor | None = None
    """The critic's targets; None without a critic."""

    def on_cpu(self) -> Prepared:
        """A copy in host memory."""
        return replace(_on_cpu(self), batch=_on_cpu(self.batch))

    def halves_like(self, failed: MicroBatch, size: Callable[[MicroBatch], int]) -> list[Prepared]:
        """Two micro-batches of half the rows if this is as large as one that did not fit; otherwise itself."""
        if size(self.batch) < size(failed) or len(self.samples) == 1:
            return [self]
        return [self._rows(part, batch) for part, batch in _halves(self.batch)]

    def _rows(self, rows: slice, batch: MicroBatch) -> Prepared:
        width = batch.token_ids.shape[1]
        cut: dict[str, Any] = {
            field.name: value[rows, :width]
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, batch=batch, samples=self.samples[rows], **cut)


def _on_cpu(part: Part) -> Part:
    tensors: dict[str, Any] = {
        field.name: value.cpu() for field in fields(part) if isinstance(value := getattr(part, field.name), Tensor)
    }
    return replace(part, **tensors)


def halves_of(batch: MicroBatch) -> list[MicroBatch]:
    """Two micro-batches of half the rows, each as wide as its longest row."""
    return [half for _, half in _halves(batch)]


def _halves(batch: MicroBatch) -> list[tuple[slice, MicroBatch]]:
    middle = (len(batch.indices) + 1) // 2
    return [(rows, _rows_of(batch, rows)) for rows in (slice(0, middle), slice(middle, None))]


def _rows_of(batch: MicroBatch, rows: slice) -> MicroBatch:
    # A row ends at its last trained token (training.samples), so the mask gives its length.
    steps = torch.arange(1, batch.loss_mask.shape[1] + 1, device=batch.loss_mask.device)
    lengths = (batch.loss_mask[rows] * steps).amax(dim=1)
    width = int(lengths.max())
    cut: dict[str, Any] = {
        field.name: value[rows, :width] if value.ndim == 2 else value[rows]
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    cut["shared"] = cut["shared"].clone()
    cut["shared"][:1] = 0  # the row before the first is not in this batch
    num_tokens = int(lengths.sum() - cut["shared"].sum())
    return replace(batch, **cut, indices=batch.indices[rows], num_tokens=num_tokens)
