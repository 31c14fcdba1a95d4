"""Padding-free batches: samples concatenated in a single row, with attention confined to each sample.
``packed_attention``, registered with transformers as ``PACKED``, is without segment bounds transformers' own SDPA
attention, so that one loaded model serves sampling and training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from emailrl.model.layout import why_not_packed
from emailrl.model.lora import backbone, causal_lm, has_full_attention


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """The K keys of all segments in order, if some of them are tokens of another segment in the row."""

    index: Tensor  # token of the row for each key, ``(K,)``
    own: Tensor  # key in its own segment for each token of the row, ``(P,)``
    borrowed: Tensor  # the other keys, ``(C,)``
    lent: Tensor  # distinct tokens of the row that are borrowed, ``(U,)``
    lender: Tensor  # index into ``lent`` for each of ``borrowed``, ``(C,)``

    @classmethod
    def of(cls, index: Tensor, is_own: Tensor) -> SharedKeys:
        """Build from each key's token and whether it belongs to its own segment; own keys are in the row's order."""
        own, borrowed = is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]
        lent, lender = index[borrowed].unique(return_inverse=True)
        return cls(index, own, borrowed, lent, lender)

    def gathered(self, grad: Tensor) -> Tensor:
        """Gradient of ``Segments.spread``: the sum for each token over all segments that use it as a key."""
        total = grad[self.own]
        # A prompt may have hundreds of borrowers: their sum would stand still in half precision.
        wide = torch.promote_types(grad.dtype, torch.float32)
        through_others = grad.new_zeros((len(self.lent), *grad.shape[1:]), dtype=wide)
        through_others.index_add_(0, self.lender, grad[self.borrowed].to(wide))
        return total.index_add_(0, self.lent, through_others.to(grad.dtype))


@dataclass(frozen=True, slots=True)
class Segments:
    """Segments of a row; the last query of a segment sees all of its keys, each earlier query one key less."""

    query_bounds: tuple[int, ...]  # of segment i in the row: ``query_bounds[i]:query_bounds[i + 1]``; on the host
    key_bounds: tuple[int, ...]  # the same for its keys, at least as many as queries
    cu_queries: Tensor  # ``query_bounds``, ``(n + 1,)`` int32, on the model's device
    cu_keys: Tensor
    keys: SharedKeys | None  # None if the keys of every segment are its own tokens, in the row's order

    @classmethod
    def of(cls, num_queries: Sequence[int], num_keys: Sequence[int], index: Tensor, is_own: Tensor) -> Segments:
        """Build from each segment's numbers of queries and keys, with the tensors of ``SharedKeys.of``."""
        queries, keys = (tuple(accumulate(lengths, initial=0)) for lengths in (num_queries, num_keys))
        cu_queries, cu_keys = (torch.tensor(one, dtype=torch.int32, device=index.device) for one in (queries, keys))
        return cls(queries, keys, cu_queries, cu_keys, None if queries == keys else SharedKeys.of(index, is_own))

    @property
    def longest(self) -> tuple[int, int]:
        """Maximum numbers of queries and of keys in a segment."""
        bounds = self.query_bounds, self.key_bounds
        queries, keys = (max(end - start for start, end in pairwise(one)) for one in bounds)
        return queries, keys

    def spread(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expand keys and values of the row, ``(P, ...)``, to those of the segments, ``(K, ...)``."""
        return (query, key, value) if self.keys is None else (query, key[self.keys.index], value[self.keys.index])


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention within segments: ``query`` ``(P, heads, D)``, ``key`` and ``value`` ``(P, kv_heads, D)``.
    Returns the output ``(P, heads, D)``, and log-sum-exp and two states of the kernel for ``varlen_backward``."""
    heads = segments.spread(query, key, value)
    if not uses_flash(query):
        nothing = query.new_empty(0)
        return _by_segment(*heads, segments, scale), nothing, nothing, nothing
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        *heads, segments.cu_queries, segments.cu_keys, *segments.longest, 0.0, True, False, scale=scale
    )
    return out, lse, rng_state, unused


def varlen_backward(
    grad: Tensor, saved: tuple[Tensor, ...], segments: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; ``saved``: query, key, value and the four results of ``varlen_forward``."""
    query, key, value, out, lse, rng_state, unused = saved
    heads = segments.spread(query, key, value)
    if uses_flash(query):
        by_query, by_key, by_value = torch.ops.aten._flash_attention_backward(
            grad, *heads, out, lse, segments.cu_queries, segments.cu_keys, *segments.longest,
            0.0, True, rng_state, unused, scale=scale,
        )  # fmt: skip
    else:
        leaves = [one.detach().requires_grad_() for one in heads]
        with torch.enable_grad():
            again = _by_segment(leaves[0], leaves[1], leaves[2], segments, scale)
        by_query, by_key, by_value = torch.autograd.grad(again, leaves, grad)
    if segments.keys is not None:
        by_key, by_value = segments.keys.gathered(by_key), segments.keys.gathered(by_value)
    return by_query, by_key, by_value


def uses_flash(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _by_segment(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, dropout: float = 0.0
) -> Tensor:
    parts = []
    for queries, keys in zip(pairwise(segments.query_bounds), pairwise(segments.key_bounds), strict=True):
        rows, columns = queries[1] - queries[0], keys[1] - keys[0]
        ones = torch.ones(rows, columns, dtype=torch.bool, device=query.device) if rows < columns else None
        mask = None if ones is None else ones.tril(columns - rows)  # None for plain causal attention
        spans = query[slice(*queries)], key[slice(*keys)], value[slice(*keys)]
        heads = [one.transpose(0, 1)[None] for one in spans]
        attended = nn.functional.scaled_dot_product_attention(
            heads[0], heads[1], heads[2],
            attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=True,
        )  # fmt: skip
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        results = varlen_forward(query, key, value, segments, scale)
        ctx.save_for_backward(query, key, value, *results)
        ctx.segments, ctx.scale = segments, scale
        return results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = varlen_backward(grads[0].contiguous(), tuple(ctx.saved_tensors), ctx.segments, ctx.scale)
        return *gradients, None, None


PACKED = "emailrl_packed"


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The tokens of a padded batch that any trained token depends on, in one row; each shared one once."""

    token_ids: Tensor  # ``(1, P)``
    position_ids: Tensor  # ``(1, P)``, each token's position in its sample
    segments: Segments  # one segment per sample; its queries are the tokens not shared with an earlier sample
    gather: Tensor  # positions in the row that predict a trained token, in the order of ``loss_mask.nonzero()``


def pack(token_ids: Tensor, trainable: Tensor, shared: Tensor | None = None) -> PackedRow:
    """Flatten ``token_ids`` ``(B, T)`` by the bool mask ``trainable`` ``(B, T)``, whose first column is False. A row
    ends before its last trained token: under causal attention no log-probability depends on later tokens, and the last
    token is only predicted. Rows without trained tokens are dropped. The first ``shared`` ``(B,)`` tokens of a row
    equal those of the previous row and are computed only there, since a causal model gives both the same states. Raises
    ValueError if nothing is trained."""
    steps = torch.arange(token_ids.shape[1], device=token_ids.device)
    lengths = (trainable * steps).amax(dim=1)
    needed = steps < lengths[:, None]
    own = needed if shared is None else needed & (steps >= torch.minimum(shared, lengths.roll(1))[:, None])
    # A token that a row does not compute stands where the last row before it that does has put it.
    place = (own.flatten().cumsum(0).view_as(own) - 1).where(own, -1).cummax(dim=0).values
    counts = [one for one in torch.stack((own.sum(dim=1), lengths), dim=1).tolist() if one[0]]
    if not counts:
        raise ValueError("a batch in which nothing is trained")
    num_queries, num_keys = zip(*counts, strict=True)
    keys = needed & own.any(dim=1, keepdim=True)
    rows, columns = trainable.nonzero(as_tuple=True)
    segments = Segments.of(num_queries, num_keys, place[keys], own[keys])
    positions = steps.expand_as(token_ids)[own][None]
    return PackedRow(token_ids[own][None], positions, segments, gather=place[rows, columns - 1])


def packed_inputs(packed: PackedRow) -> dict[str, Any]:
    """The arguments for a transformers backbone: the row, its positions and the segment bounds."""
    # transformers passes a 4-D mask on as it is; without one it would build a P x P mask from the positions.
    mask = packed.token_ids.new_zeros((1, 1, 1, 1), dtype=torch.bool)
    row = {"input_ids": packed.token_ids, "position_ids": packed.position_ids, "segments": packed.segments}
    return row | {"attention_mask": mask, "use_cache": False}


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    segments: Segments | None = None, scaling: float | None = None, dropout: float = 0.0, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend within each segment of ``query`` ``(1, heads, P, D)``, ``key``, ``value`` ``(1, kv_heads, P, D)``. Returns
    ``(1, P, heads, D)``. Uses one variable-length FlashAttention kernel on a GPU, SDPA per segment elsewhere."""
    if segments is None:
        others |= {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]
    if uses_flash(query) and not dropout:
        out: Tensor = _Varlen.apply(*rows, segments, scale)
    else:
        out = _by_segment(*segments.spread(*rows), segments, scale, dropout)
    return out[None], None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def enable_packing(model: Any) -> str | None:
    """Make ``model`` (PEFT or bare) take packed rows; returns the reason if it cannot, else None. Only plain causal
    attention in every layer qualifies: sliding windows, chunks and recurrent layers would mix samples or see too far,
    and a model loaded with another attention than SDPA keeps it."""
    base = causal_lm(model)
    if reason := why_not_packed(base.config._attn_implementation, fully=has_full_attention(base)):
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
    """Whether ``model`` may compute shared prefixes once: with packing and without dropout. Dropout masks differ by
    sample; a shared prefix would have one mask for all."""
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
    packed = backbone(base)(**packed_inputs(pack(token_ids, trainable))).last_hidden_state[0, 3:].float()
    alone = backbone(base)(input_ids=token_ids[1:, :3], use_cache=False).last_hidden_state[0].float()
    base.train(was_training)
    tolerance = 1e-4 if base.dtype in (torch.float32, torch.float64) else 0.1
    return bool((packed - alone).abs().max() <= tolerance * alone.abs().max().clamp(min=1.0))
