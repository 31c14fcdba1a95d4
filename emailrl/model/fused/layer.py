"""One decoder layer (Llama's shape, with or without Qwen3's head norms) as one autograd function.

``Keep`` sets what the forward pass keeps for the backward; the rest is recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emailrl.model.attention import Segments, varlen_backward, varlen_forward
from emailrl.model.fused.elementwise import (
    add_rms_norm,
    add_rms_norm_backward,
    fused,
    norm_rotate,
    norm_rotate_backward,
    rms_norm,
    rotate,
    rotate_backward,
    swiglu,
    swiglu_backward_,
)
from emailrl.model.fused.projections import Parameters, Projections, adapter_of
from emailrl.model.layout import Keep

QKV, OUT, GATE_UP, DOWN = (0, 3), (3, 4), (4, 6), (6, 7)
"""Indices of the projections in ``LayerWeights.modules``."""


class LayerWeights:
    """The weights of a transformers decoder layer, its adapters in the base's type as of the last ``refresh``."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer, self.attention = layer, attention
        self.modules = [
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            mlp.gate_proj, mlp.up_proj, mlp.down_proj,
        ]  # fmt: skip
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.adapters: list[Parameters | None] = []
        self._seen: tuple[Any, ...] | None = None

    def refresh(self) -> list[Tensor | None]:
        """Read the current adapters; returns A and B of each projection, None without an adapter.

        Changes are detected by tensor version, which torch's fused optimizers (``fused=True``) do not increment.
        """
        self.adapters = [adapter_of(module) for module in self.modules]
        flat: list[Tensor | None] = []
        for adapter in self.adapters:
            flat += [None, None] if adapter is None else [adapter[0], adapter[1]]
        seen = tuple((None, 0) if one is None else (one.data_ptr(), one._version) for one in flat)
        if seen != self._seen:
            self.qkv, self.out, self.gate_up, self.down = (
                Projections.of(self.modules[start:end], self.adapters[start:end])
                for start, end in (QKV, OUT, GATE_UP, DOWN)
            )
            self._seen = seen
        return flat

    def forward(self, states: Tensor, rope: tuple[Tensor, Tensor], segments: Segments, keep: Keep) -> Tensor:
        """Run the layer with its current adapters on ``states`` ``(P, hidden)``."""
        adapters = self.refresh()
        result: Tensor = FusedLayer.apply(states, self, rope, segments, keep, *adapters)
        return result

    def rotate(self, heads: Tensor, norm: Any, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Queries or keys ``(P, heads, D)`` in attention's layout."""
        if norm is None:
            result: Tensor = fused(rotate, heads, *rope)
        else:
            result = fused(norm_rotate, heads, norm.weight, *rope, norm.variance_epsilon)
        return result

    def rotate_backward(self, grad: Tensor, heads: Tensor, norm: Any, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Gradient of ``rotate`` by ``heads``."""
        if norm is None:
            result: Tensor = fused(rotate_backward, grad, *rope)
        else:
            result = fused(norm_rotate_backward, grad, heads, norm.weight, *rope, norm.variance_epsilon)
        return result

    @property
    def norms(self) -> tuple[Any, Any]:
        """The norms of queries and keys, None if the layer has none."""
        return getattr(self.attention, "q_norm", None), getattr(self.attention, "k_norm", None)


@dataclass(slots=True)
class _States:
    """States that the backward needs; None if not kept."""

    qkv: list[Tensor] | None = None
    """Before norm and rotation, each ``(P, heads * D)``."""
    qkv_inner: Tensor | None = None
    attended: tuple[Tensor, ...] | None = None
    """Attention's output, log-sum-exp and two states of its kernel."""
    middle: Tensor | None = None
    """After the attention's residual."""
    gate_up: list[Tensor] | None = None
    gate_up_inner: Tensor | None = None


class FusedLayer(torch.autograd.Function):
    """``(P, hidden)`` to ``(P, hidden)``; gradients of the input and of every adapter weight."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weights: LayerWeights, rope: tuple[Tensor, Tensor], segments: Segments, keep: Keep,
        *adapters: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """``adapters`` are those that ``weights.refresh()`` returned: autograd has to see them."""
        states = states.detach()  # else every kernel is compiled twice, with and without gradient
        computed = _States()
        _fill(computed, states, weights, rope, segments)
        assert computed.gate_up is not None and computed.middle is not None
        (output,), _ = weights.down.forward(fused(swiglu, *computed.gate_up))
        output += computed.middle
        ctx.weights, ctx.rope, ctx.segments, ctx.keep = weights, rope, segments, keep
        ctx.states = (states, _kept(computed, keep))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Recompute what was not kept, then run the layer backward."""
        weights, rope, segments = ctx.weights, ctx.rope, ctx.segments
        states, computed = ctx.states
        ctx.states = None
        _fill(computed, states, weights, rope, segments)
        grad_middle, by_mlp = _mlp_backward(grads[0], computed, weights)
        attended = computed.attended[0].flatten(1)
        grad_attended, by_inner = weights.out.input_gradient([grad_middle])
        by_out = weights.out.adapter_gradients([grad_middle], by_inner, attended)
        grad_qkv = _attention_backward(grad_attended, computed, weights, rope, segments)
        norm = weights.layer.input_layernorm
        normed = fused(rms_norm, states, norm.weight, norm.variance_epsilon)
        grad_normed, by_inner = weights.qkv.input_gradient(grad_qkv)
        by_qkv = weights.qkv.adapter_gradients(grad_qkv, by_inner, normed, computed.qkv_inner)
        grad = fused(add_rms_norm_backward, grad_middle, grad_normed, states, norm.weight, norm.variance_epsilon)
        return grad, None, None, None, None, *by_qkv, *by_out, *by_mlp


def _fill(
    computed: _States, states: Tensor, weights: LayerWeights, rope: tuple[Tensor, Tensor], segments: Segments
) -> None:
    """Compute what is missing in ``computed``."""
    layer, tokens = weights.layer, len(states)
    if computed.qkv is None:
        norm = layer.input_layernorm
        normed = fused(rms_norm, states, norm.weight, norm.variance_epsilon)
        computed.qkv, computed.qkv_inner = weights.qkv.forward(normed)
        del normed
    if computed.attended is None:
        heads = [one.view(tokens, -1, weights.head_dim) for one in computed.qkv]
        query, key = (weights.rotate(one, norm, rope) for one, norm in zip(heads[:2], weights.norms, strict=True))
        computed.attended = varlen_forward(query, key, heads[2], segments, weights.scale)
        del heads, query, key
    if computed.gate_up is None:
        norm = layer.post_attention_layernorm
        if computed.middle is None:
            (update,), _ = weights.out.forward(computed.attended[0].flatten(1))
            computed.middle, normed = fused(add_rms_norm, states, update, norm.weight, norm.variance_epsilon)
        else:
            normed = fused(rms_norm, computed.middle, norm.weight, norm.variance_epsilon)
        computed.gate_up, computed.gate_up_inner = weights.gate_up.forward(normed)


def _kept(computed: _States, keep: Keep) -> _States:
    kept = _States()
    if keep >= Keep.ATTENTION:
        kept.attended = computed.attended
    if keep >= Keep.HIDDEN:
        kept.qkv, kept.qkv_inner, kept.middle = computed.qkv, computed.qkv_inner, computed.middle
    if keep >= Keep.ALL:
        kept.gate_up, kept.gate_up_inner = computed.gate_up, computed.gate_up_inner
    return kept


def _mlp_backward(grad: Tensor, computed: _States, weights: LayerWeights) -> tuple[Tensor, list[Tensor | None]]:
    """From the layer's output back to ``computed.middle``; frees gate and up on the way."""
    assert computed.gate_up is not None and computed.middle is not None
    norm = weights.layer.post_attention_layernorm
    product, by_inner = weights.down.input_gradient([grad])
    grad_gate_up, computed.gate_up = computed.gate_up, None
    fused(swiglu_backward_, product, *grad_gate_up)  # in place: these are the widest states of a layer
    by_down = weights.down.adapter_gradients([grad], by_inner, product)
    del product
    normed = fused(rms_norm, computed.middle, norm.weight, norm.variance_epsilon)
    grad_normed, by_inner = weights.gate_up.input_gradient(grad_gate_up)
    by_gate_up = weights.gate_up.adapter_gradients(grad_gate_up, by_inner, normed, computed.gate_up_inner)
    grad_middle = fused(add_rms_norm_backward, grad, grad_normed, computed.middle, norm.weight, norm.variance_epsilon)
    return grad_middle, by_gate_up + by_down


def _attention_backward(
    grad: Tensor, computed: _States, weights: LayerWeights, rope: tuple[Tensor, Tensor], segments: Segments
) -> list[Tensor]:
    """Gradients of queries, keys and values before norm and rotation, each ``(P, heads * D)``."""
    assert computed.qkv is not None and computed.attended is not None
    heads = [one.view(len(grad), -1, weights.head_dim) for one in computed.qkv]
    query, key = (weights.rotate(one, norm, rope) for one, norm in zip(heads[:2], weights.norms, strict=True))
    saved = (query, key, heads[2], *computed.attended)
    grads = varlen_backward(grad.view_as(computed.attended[0]), saved, segments, weights.scale)
    turned = [
        weights.rotate_backward(one, states, norm, rope)
        for one, states, norm in zip(grads[:2], heads[:2], weights.norms, strict=True)
    ]
    return [one.flatten(1) for one in (*turned, grads[2])]
