"""Draw tokens from logits, one row of the batch per trajectory, independent of the rest of the batch.

Each request owns a generator seeded by ``Request.seed`` and uses one uniform number per token: the token is the first
whose cumulative probability exceeds it (inverse CDF). The i-th token of a request thus depends only on its seed and
logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emailrl.engines.base import SamplingParams

UNIFORMS_PER_DRAW = 64
"""Numbers drawn from a generator at a time; changing it changes the samples of every seed."""


class Uniforms:
    """An endless stream of uniform numbers in [0, 1 − 2⁻²⁴], determined by the seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._row: list[float] = []
        self._next = UNIFORMS_PER_DRAW

    def draw(self) -> float:
        """The next number."""
        if self._next == UNIFORMS_PER_DRAW:
            self._row = torch.rand(UNIFORMS_PER_DRAW, generator=self._generator).tolist()
            self._next = 0
        self._next += 1
        return self._row[self._next - 1]


def sample(
    logits: Tensor, sampling: Sequence[SamplingParams], uniforms: Sequence[Uniforms]
) -> tuple[list[int], list[float]]:
    """One token per row of ``logits`` (rows, vocabulary), and its log-probability.

    Log-probabilities are natural, float32, after temperature and before top-p / top-k; at temperature 0 the token is
    the first of the most likely ones and its log-probability that of the untempered distribution.
    """
    logits = logits.float()
    greedy = [params.temperature == 0 for params in sampling]
    if not all(greedy):
        temperatures = [params.temperature or 1.0 for params in sampling]
        if any(temperature != 1 for temperature in temperatures):
            logits = logits / logits.new_tensor(temperatures)[:, None]
    logprobs = logits.log_softmax(-1)
    best = logprobs.argmax(-1)
    if all(greedy):
        tokens = best
    else:
        draws = [0.0 if chosen else row.draw() for chosen, row in zip(greedy, uniforms, strict=True)]
        tokens = _inverse_cdf(_filtered(logprobs.exp(), sampling), draws)
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=tokens.device), best, tokens)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()


def _inverse_cdf(probs: Tensor, draws: list[float]) -> Tensor:
    # Float64: a float32 running sum over 150,000 words loses the rare ones, and u · total must stay below the total.
    cdf = probs.double().cumsum(-1)
    targets = cdf.new_tensor(draws)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, targets, right=True)[:, 0]


def _filtered(probs: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Zero the probabilities outside each row's top-k, then outside the nucleus of the rest."""
    rows = [row for row, params in enumerate(sampling) if params.temperature and (params.top_k or params.top_p < 1)]
    if not rows:
        return probs
    vocabulary = probs.shape[-1]
    ordered, order = probs[rows].sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([sampling[row].top_k or vocabulary for row in rows], device=probs.device)
    # In float32, 1e-50 would be 0 and no token the first.
    top_p = torch.tensor([sampling[row].top_p for row in rows], dtype=torch.float64, device=probs.device)
    kept = ordered * (torch.arange(vocabulary, device=probs.device) < top_k[:, None])
    # A token stays while the mass before it is below top_p: the one that crosses the line is the last kept.
    before = kept.double().cumsum(-1) - kept
    kept = kept * (before < top_p[:, None] * kept.sum(-1, keepdim=True, dtype=torch.float64))
    probs = probs.clone()
    probs[rows] = torch.zeros_like(ordered).scatter(1, order, kept)
    return probs
