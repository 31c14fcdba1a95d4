"""Padding-free batches: samples one behind the other in a single row, attention confined to each of them.

``packed_attention`` is registered with transformers under the name ``PACKED``. Called without segment bounds it is
transformers' own SDPA attention, so that one loaded model serves sampling and training.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from emailrl.policy.varlen import uses_flash, varlen_attention

PACKED = "emailrl_packed"


@dataclass(frozen=True, slots=True)
class Segments:
    """Where each sample stands in a packed row of ``P`` tokens."""

    cu_seqlens: Tensor
    """Bounds, ``(num_samples + 1,)`` int32, on the model's device: sample i is ``cu_seqlens[i]:cu_seqlens[i + 1]``."""
    bounds: tuple[int, ...]
    """The same numbers on the host."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(end - start for start, end in pairwise(self.bounds))


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The tokens of a padded batch that any trained token depends on, in one row."""

    token_ids: Tensor
    """``(1, P)``"""
    position_ids: Tensor
    """``(1, P)``, from 0 in each sample."""
    segments: Segments
    gather: Tensor
    """Positions in the row that predict a trained token, in the order of ``loss_mask.nonzero()``."""


def pack(token_ids: Tensor, trainable: Tensor) -> PackedRow:
    """Flatten ``token_ids`` ``(B, T)`` by the bool mask ``trainable`` ``(B, T)``, whose first column is False.

    A row ends before its last trained token: under causal attention nothing later is seen by a log-probability, and
    the last token is only predicted. Rows that train nothing vanish. Raises ValueError where nothing is trained.
    """
    steps = torch.arange(token_ids.shape[1], device=token_ids.device)
    lengths = (trainable * steps).amax(dim=1)
    kept = steps < lengths[:, None]
    starts = lengths.cumsum(0) - lengths
    rows, columns = trainable.nonzero(as_tuple=True)
    ends = [0]
    for length in lengths.tolist():
        if length:
            ends.append(ends[-1] + length)
    if len(ends) == 1:
        raise ValueError("a batch in which nothing is trained")
    return PackedRow(
        token_ids=token_ids[kept][None],
        position_ids=steps.expand_as(token_ids)[kept][None],
        segments=Segments(torch.tensor(ends, dtype=torch.int32, device=token_ids.device), tuple(ends)),
        gather=starts[rows] + columns - 1,
    )


def packed_inputs(packed: PackedRow) -> dict[str, Any]:
    """Return what a transformers backbone is called with: the row, its positions and the segments' bounds."""
    return {
        "input_ids": packed.token_ids,
        "position_ids": packed.position_ids,
        # transformers passes a 4-D mask on as it is; without one it would build a P x P mask from the positions.
        "attention_mask": packed.token_ids.new_zeros((1, 1, 1, 1), dtype=torch.bool),
        "segments": packed.segments,
        "use_cache": False,
    }


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each segment of ``query`` ``(1, heads, P, D)``, ``key``, ``value`` ``(1, kv_heads, P, D)``.

    Returns ``(1, P, heads, D)``. On a GPU one variable-length FlashAttention kernel, elsewhere SDPA sample by sample.
    """
    if segments is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    if uses_flash(query) and not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = [states[0].transpose(0, 1) for states in (query, key, value)]
        out = varlen_attention(rows[0], rows[1], rows[2], segments.cu_seqlens, segments.longest, scale)
        return out[None], None
    parts = []
    for start, end in pairwise(segments.bounds):
        heads = [states[:, :, start:end] for states in (query, key, value)]
        parts.append(
            sdpa_attention_forward(
                module, heads[0], heads[1], heads[2], None, dropout=dropout, scaling=scaling, **others
            )[0]
        )
    return torch.cat(parts, dim=1), None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def enable_packing(model: Any) -> bool:
    """Make ``model`` (PEFT or bare) take packed rows where it can; returns whether it does.

    Only plain causal attention in every layer qualifies: sliding windows, chunks and recurrent layers would mix
    samples or see too far, and a model loaded with another attention than SDPA keeps it.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    plain = layer_types == {"full_attention"} and (not windowed or hasattr(config, "layer_types"))
    if not plain or not base._supports_attention_backend or base.config._attn_implementation != "sdpa":
        return False
    base.set_attn_implementation(PACKED)
    if _keeps_samples_apart(base):
        return True
    base.set_attn_implementation("sdpa")
    return False


def takes_packed(model: Any) -> bool:
    """Say whether ``enable_packing`` took effect on ``model``."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return bool(base.config._attn_implementation == PACKED)


@torch.no_grad()
def _keeps_samples_apart(base: Any) -> bool:
    """Compare a packed row of two samples with the second alone."""
    was_training = base.training
    base.eval()
    device = base.get_output_embeddings().weight.device
    token_ids = torch.tensor([[1, 2, 3, 0], [4, 3, 2, 1]], device=device)
    trainable = torch.tensor([[False, False, False, True]] * 2, device=device)
    packed = base.base_model(**packed_inputs(pack(token_ids, trainable))).last_hidden_state[0, 3:].float()
    alone = base.base_model(input_ids=token_ids[1:, :3], use_cache=False).last_hidden_state[0].float()
    base.train(was_training)
    tolerance = 1e-4 if base.dtype in (torch.float32, torch.float64) else 0.1
    return bool((packed - alone).abs().max() <= tolerance * alone.abs().max().clamp(min=1.0))
