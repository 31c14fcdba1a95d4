"""Linear layers with LoRA that share one input, forward and backward, in the base's own precision.

    y_i = x W_i^T + b_i + s (x A_i^T) B_i^T

PEFT computes the second term in float32 where the adapter is float32, on a float32 copy of ``x``. Here the adapter's
float32 weights are masters: products run in the base's type, only the adapter's gradients come out in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Parameters = tuple[nn.Parameter, nn.Parameter, float]
"""A LoRA's A ``(r, in)``, B ``(out, r)`` and scale."""


def linear_of(module: Any) -> nn.Linear:
    """The frozen layer in ``module``, a PEFT LoRA layer or a bare one."""
    linear: nn.Linear = module.base_layer if hasattr(module, "base_layer") else module
    return linear


def adapter_of(module: Any) -> Parameters | None:
    """The active LoRA of ``module``; None if there is none or it is disabled."""
    if not hasattr(module, "lora_A") or module.disable_adapters:
        return None
    (name,) = module.active_adapters
    if name not in module.lora_A:
        return None
    return module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name])


@dataclass(frozen=True, slots=True)
class Projections:
    """Frozen weights and adapters of layers that read the same input, ready to multiply."""

    linears: list[nn.Linear]
    scales: list[float | None]
    """None for a layer without an adapter."""
    down: Tensor | None
    """All A stacked, ``(sum of ranks, in)``, in the base's type."""
    up: list[Tensor | None]
    """s·B of each layer ``(out, r)``, in the base's type."""
    slices: list[slice | None]
    """Which rows of ``down`` belong to each layer."""

    @classmethod
    def of(cls, modules: list[Any], adapters: list[Parameters | None]) -> Projections:
        """``adapters`` are ``adapter_of`` each of the ``modules``."""
        linears = [linear_of(module) for module in modules]
        dtype = linears[0].weight.dtype
        slices: list[slice | None] = []
        start = 0
        for adapter in adapters:
            rank = 0 if adapter is None else adapter[0].shape[0]
            slices.append(slice(start, start + rank) if adapter is not None else None)
            start += rank
        downs = [adapter[0].detach() for adapter in adapters if adapter is not None]
        return cls(
            linears=linears,
            scales=[None if adapter is None else adapter[2] for adapter in adapters],
            down=torch.cat(downs).to(dtype) if downs else None,
            up=[None if one is None else (one[1].detach() * one[2]).to(dtype) for one in adapters],
            slices=slices,
        )

    def forward(self, states: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return each layer's output for ``states`` ``(P, in)``, and ``x A^T`` for the backward."""
        inner = None if self.down is None else states @ self.down.T
        outputs = []
        for linear, up, part in zip(self.linears, self.up, self.slices, strict=True):
            output = nn.functional.linear(states, linear.weight, linear.bias)
            if inner is not None and up is not None:
                output.addmm_(inner[:, part], up.T)
            outputs.append(output)
        return outputs, inner

    def input_gradient(self, grads: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """From the outputs' gradients, return that of the shared input and that of ``x A^T``."""
        by_states = grads[0] @ self.linears[0].weight
        for grad, linear in zip(grads[1:], self.linears[1:], strict=True):
            by_states.addmm_(grad, linear.weight)
        if self.down is None:
            return by_states, None
        by_inner = by_states.new_empty(len(by_states), len(self.down))
        for grad, up, part in zip(grads, self.up, self.slices, strict=True):
            if up is not None:
                torch.mm(grad, up, out=by_inner[:, part])
        return by_states.addmm_(by_inner, self.down), by_inner

    def adapter_gradients(
        self, grads: list[Tensor], by_inner: Tensor | None, states: Tensor, inner: Tensor | None = None
    ) -> list[Tensor | None]:
        """Return the gradients of A and B of each layer, one after the other, in float32; None without an adapter.

        ``inner`` is ``x A^T`` if the caller still has it.
        """
        if self.down is None or by_inner is None:
            return [None, None] * len(grads)
        inner = states @ self.down.T if inner is None else inner
        by_down = _wide_product(by_inner.T, states)
        flat: list[Tensor | None] = []
        for grad, scale, part in zip(grads, self.scales, self.slices, strict=True):
            if scale is None or part is None:
                flat += [None, None]
            else:
                flat += [by_down[part], _wide_product(grad.T, inner[:, part]).mul_(scale)]
        return flat


def _wide_product(first: Tensor, second: Tensor) -> Tensor:
    """Product of half-precision matrices in float32, in which the sum over tokens is accumulated anyway."""
    if first.is_cuda and first.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(first, second, out_dtype=torch.float32)
    return first @ second
