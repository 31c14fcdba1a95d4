"""Decoder layers (Llama's shape, with or without Qwen3's head norms) for training adapters or all weights on a GPU: one
autograd function a layer, its backward written out, and the backbone that runs packed rows through them. ``Keep`` sets
what the forward pass keeps for the backward; the rest is recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from emailrl.model.layout import Checkpointing, Keep, choose_keep, free_memory, numbers_for
from emailrl.model.lora import backbone, causal_lm
from emailrl.model.packing import PackedRow, Segments, varlen_backward, varlen_forward
from emailrl.model.shard import class_name, gathering


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019), rounded before the weight as transformers does."""
    return weight * _normed(states, eps)


def _normed(states: Tensor, eps: float) -> Tensor:
    wide = _wide(states)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(states.dtype)


def rms_norm_backward(grad: Tensor, states: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, scaled = _wide(states), _wide(grad) * _wide(weight)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * inverse
    return (inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(states.dtype)


def rms_norm_weight_gradient(grad: Tensor, states: Tensor, eps: float) -> Tensor:
    """Gradient of ``rms_norm``'s weight, summed over all leading dimensions in float32."""
    return (_wide(grad) * _wide(_normed(states, eps))).flatten(0, -2).sum(0)


def add_rms_norm(states: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = states + update
    return total, rms_norm(total, weight, eps)


def add_rms_norm_backward(skip: Tensor, grad: Tensor, states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gradient at a residual branch: ``skip`` flows past the norm, ``grad`` comes out of it."""
    return skip + rms_norm_backward(grad, states, weight, eps)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``heads`` ``(P, heads, D)`` by ``cos``, ``sin`` ``(P, D)``; pairs are half a head apart."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def rotate_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = (grad * sin[:, None]).chunk(2, dim=-1)
    return grad * cos[:, None] + torch.cat((second, -first), dim=-1)


def norm_rotate(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """``rotate`` of the ``rms_norm`` of each head, as in Qwen3."""
    return rotate(rms_norm(heads, weight, eps), cos, sin)


def norm_rotate_backward(grad: Tensor, heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rms_norm_backward(rotate_backward(_wide(grad), _wide(cos), _wide(sin)), heads, weight, eps)


def norm_rotate_weight_gradient(grad: Tensor, heads: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rms_norm_weight_gradient(rotate_backward(_wide(grad), _wide(cos), _wide(sin)), heads, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020)."""
    wide = _wide(gate)
    return (wide * torch.sigmoid(wide)).to(gate.dtype) * up


def swiglu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """Turn ``gate`` and ``up`` into ``swiglu``'s gradients by them, and ``grad`` into its value, where they stand."""
    wide, wide_up, wide_grad = _wide(gate), _wide(up), _wide(grad)
    sigmoid = torch.sigmoid(wide)
    silu = wide * sigmoid
    product, by_up = silu * wide_up, wide_grad * silu
    gate.copy_(wide_grad * wide_up * sigmoid * (1 + wide - silu))
    up.copy_(by_up)
    grad.copy_(product)


def log_softmax_at(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each label ``(P,)`` at ``temperature``, the entropy, and d log-probability / d logits."""
    tempered = _wide(logits) / temperature
    log_norm = tempered.logsumexp(-1)
    probabilities = (tempered - log_norm[:, None]).exp()
    entropy = log_norm - (probabilities * tempered).sum(-1)
    picked = torch.arange(logits.shape[-1], device=logits.device) == labels[:, None]
    logprobs = tempered.gather(-1, labels[:, None])[:, 0] - log_norm
    return logprobs, entropy, ((picked.to(tempered.dtype) - probabilities) / temperature).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def fused(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call ``function``, compiled into one kernel where the first input is on a GPU; no autograd inside."""
    return (_compiled(function) if inputs[0].is_cuda else function)(*inputs)


Parameters = tuple[nn.Parameter, nn.Parameter, float]  # a LoRA's A ``(r, in)``, B ``(out, r)`` and scale
Gradients = dict[Tensor, Tensor]  # of each trained weight


def linear_of(module: Any) -> nn.Linear:
    """The base model's layer in ``module``, a PEFT LoRA layer or a bare one."""
    return module.base_layer if hasattr(module, "base_layer") else module


def adapter_of(module: Any) -> Parameters | None:
    """The active LoRA of ``module``; None if there is none or it is disabled."""
    if not hasattr(module, "lora_A") or module.disable_adapters:
        return None
    (name,) = module.active_adapters
    if name not in module.lora_A:
        return None
    return module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name])


class Projections:
    """Weights and adapters (``adapter_of`` each) of layers that read the same input, ready to multiply."""

    def __init__(self, modules: list[Any], adapters: list[Parameters | None]) -> None:
        self.linears, self.adapters = [linear_of(module) for module in modules], adapters
        dtype, downs, start = self.linears[0].weight.dtype, [], 0
        self.ups: list[tuple[Tensor, float, slice] | None] = []
        """s·B of each layer ``(out, r)`` in the base's type, s, and which rows of ``down`` belong to it."""
        for adapter in adapters:
            if adapter is None:
                self.ups.append(None)
                continue
            down, up, scale = adapter
            self.ups.append(((up.detach() * scale).to(dtype), scale, slice(start, start + len(down))))
            downs.append(down.detach())
            start += len(down)
        self.down = torch.cat(downs).to(dtype) if downs else None  # all A stacked, ``(sum of ranks, in)``

    def forward(self, states: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return each layer's output for ``states`` ``(P, in)``, and ``x A^T`` for the backward."""
        inner = None if self.down is None else states @ self.down.T
        outputs = [nn.functional.linear(states, linear.weight, linear.bias) for linear in self.linears]
        for output, up in zip(outputs, self.ups, strict=True):
            if inner is not None and up is not None:
                output.addmm_(inner[:, up[2]], up[0].T)
        return outputs, inner

    def input_gradient(self, grads: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """From the outputs' gradients, return that of the shared input and that of ``x A^T``."""
        by_states = grads[0] @ self.linears[0].weight
        for grad, linear in zip(grads[1:], self.linears[1:], strict=True):
            by_states.addmm_(grad, linear.weight)
        if self.down is None:
            return by_states, None
        by_inner = by_states.new_empty(len(by_states), len(self.down))
        for grad, up in zip(grads, self.ups, strict=True):
            if up is not None:
                torch.mm(grad, up[0], out=by_inner[:, up[2]])
        return by_states.addmm_(by_inner, self.down), by_inner

    def note_gradients(
        self,
        found: Gradients,
        grads: list[Tensor],
        by_inner: Tensor | None,
        states: Tensor,
        inner: Tensor | None = None,
    ) -> None:
        """Add to ``found`` the gradients of all trained weights, A's and B's in float32. ``inner`` is ``x A^T`` if the
        caller still has it."""
        if self.down is not None and by_inner is not None:
            inner = states @ self.down.T if inner is None else inner
            by_down = _wide_product(by_inner.T, states)
            for grad, adapter, up in zip(grads, self.adapters, self.ups, strict=True):
                if adapter is not None and up is not None:
                    found[adapter[0]] = by_down[up[2]]
                    found[adapter[1]] = _wide_product(grad.T, inner[:, up[2]]).mul_(up[1])
        for grad, linear in zip(grads, self.linears, strict=True):
            if linear.weight.requires_grad:
                found[linear.weight] = grad.T @ states
            if linear.bias is not None and linear.bias.requires_grad:
                found[linear.bias] = grad.sum(0)


def _wide_product(first: Tensor, second: Tensor) -> Tensor:
    """Product of half-precision matrices in float32, in which the sum over tokens is accumulated anyway."""
    if first.is_cuda and first.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(first, second, out_dtype=torch.float32)
    return first @ second


QKV, OUT, GATE_UP, DOWN = slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)  # in ``LayerWeights.modules``


class LayerWeights:
    """The weights of a transformers decoder layer, its adapters in the base's type as of the last ``refresh``."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.layer = layer
        self.modules = [
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            mlp.gate_proj, mlp.up_proj, mlp.down_proj,
        ]  # fmt: skip
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.trained = [one for name, one in layer.named_parameters() if one.requires_grad and "lora_" not in name]
        self._seen: tuple[Any, ...] | None = None

    def refresh(self) -> list[Tensor]:
        """Read the current adapters; returns all trained weights. Changes are detected by tensor version, which torch's
        fused optimizers (``fused=True``) do not increment."""
        adapters = [adapter_of(module) for module in self.modules]
        flat = [one for adapter in adapters if adapter is not None for one in adapter[:2]]
        seen = tuple((id(one), one.data_ptr(), one._version) for one in flat)
        if seen != self._seen:
            self.qkv, self.out, self.gate_up, self.down = (
                Projections(self.modules[part], adapters[part]) for part in (QKV, OUT, GATE_UP, DOWN)
            )
            self._seen = seen
        return flat + self.trained

    def forward(self, states: Tensor, rope: tuple[Tensor, Tensor], segments: Segments, keep: Keep) -> Tensor:
        """Run the layer with its current adapters on ``states`` ``(P, hidden)``."""
        return FusedLayer.apply(states, self, rope, segments, keep, *self.refresh())

    def heads(self, qkv: list[Tensor], rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``(P, heads, D)`` in attention's layout."""
        heads = [one.view(len(one), -1, self.head_dim) for one in qkv]
        for at, norm in enumerate(self.norms):
            if norm is None:
                heads[at] = fused(rotate, heads[at], *rope)
            else:
                heads[at] = fused(norm_rotate, heads[at], norm.weight, *rope, norm.variance_epsilon)
        return heads[0], heads[1], heads[2]

    def rotate_backward(
        self, grad: Tensor, heads: Tensor, norm: Any, rope: tuple[Tensor, Tensor], found: Gradients
    ) -> Tensor:
        if norm is None:
            return fused(rotate_backward, grad, *rope)
        if norm.weight.requires_grad:
            found[norm.weight] = fused(norm_rotate_weight_gradient, grad, heads, *rope, norm.variance_epsilon)
        return fused(norm_rotate_backward, grad, heads, norm.weight, *rope, norm.variance_epsilon)


def note_norm(found: Gradients, norm: Any, grad: Tensor, states: Tensor) -> None:
    """Add the gradient of a trained norm's weight."""
    if norm.weight.requires_grad:
        found[norm.weight] = fused(rms_norm_weight_gradient, grad, states, norm.variance_epsilon)


@dataclass(slots=True)
class _States:
    """States that the backward needs; None if not kept."""

    qkv: list[Tensor] | None = None  # before norm and rotation, each ``(P, heads * D)``
    qkv_inner: Tensor | None = None
    attended: tuple[Tensor, ...] | None = None  # attention's output, log-sum-exp and two states of its kernel
    middle: Tensor | None = None  # after the attention's residual
    gate_up: list[Tensor] | None = None
    gate_up_inner: Tensor | None = None


class FusedLayer(torch.autograd.Function):
    """``(P, hidden)`` to ``(P, hidden)``; gradients of the input and of every trained weight."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weights: LayerWeights, rope: tuple[Tensor, Tensor], segments: Segments, keep: Keep,
        *trained: Tensor,
    ) -> Tensor:  # fmt: skip
        """``trained`` are those that ``weights.refresh()`` returned: autograd has to see them."""
        states = states.detach()  # else every kernel is compiled twice, with and without gradient
        computed = _States()
        _fill(computed, states, weights, rope, segments)
        assert computed.gate_up is not None and computed.middle is not None
        (output,), _ = weights.down.forward(fused(swiglu, *computed.gate_up))
        output += computed.middle
        if keep < Keep.ALL:
            computed.gate_up = computed.gate_up_inner = None
        if keep < Keep.HIDDEN:
            computed.qkv = computed.qkv_inner = computed.middle = None
        if keep < Keep.ATTENTION:
            computed.attended = None
        ctx.weights, ctx.rope, ctx.segments, ctx.trained = weights, rope, segments, trained
        ctx.states = states, computed
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Recompute what was not kept, then run the layer backward."""
        weights, rope, segments = ctx.weights, ctx.rope, ctx.segments
        states, computed = ctx.states
        ctx.states, found = None, Gradients()
        _fill(computed, states, weights, rope, segments)
        grad_middle = _mlp_backward(grads[0], computed, weights, found)
        attended = computed.attended[0].flatten(1)
        grad_attended, by_inner = weights.out.input_gradient([grad_middle])
        weights.out.note_gradients(found, [grad_middle], by_inner, attended)
        grad_qkv = _attention_backward(grad_attended, computed, weights, rope, segments, found)
        norm = weights.layer.input_layernorm
        normed = fused(rms_norm, states, norm.weight, norm.variance_epsilon)
        grad_normed, by_inner = weights.qkv.input_gradient(grad_qkv)
        weights.qkv.note_gradients(found, grad_qkv, by_inner, normed, computed.qkv_inner)
        note_norm(found, norm, grad_normed, states)
        grad = fused(add_rms_norm_backward, grad_middle, grad_normed, states, norm.weight, norm.variance_epsilon)
        return grad, None, None, None, None, *map(found.get, ctx.trained)


def _fill(
    computed: _States, states: Tensor, weights: LayerWeights, rope: tuple[Tensor, Tensor], segments: Segments
) -> None:
    if computed.qkv is None:
        norm = weights.layer.input_layernorm
        normed = fused(rms_norm, states, norm.weight, norm.variance_epsilon)
        computed.qkv, computed.qkv_inner = weights.qkv.forward(normed)
        del normed
    if computed.attended is None:
        computed.attended = varlen_forward(*weights.heads(computed.qkv, rope), segments, weights.scale)
    if computed.gate_up is None:
        norm = weights.layer.post_attention_layernorm
        if computed.middle is None:
            (update,), _ = weights.out.forward(computed.attended[0].flatten(1))
            computed.middle, normed = fused(add_rms_norm, states, update, norm.weight, norm.variance_epsilon)
        else:
            normed = fused(rms_norm, computed.middle, norm.weight, norm.variance_epsilon)
        computed.gate_up, computed.gate_up_inner = weights.gate_up.forward(normed)


def _mlp_backward(grad: Tensor, computed: _States, weights: LayerWeights, found: Gradients) -> Tensor:
    """From the layer's output back to ``computed.middle``; frees gate and up on the way."""
    assert computed.gate_up is not None and computed.middle is not None
    norm = weights.layer.post_attention_layernorm
    product, by_inner = weights.down.input_gradient([grad])
    grad_gate_up, computed.gate_up = computed.gate_up, None
    fused(swiglu_backward_, product, *grad_gate_up)  # in place: these are the widest states of a layer
    weights.down.note_gradients(found, [grad], by_inner, product)
    del product
    normed = fused(rms_norm, computed.middle, norm.weight, norm.variance_epsilon)
    grad_normed, by_inner = weights.gate_up.input_gradient(grad_gate_up)
    weights.gate_up.note_gradients(found, grad_gate_up, by_inner, normed, computed.gate_up_inner)
    note_norm(found, norm, grad_normed, computed.middle)
    return fused(add_rms_norm_backward, grad, grad_normed, computed.middle, norm.weight, norm.variance_epsilon)


def _attention_backward(
    grad: Tensor, computed: _States, weights: LayerWeights, rope: tuple[Tensor, Tensor], segments: Segments,
    found: Gradients,
) -> list[Tensor]:  # fmt: skip
    """Gradients of queries, keys and values before norm and rotation, each ``(P, heads * D)``."""
    assert computed.qkv is not None and computed.attended is not None
    saved = (*weights.heads(computed.qkv, rope), *computed.attended)
    by_query, by_key, by_value = varlen_backward(grad.view_as(saved[3]), saved, segments, weights.scale)
    turned = [
        weights.rotate_backward(one, states.view_as(one), norm, rope, found)
        for one, states, norm in zip((by_query, by_key), computed.qkv, weights.norms, strict=False)
    ]
    return [one.flatten(1) for one in (*turned, by_value)]


LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
"""transformers' decoder layers with the structure that ``FusedLayer`` implements."""


class FusedBackbone:
    """Runs packed rows through a transformers model's layers, with their current adapters at each call."""

    def __init__(self, backbone: Any, checkpointing: Checkpointing) -> None:
        """For a model that ``why_not_fused`` does not reject."""
        self.backbone, self.checkpointing = backbone, checkpointing
        self.layers = [LayerWeights(layer) for layer in backbone.layers]
        query, key, _, _, gate, *_ = (linear_of(module).weight for module in self.layers[0].modules)
        self.widths = {"hidden": query.shape[1], "queries": query.shape[0], "keys": key.shape[0], "ffn": gate.shape[0]}
        self.itemsize = query.dtype.itemsize
        self.run = gathering(backbone, self._forward)
        self._run_layers = [gathering(weights.layer, weights.forward) for weights in self.layers]

    def _forward(self, packed: PackedRow) -> Tensor:
        """Hidden states after the final norm where a trained token is predicted, ``(num_trained, hidden)``."""
        states = self.backbone.embed_tokens(packed.token_ids)[0]
        cos, sin = (one[0] for one in self.backbone.rotary_emb(states[None], packed.position_ids))
        keep = self.keep_for(len(states), states.device)
        for run in self._run_layers:
            states = run(states, (cos, sin), packed.segments, keep)
        return self.backbone.norm(states.index_select(0, packed.gather))

    def keep_for(self, num_tokens: int, device: torch.device) -> Keep:
        """What each layer keeps of a row of ``num_tokens``: as set, or with ``auto`` the most that memory holds."""
        limited = self.checkpointing == "auto" and device.type == "cuda"
        free = free_memory(device) if limited else math.inf
        return choose_keep(self.checkpointing, free, {keep: self.bytes_for(num_tokens, keep) for keep in Keep})

    def bytes_for(self, num_tokens: int, keep: Keep) -> int:
        """Bytes of what the layers keep for the backward of ``num_tokens``, and of one active layer."""
        return num_tokens * self.itemsize * numbers_for(keep, layers=len(self.layers), **self.widths)


def why_not_fused(backbone: Any) -> str | None:
    """Why a transformers backbone, bare or with LoRA, cannot run as fused layers; None if it can."""
    layers = list(getattr(backbone, "layers", []))
    names = {class_name(layer) for layer in layers}
    if not names or not names <= LAYERS:
        return f"its layers are {', '.join(sorted(names)) or 'not found'}"
    if backbone.config.hidden_act != "silu":
        return f"its activation is {backbone.config.hidden_act}"
    if getattr(backbone.config, "attention_dropout", 0.0):
        return "its attention has dropout"
    for module in (module for layer in layers for module in LayerWeights(layer).modules):
        linear = linear_of(module)
        if type(linear) is not nn.Linear:
            return f"a layer is {type(linear).__name__} (quantized?)"
        if not hasattr(module, "lora_A"):
            continue
        if module.merged or len(module.active_adapters) != 1:
            return "its adapters are merged, or several are active"
        (name,) = module.active_adapters
        if getattr(module, "use_dora", {}).get(name) or getattr(module, "lora_variant", {}).get(name):
            return "its adapter is not plain LoRA"
        if not isinstance(module.lora_dropout[name], nn.Identity):
            return "its LoRA has dropout"
        if adapter_of(module) is None or (module.lora_A[name].bias, module.lora_B[name].bias) != (None, None):
            return "its LoRA has biases"
    return None


def enable_fused(model: Any, checkpointing: Checkpointing) -> str | None:
    """Let ``token_logprobs`` run packed rows of ``model`` through fused layers; returns the reason if it cannot."""
    base, layers = causal_lm(model), backbone(model)
    if (reason := why_not_fused(layers)) is None:
        base.emailrl_fused = FusedBackbone(layers, checkpointing)
    return reason


def disable_fused(model: Any) -> None:
    """Remove the fused layers: a copy of a model must not compute with those of its original."""
    vars(causal_lm(model)).pop("emailrl_fused", None)


def fused_backbone(model: Any) -> FusedBackbone | None:
    """The fused layers of ``model``, if ``enable_fused`` added them."""
    return getattr(causal_lm(model), "emailrl_fused", None)
