"""Log-probabilities from hidden states with a frozen vocabulary projection: two matrix products instead of three.

The log-probability of one token is one number, so its gradient by the hidden state is a vector fixed in the forward
pass, scaled in the backward. It is computed while a chunk's logits exist; no logits are kept or computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from emailrl.model.fused.elementwise import fused, log_softmax_at
from emailrl.model.layout import CHUNK_ELEMENTS


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad[0]
        slopes = torch.empty_like(hidden) if needed else None
        logprobs, entropies = [], []
        chunk = max(CHUNK_ELEMENTS // len(weight), 1)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logprob, entropy, by_logits = fused(log_softmax_at, hidden[part] @ weight.T, labels[part], temperature)
            logprobs.append(logprob)
            entropies.append(entropy)
            if slopes is not None:
                torch.mm(by_logits, weight, out=slopes[part])
        if slopes is not None:
            ctx.save_for_backward(slopes)
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grads[0][:, None].to(slopes.dtype), None, None, None


def fused_logprobs(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``labels`` ``(P,)`` and entropies (without a gradient) from ``hidden`` ``(P, hidden)``.

    ``weight`` ``(vocabulary, hidden)`` is the frozen output embedding.
    """
    logprobs, entropies = _Head.apply(hidden, weight, labels, temperature)
    return logprobs, entropies
