"""Padding-free batches: samples concatenated in a single row, with attention confined to each sample.

``packed_attention`` is registered with transformers under the name ``PACKED``. Called without segment bounds it is
transformers' own SDPA attention, so that one loaded model serves sampling and training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from emailrl.model.attention import Segments, uses_flash, varlen_attention
from emailrl.model.layout import attends_fully, why_not_packed
from emailrl.model.lora import causal_lm

PACKED = "emailrl_packed"


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The tokens of a padded batch that any trained token depends on, in one row; each shared one once."""

    token_ids: Tensor
    """``(1, P)``"""
    position_ids: Tensor
    """``(1, P)``, each token's position in its sample."""
    segments: Segments
    """One segment per sample; its queries are the tokens not shared with an earlier sample."""
    gather: Tensor
    """Positions in the row that predict a trained token, in the order of ``loss_mask.nonzero()``."""


def pack(token_ids: Tensor, trainable: Tensor, shared: Tensor | None = None) -> PackedRow:
    """Flatten ``token_ids`` ``(B, T)`` by the bool mask ``trainable`` ``(B, T)``, whose first column is False.

    A row ends before its last trained token: under causal attention no log-probability depends on later tokens, and the
    last token is only predicted. Rows without trained tokens are dropped. The first ``shared`` ``(B,)`` tokens of a row
    equal those of the previous row and are computed only there, since a causal model gives both the same states. Raises
    ValueError if nothing is trained.
    """
    steps = torch.arange(token_ids.shape[1], device=token_ids.device)
    lengths = (trainable * steps).amax(dim=1)
    needed = steps < lengths[:, None]
    own = needed
    if shared is not None:
        own = needed & (steps >= torch.minimum(shared, lengths.roll(1))[:, None])
    # A token that a row does not compute stands where the last row before it that does has put it.
    place = (own.flatten().cumsum(0).view_as(own) - 1).where(own, -1).cummax(dim=0).values
    counts = [one for one in torch.stack((own.sum(dim=1), lengths), dim=1).tolist() if one[0]]
    if not counts:
        raise ValueError("a batch in which nothing is trained")
    num_queries, num_keys = zip(*counts, strict=True)
    keys = needed & own.any(dim=1, keepdim=True)
    rows, columns = trainable.nonzero(as_tuple=True)
    return PackedRow(
        token_ids=token_ids[own][None],
        position_ids=steps.expand_as(token_ids)[own][None],
        segments=Segments.of(num_queries, num_keys, place[keys], own[keys]),
        gather=place[rows, columns - 1],
    )


def packed_inputs(packed: PackedRow) -> dict[str, Any]:
    """Return the arguments for a transformers backbone: the row, its positions and the segment bounds."""
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

    Returns ``(1, P, heads, D)``. Uses one variable-length FlashAttention kernel on a GPU, SDPA per segment elsewhere.
    """
    if segments is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    if uses_flash(query) and not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        rows = [states[0].transpose(0, 1) for states in (query, key, value)]
        out = varlen_attention(rows[0], rows[1], rows[2], segments, scale)
        return out[None], None
    if segments.keys is not None:
        key, value = (states.index_select(2, segments.keys.index) for states in (key, value))
    parts = []
    for queries, keys, mask in segments.parts():
        heads = query[:, :, queries], key[:, :, keys], value[:, :, keys]
        visible = None if mask is None else mask[None, None]
        parts.append(sdpa_attention_forward(module, *heads, visible, dropout=dropout, scaling=scaling, **others)[0])
    return torch.cat(parts, dim=1), None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def enable_packing(model: Any) -> str | None:
    """Make ``model`` (PEFT or bare) take packed rows if possible; returns the reason if not, else None.

    Only plain causal attention in every layer qualifies: sliding windows, chunks and recurrent layers would mix
    samples or see too far, and a model loaded with another attention than SDPA keeps it.
    """
    base = causal_lm(model)
    fully = attends_fully(base.config.get_text_config().to_dict()) and base._supports_attention_backend
    if reason := why_not_packed(base.config._attn_implementation, fully=fully):
        return reason
    base.set_attn_implementation(PACKED)
    if _keeps_samples_apart(base):
        return None
    base.set_attn_implementation("sdpa")
    return "samples in a packed row would attend to each other"


def takes_packed(model: Any) -> bool:
    """Whether ``enable_packing`` took effect on ``model``."""
    return bool(causal_lm(model).config._attn_implementation == PACKED)


def shares_prefixes(model: Any) -> bool:
    """Whether ``model`` may compute shared prefixes once: with packing and without dropout.

    Dropout masks differ by sample; a shared prefix would have one mask for all.
    """
    base = causal_lm(model)
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in base.modules())
    return takes_packed(model) and not drops and not getattr(base.config.get_text_config(), "attention_dropout", 0.0)


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
