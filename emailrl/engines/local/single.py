"""The in-process engine for models that remember more than keys and values of all tokens, or do more with them: sliding
windows, linear attention, convolutions, attention sinks, Mamba. It samples one trajectory at a time, with the model's
own layers and the cache that transformers makes for them, kept from turn to turn: correct, and slower than batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emailrl.base.errors import EmailRLError
from emailrl.engines.base import Advance, Completion, Ended, Request
from emailrl.engines.budget import FREE_SHARE, GIB, PREFILL_TOKENS
from emailrl.engines.local.engine import InProcess
from emailrl.engines.local.passes import Conversation, sample, sampling_weights
from emailrl.model.layout import free_memory
from emailrl.model.logprobs import check_projection, projection
from emailrl.model.lora import backbone


class SingleEngine(InProcess):
    """Samples as ``TransformersEngine`` does, with its arguments; ``cache_bytes`` bounds the one trajectory's cache.
    Raises EmailRLError for a model that computes its logits in an unknown way, or keeps no cache."""

    def __init__(
        self,
        model: nn.Module,
        stop_ids: Collection[int],
        *,
        max_model_len: int | None = None,
        max_pass_tokens: int | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        check_projection(model)
        super().__init__(sampling_weights(model), stop_ids, max_model_len, cache_bytes)
        self._pass_tokens = max_pass_tokens or PREFILL_TOKENS["cpu" if self.device.type == "cpu" else "cuda"]
        self._most = 0.0
        self._cache: Any = None
        self._read: list[int] = []  # the tokens that the cache has read

    def release(self) -> None:
        self._cache, self._read = None, []

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError if memory is too small for a trajectory's prompt."""
        ended = Ended(advance, self.version, self.adapter_sha256)
        self._most = self._cache_bytes or FREE_SHARE[self.device.type] * free_memory(self.device)
        try:
            with torch.inference_mode(), self.weights.active():
                for place, first in enumerate(requests):
                    request: Request | None = first
                    while request is not None:
                        request = ended.add(place, self._complete(request))
                    self.release()
        except torch.OutOfMemoryError as error:
            hint = "Lower MAX_TOKENS_PER_ROLLOUT_PASS or MAX_MODEL_LEN, or use a smaller model or LOAD_IN_4BIT=true."
            what = f"Out of memory while sampling one trajectory of {len(self._read)} tokens."
            raise EmailRLError(what, hint) from error
        finally:
            self.release()
        return ended.completions()

    def _complete(self, request: Request) -> Completion:
        row = Conversation(request)
        if len(row.tokens) >= self.max_model_len:
            return row.completion("length")
        if row.tokens[:-1][: len(self._read)] != self._read:  # the state of a recurrent layer cannot go back
            self.release()
        while True:
            logits = self._read_up_to(row.tokens)
            (token,), (logprob,) = sample(logits, [request.sampling], [row.uniforms])
            self.steps += 1
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in self.stop_ids:
                return row.completion("stop")
            if len(row.logprobs) == request.sampling.max_tokens or len(row.tokens) >= self.max_model_len:
                return row.completion("length")
            if (held := bytes_of(self._cache)) > self._most:
                limit = f"its cache takes {held / GIB:.3g} GiB"
                self._tell(f"A trajectory was truncated at {len(row.tokens)} tokens: {limit}. Raise KV_CACHE_GIB.")
                return row.completion("length")

    def _read_up_to(self, tokens: list[int]) -> Tensor:
        """Read what the cache has not; returns the logits of the next token, ``(1, vocabulary)``."""
        model, state = self.weights.model, torch.empty(0)
        while len(self._read) < len(tokens):
            new = tokens[len(self._read) :][: self._pass_tokens]
            ids = torch.tensor([new], device=self.device)
            done = backbone(model)(input_ids=ids, past_key_values=self._cache, use_cache=True)
            self._cache, state = getattr(done, "past_key_values", None), done.last_hidden_state[:, -1]
            if self._cache is None:
                what = f"{type(model).__name__} keeps no cache that the in-process engine knows."
                raise EmailRLError(what, "Use --engine vllm.")
            self._read = self._read + new
            if bytes_of(self._cache) > self._most and len(self._read) < len(tokens):
                what = f"A prompt of {len(tokens)} tokens does not fit: the cache is full after {len(self._read)}."
                raise EmailRLError(what, "Raise KV_CACHE_GIB, or use a smaller model.")
        return projection(model)(state)


def bytes_of(cache: Any) -> int:
    """Memory of a transformers cache: keys, values and states of all layers."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            for one in value.values() if isinstance(value, dict) else value:
                yield from tensors(one)

    return sum(one.nbytes for layer in cache.layers for one in tensors(list(vars(layer).values())))
