"""Forward passes over conversations: what is new of their prompts read into the cache, then a token sampled for each.

Logits exist at sampled positions only: a prompt is read without the LM head up to its last token, and the last token
goes through the same step as every sampled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from emailrl.engines.attention import causal_mask
from emailrl.engines.budget import PREFILL_TOKENS
from emailrl.engines.kv_cache import BlockCache, Filled
from emailrl.engines.sampling import sample
from emailrl.engines.schedule import Conversation
from emailrl.engines.weights import Weights, device_of

PASS_TOKENS = {"cpu": 48, "cuda": 4096}
"""So many tokens cost as much as one more pass: less padding is borne."""


class Passes:
    """Runs the model of ``weights`` over conversations whose tables in ``cache`` reach their tokens.

    ``max_model_len`` bounds positions, ``max_pass_tokens`` (None: ``PREFILL_TOKENS``) the tokens of prompts that one
    pass reads.
    """

    def __init__(
        self, weights: Weights, cache: BlockCache, *, max_model_len: int, max_pass_tokens: int | None = None
    ) -> None:
        self._weights = weights
        self._cache = cache
        device = "cpu" if device_of(weights.model).type == "cpu" else "cuda"
        self._prefill_tokens = max_pass_tokens or PREFILL_TOKENS[device]
        self._pass_tokens = PASS_TOKENS[device]
        self._last_position = max_model_len - 1

    def read(self, running: Sequence[Conversation]) -> None:
        """Fill the cache with all tokens but the last, what conversations have in common before it is needed."""
        unread = [each for each in running if each.unread]
        while unread:
            ready = [each for each in unread if each.source is None or each.source.held >= each.held]
            assert ready, "sources run, and come before those who share with them"
            waiting = [each for each in unread if each not in ready]
            while ready:
                self.read_shortest(ready)
                ready = [each for each in ready if each.unread]
            unread = waiting

    def read_shortest(self, unread: Sequence[Conversation]) -> None:
        """One pass over the shortest of what is unread."""
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
        """Sample one token for every running conversation; returns them, the shortest first."""
        rows = sorted(running, key=lambda row: row.held)
        if not rows:
            return []
        inputs = self._inputs(rows, [row.tokens[-1:] for row in rows], fills=False)
        logits = self._weights.model(**inputs, logits_to_keep=1).logits[:, -1]
        tokens, logprobs = sample(logits, [row.request.sampling for row in rows], [row.uniforms for row in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            row.held += 1
            row.tokens.append(token)
            row.logprobs.append(logprob)
        return rows

    def _inputs(self, rows: Sequence[Conversation], ids: list[list[int]], *, fills: bool) -> dict[str, Any]:
        """The model's arguments for a pass over new tokens, the shortest conversation first; the cache is told."""
        device = device_of(self._weights.model)
        starts = [row.held for row in rows]
        positions = self._cache.place([row.blocks for row in rows], starts, len(ids[0]), device, fills=fills)
        return {
            "input_ids": torch.tensor(ids, device=device),
            "attention_mask": causal_mask(positions, self._cache.window, self._weights.model.dtype),
            "position_ids": positions.clamp(max=self._last_position),  # padding may point beyond
            "past_key_values": self._cache,
            "use_cache": True,
        }
