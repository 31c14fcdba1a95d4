"""Layers of a model that only samples on a CPU, where it is bound by reading its weights and by calling operations:
matrices in the layout in which they are multiplied, those with a common input as one, and a decoder layer in one
function. float32 matrices become float16 ones, which hold bf16 exactly down to 2⁻¹⁷ and whose products are summed in
float32. Other computations, and their order, are transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from emailrl.engines.local.cache import BlockCache, block_attention
from emailrl.model.fused import LayerWeights, rms_norm, rotate, why_not_fused


def pack(model: Any) -> None:
    """Let the linear layers of ``model``, and the decoder layers that are known, multiply by packed weights."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if why_not_fused(model.get_decoder()) is None:
        for layer in model.get_decoder().layers:
            layer.forward = PackedLayer(layer)
        linears = [model.get_output_embeddings()]
    for linear in linears:
        linear.forward = packed(linear)


def packed(*linears: Any) -> Callable[[Tensor], Tensor]:
    """The outputs, one after the other, of linear layers for the same input ``(…, in)``."""
    weight = torch.cat([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    if weight.dtype == torch.bfloat16:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight)
        return lambda states: torch.ops.mkldnn._linear_pointwise(states, blocked, bias, "none", [], "")
    half = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    return partial(torch.ops.quantized.linear_dynamic_fp16, W_prepack=half)


class PackedLayer:
    """The ``forward`` of a decoder layer that ``why_not_fused`` does not reject, for passes over a ``BlockCache``."""

    def __init__(self, layer: Any) -> None:
        weights = LayerWeights(layer)
        query, key, value, out, gate, up, down = weights.modules
        self.qkv, self.out = packed(query, key, value), packed(out)
        self.gate_up, self.down = packed(gate, up), packed(down)
        self.head_dim, self.scale, self.number = weights.head_dim, weights.scale, layer.self_attn.layer_idx
        self.widths = [len(one.weight) // weights.head_dim for one in (query, key, value)]
        self.norms = layer.input_layernorm, layer.post_attention_layernorm, *weights.norms

    def __call__(
        self,
        states: Tensor,
        *,
        attention_mask: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: BlockCache,
        **_: object,
    ) -> Tensor:
        before, after, *of_heads = self.norms
        heads = self.qkv(normed(states, before)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        *turned, value = heads.split(self.widths, dim=1)
        query, key = (rotate(normed(one, norm), *position_embeddings) for one, norm in zip(turned, of_heads, strict=True))
        seen = past_key_values.update(key, value, self.number)
        attended, _weights = block_attention(self, query, *seen, attention_mask, self.scale)
        states = states + self.out(attended.flatten(2))
        gate, up = self.gate_up(normed(states, after)).chunk(2, dim=-1)
        return states + self.down(silu(gate) * up)


def normed(states: Tensor, norm: Any) -> Tensor:
    return states if norm is None else rms_norm(states, norm.weight, norm.variance_epsilon)
