"""The memory-bound parts of a decoder layer, each with its backward written out; ``fused`` makes one kernel of each.

Rows are tokens. Norms have frozen weights: no gradient of them is taken. Arithmetic is in float32, or in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019), rounded before the weight as transformers does."""
    wide = _wide(states)
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(states.dtype)


def rms_norm_backward(grad: Tensor, states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gradient of ``rms_norm`` by ``states``."""
    wide, scaled = _wide(states), _wide(grad) * _wide(weight)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * inverse
    return (inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(states.dtype)


def add_rms_norm(states: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``states + update``, and its ``rms_norm``."""
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
    """Gradient of ``rotate`` by ``heads``."""
    first, second = (grad * sin[:, None]).chunk(2, dim=-1)
    return grad * cos[:, None] + torch.cat((second, -first), dim=-1)


def norm_rotate(heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """``rotate`` of the ``rms_norm`` of each head, as in Qwen3."""
    return rotate(rms_norm(heads, weight, eps), cos, sin)


def norm_rotate_backward(grad: Tensor, heads: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Gradient of ``norm_rotate`` by ``heads``."""
    return rms_norm_backward(rotate_backward(_wide(grad), _wide(cos), _wide(sin)), heads, weight, eps)


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
