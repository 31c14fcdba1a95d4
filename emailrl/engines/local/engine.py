"""The in-process engine: any full-attention ``transformers`` model, with continuous batching. Every step prefills new
tokens (new prompts, tool results), then samples one token for every running conversation. A next turn reuses the KV
cache of earlier ones; members of a group read their prompt once. When the cache's budget is used up, the latest
conversations pause: their tokens are prefilled again later, and they continue with the same samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import nn

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import WEIGHTS, sha256_of
from emailrl.engines.base import Advance, Completion, Ended, Request, report
from emailrl.engines.budget import BLOCK, FREE_SHARE, blocks_of, blocks_within, gib_for
from emailrl.engines.local.cache import ATTENTION, BlockCache
from emailrl.engines.local.passes import Conversation, Passes, Schedule, Weights, device_of, sampling_weights
from emailrl.model.layout import free_memory


class InProcess:
    """What the engines of this process share: the weights of a version, and what bounds a conversation."""

    def __init__(
        self, weights: Weights, stop_ids: Collection[int], max_model_len: int | None, cache_bytes: int | None
    ) -> None:
        self.weights, self.config = weights, weights.model.config.get_text_config()
        self.stop_ids = frozenset(stop_ids) | generation_stop_ids(weights.model)
        self.max_model_len = min(filter(None, (max_model_len, int(self.config.max_position_embeddings))))
        self.version, self.steps = "", 0
        self.adapter_sha256: str | None = None
        self.device, self._cache_bytes = device_of(weights.model), cache_bytes
        self._tell = cache(report)  # each line once

    def load_adapter(self, path: Path | None, version: str) -> None:
        """Sample from the adapter in ``path`` (None: the bare base model) from now on, and drop the KV cache. On
        failure the previous version stays loaded."""
        self.release()
        self.weights.load(path)
        self.version, self.adapter_sha256 = version, None if path is None else sha256_of(path / WEIGHTS)

    def release(self) -> None:
        """Free the cache; the model belongs to the policy."""
        raise NotImplementedError

    def close(self) -> None:
        self.release()

    def resume(self) -> None:
        """Do nothing: the cache grows with the next requests."""


class TransformersEngine(InProcess):
    """Samples from ``model``, a causal language model that ``has_full_attention``, or a PEFT wrapper; the bare base
    model until ``load_adapter`` sets a version. ``stop_ids`` end a completion, as do those of the model's generation
    config. At most ``max_rows`` conversations run at once; ``max_model_len`` bounds prompt and completion together,
    ``max_pass_tokens`` (None: ``PREFILL_TOKENS``) the prompt tokens per pass, ``cache_bytes`` (None: ``FREE_SHARE``)
    the key-value cache; a model that never ``trains`` may sample from rounded weights (see ``passes``). Identical
    requests give identical completions."""

    def __init__(
        self,
        model: nn.Module,
        stop_ids: Collection[int],
        *,
        max_rows: int,
        max_model_len: int | None = None,
        max_pass_tokens: int | None = None,
        cache_bytes: int | None = None,
        trains: bool = True,
    ) -> None:
        super().__init__(sampling_weights(model, trains=trains), stop_ids, max_model_len, cache_bytes)
        config, layers = self.config, self.config.num_hidden_layers
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = BlockCache(layers, heads)
        self._shape = layers, 2 * layers * heads * width * self.weights.model.dtype.itemsize  # bytes of a token
        self._blocks = 0  # within the budget; the cache's own limit is lowered if memory runs out first
        self.schedule = Schedule(self.cache, max_rows, keeps=not trains)
        self.passes = Passes(self.weights, self.cache, self.stop_ids, self.max_model_len, max_pass_tokens)

    def release(self) -> None:
        self.schedule.clear()

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError if memory is too small for a single trajectory."""
        ended = Ended(advance, self.version, self.adapter_sha256)
        device, attention = self.device, self.config._attn_implementation
        if len(self.cache.users) == 1:  # no block is in memory
            budget = self._cache_bytes or FREE_SHARE[device.type] * free_memory(device)
            self.cache.most = self._blocks = blocks_within(budget, *self._shape)
        for tokens in (len(request.prompt_ids) for request in requests):
            if self.window <= tokens < self.max_model_len:
                enough = f"KV_CACHE_GIB={gib_for(blocks_of(self.max_model_len), *self._shape)}"
                hint = f"{enough} holds a context of {self.max_model_len}; a smaller model leaves more room."
                raise EmailRLError(f"A prompt of {tokens} tokens does not fit: the KV cache holds {self.window}.", hint)
        try:
            self.config._attn_implementation = ATTENTION
            with torch.inference_mode(), self.weights.active():
                self._run(deque(enumerate(requests)), ended)
        except BaseException:
            self.schedule.clear()  # an interrupted step leaves rows and tables half-written
            raise
        finally:
            self.config._attn_implementation = attention
        return ended.completions()

    @property
    def window(self) -> int:
        """Maximum tokens of a conversation: the context window, or the capacity of the whole cache."""
        return min(self.max_model_len, self._blocks * BLOCK)

    def _run(self, waiting: deque[tuple[int, Request]], ended: Ended) -> None:
        schedule = self.schedule

        def begin(place: int, request: Request | None) -> Conversation | None:
            """The next turn with room for a token; turns without room are ended, and their follow-ups requested."""
            while request is not None and (tokens := len(request.prompt_ids)) >= self.window:
                self._tell_if_cut(tokens)
                request = ended.add(place, Completion(request.trajectory_id, [], [], "length", prompt_tokens=tokens))
            return None if request is None else Conversation(request, place)

        while waiting or schedule.running or schedule.paused:
            while len(schedule.running) < schedule.limit and (waiting or schedule.paused):
                new = schedule.paused.popleft() if schedule.paused else begin(*waiting.popleft())
                if new is not None and not schedule.admit(new):
                    break
            for conversation, finish_reason in self._pass():
                self.passes.remember(conversation)
                completion = conversation.completion(finish_reason)
                if (next_turn := begin(conversation.place, ended.add(conversation.place, completion))) is not None:
                    schedule.go_on(conversation, next_turn)
                else:
                    schedule.leave(conversation)

    def _pass(self) -> list[tuple[Conversation, str]]:
        """Prefill new tokens, then sample one for every running conversation; returns those that ended, and why. If
        memory runs out, nothing is sampled and ``_start_over`` makes room."""
        rows = None
        try:
            if self.schedule.make_room():
                self._tell("The KV cache is full: the newest trajectories wait and start again (raise KV_CACHE_GIB).")
            self.passes.read(self.schedule.running)
            rows = self.passes.sample_next(self.schedule.running)
        except torch.OutOfMemoryError:
            pass  # handled below, where the traceback holds no tensors any more
        if rows is None:
            self._start_over()
            return []
        self.steps += 1
        finished = []
        for row in rows:
            if row.tokens[-1] in self.stop_ids:
                finished.append((row, "stop"))
            elif len(row.logprobs) == row.request.sampling.max_tokens:
                finished.append((row, "length"))
            elif len(row.tokens) >= self.window:
                self._tell_if_cut(len(row.tokens))
                finished.append((row, "length"))
        return finished

    def _start_over(self) -> None:
        """Restart all running conversations with an empty cache, a smaller one if the old was mostly full."""
        schedule, cache = self.schedule, self.cache
        ran, longest = len(schedule.running), max(len(each.tokens) for each in schedule.running)
        used, unused = cache.taken, len(cache.users) - 1 - cache.taken
        while schedule.running:
            schedule.running[-1].rewind()
            schedule.pause()
        cache.free()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if ran == 1 and not unused:
            hint = "Lower MAX_TOKENS_PER_ROLLOUT_PASS or MAX_MODEL_LEN, or use a smaller model or LOAD_IN_4BIT=true."
            raise EmailRLError(f"Out of memory while sampling one trajectory of {longest} tokens.", hint)
        if ran == 1 or unused > used:
            self._tell("Out of memory: releasing the unused part of the KV cache.")
            return
        cache.most = used * 3 // 4
        limit = f"the KV cache is now limited to {gib_for(cache.most, *self._shape)} GiB, and the newest wait"
        hint = "Lower KV_CACHE_GIB or MAX_TOKENS_PER_ROLLOUT_PASS to start that way."
        report(f"Out of memory with {ran} concurrent trajectories: {limit}. {hint}")

    def _tell_if_cut(self, tokens: int) -> None:
        """Report once if the cache, not the context window, ended a trajectory."""
        if tokens < self.max_model_len:
            self._tell(
                f"A trajectory was truncated at {self.window} tokens, the size of the KV cache: "
                f"raise KV_CACHE_GIB, or set MAX_MODEL_LEN={self.window} to make this limit explicit."
            )


def generation_stop_ids(model: nn.Module) -> frozenset[int]:
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset([ids] if isinstance(ids, int) else ids or ())
