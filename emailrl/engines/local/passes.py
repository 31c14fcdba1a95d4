"""Forward passes over conversations: prefill new prompt tokens into the cache, then sample one token for each.

Logits exist at sampled positions only: a prompt is read without the LM head up to its last token, and the last token
goes through the same step as every sampled one.

A token is the first whose cumulative probability exceeds the request's next uniform number (inverse CDF), so the i-th
token of a request depends only on its seed and logits, not on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from emailrl.engines.base import SamplingParams
from emailrl.engines.budget import PREFILL_TOKENS
from emailrl.engines.local.cache import BlockCache, Filled, causal_mask
from emailrl.engines.local.schedule import Conversation, Uniforms
from emailrl.engines.local.weights import Weights, device_of

PASS_TOKENS = {"cpu": 48, "cuda": 4096}
"""Padding allowed per pass: this many tokens cost as much as one more pass."""


class Passes:
    """Runs the model of ``weights`` over conversations whose tables in ``cache`` cover their tokens.

    ``max_model_len`` bounds positions, ``max_pass_tokens`` (None: ``PREFILL_TOKENS``) the prompt tokens per pass.
    """

    def __init__(
        self,
        weights: Weights,
        cache: BlockCache,
        *,
        max_model_len: int,
        max_pass_tokens: int | None = None,
    ) -> None:
        self._weights = weights
        self._cache = cache
        device = "cpu" if device_of(weights.model).type == "cpu" else "cuda"
        self._prefill_tokens = max_pass_tokens or PREFILL_TOKENS[device]
        self._pass_tokens = PASS_TOKENS[device]
        self._last_position = max_model_len - 1

    def read(self, running: Sequence[Conversation]) -> None:
        """Fill the cache with all tokens but the last, shared prefixes first."""
        unread = [each for each in running if each.unread]
        while unread:
            ready = [each for each in unread if each.is_shared_read]
            assert ready, "sources are running and precede the conversations that share their blocks"
            waiting = [each for each in unread if each not in ready]
            while ready:
                self.read_shortest(ready)
                ready = [each for each in ready if each.unread]
            unread = waiting
        for each in running:
            each.source = None  # it may end before the next read

    def read_shortest(self, unread: Sequence[Conversation]) -> None:
        """One pass over the shortest unread prompts."""
        first, *others = sorted(unread, key=lambda row: row.unread)
        rows = [first]
        total = first.unread
        for row in others:
            total += row.unread
            padded = (len(rows) + 1) * row.unread
            if padded > self._prefill_tokens or padded - total > self._pass_tokens:
                break
            rows.append(row)
        new = min(rows[-1].unread, self._prefill_tokens)
        rows.sort(key=lambda row: row.held)
        ids = [row.tokens[row.held :][: min(row.unread, new)] for row in rows]
        with suppress(Filled):
            inputs = self._inputs(rows, [piece + [0] * (new - len(piece)) for piece in ids], fills=True)
            self._weights.model.get_decoder()(**inputs)
        for row, piece in zip(rows, ids, strict=True):
            row.held += len(piece)

    def sample_next(self, running: Sequence[Conversation]) -> list[Conversation]:
        """Sample one token for every conversation; returns them, the shortest first."""
        rows = sorted(running, key=lambda row: row.held)
        logits = self._logits(rows)
        tokens, logprobs = sample(logits, [row.request.sampling for row in rows], [row.uniforms for row in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.held += 1
            row.tokens.append(token)
            row.logprobs.append(logprob)
        return rows

    def _logits(self, rows: Sequence[Conversation]) -> Tensor:
        """The model's logits after the last token of each row [rows, vocabulary]."""
        inputs = self._inputs(rows, [row.tokens[-1:] for row in rows], fills=False)
        plain: Tensor = self._weights.model(**inputs, logits_to_keep=1).logits
        return plain[:, -1]

    def _inputs(self, rows: Sequence[Conversation], ids: list[list[int]], *, fills: bool) -> dict[str, Any]:
        """Place a pass over new tokens, shortest conversation first, in the cache; returns the model's arguments."""
        device = device_of(self._weights.model)
        starts = [row.held for row in rows]
        positions = self._cache.place([row.blocks for row in rows], starts, len(ids[0]), device, fills=fills)
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": causal_mask(positions, self._cache.window, self._weights.model.dtype),
            "position_ids": positions.clamp(max=self._last_position),  # padding may exceed it
            "past_key_values": self._cache,
            "use_cache": True,
        }


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
