"""The in-process engine: any full-attention ``transformers`` model, many conversations in one forward pass.

Continuous batching. Every step of the loop first reads what is new (the prompts of conversations just admitted, the
tool results of those whose turn just ended), then samples one token for every running conversation. A conversation
whose turn ends asks ``advance`` for its next prompt at once and goes on in the same slot, where the keys and values of
its earlier turns still lie. Members of a group read their common prompt once.

Logits exist at sampled positions only: a prompt is read without the LM head up to its last token, and the last token
goes through the same step as every sampled one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from emailrl.engines.attention import causal_mask, slot_attention_in
from emailrl.engines.base import Advance, Completion, Request
from emailrl.engines.kv_cache import Filled, SlotCache
from emailrl.engines.prefixes import shared_beginnings
from emailrl.engines.sampling import sample
from emailrl.engines.slots import Conversation, Slots
from emailrl.engines.weights import adapter_sha256, check_full_attention, device_of, sampling_weights
from emailrl.errors import EmailRLError

if TYPE_CHECKING:
    from torch import nn

PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Most tokens, padding included, that one pass over new prompts reads: on a CPU what its caches hold, on a GPU what
keeps it busy."""

PASS_TOKENS = {"cpu": 48, "cuda": 4096}
"""So many tokens cost as much as one more pass: less padding is borne, and fewer tokens in common are not shared."""


class TransformersEngine:
    """Samples from ``model``, a causal language model or a PEFT model around one: from its bare base until
    ``load_adapter`` names a version.

    ``stop_ids`` end a completion, beside those of the model's generation config. At most ``max_rows`` conversations run
    at once; ``max_model_len`` bounds prompt and completion together, ``max_pass_tokens`` (None: ``PREFILL_TOKENS``) the
    tokens of prompts that one pass reads. The same requests give the same completions.
    """

    def __init__(
        self,
        model: nn.Module,
        stop_ids: Collection[int],
        *,
        max_rows: int,
        max_model_len: int | None = None,
        max_pass_tokens: int | None = None,
    ) -> None:
        self._weights = sampling_weights(model)
        self._config = self._weights.model.config.get_text_config()
        check_full_attention(self._config)
        self.stop_ids = frozenset(stop_ids) | generation_stop_ids(self._weights.model)
        own = int(self._config.max_position_embeddings)
        self.max_model_len = min(max_model_len or own, own)
        self.version = ""
        self.adapter_sha256: str | None = None
        self._cache = SlotCache(self._config.num_hidden_layers)
        self._slots = Slots(self._cache, max_rows)
        device = "cpu" if device_of(model).type == "cpu" else "cuda"
        self._prefill_tokens, self._pass_tokens = PREFILL_TOKENS[device], PASS_TOKENS[device]
        self._prefill_tokens = max_pass_tokens or self._prefill_tokens

    def load_adapter(self, path: Path | None, version: str) -> None:
        """Sample from the adapter in ``path`` (None: the bare base model) from now on; cached keys are forgotten."""
        self._weights.load(path)
        self.version = version
        self.adapter_sha256 = None if path is None else adapter_sha256(path)
        self._slots.clear()

    def release(self) -> None:
        """Free the cache."""
        self._slots.clear()
        self._cache.free()

    def resume(self) -> None:
        """Nothing to do: the cache grows with the next requests."""

    def close(self) -> None:
        """Free the cache; the model belongs to the policy."""
        self.release()

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError when the accelerator runs out of memory."""
        order = {id(request): place for place, request in enumerate(requests)}
        ended: list[tuple[Request, Completion]] = []
        try:
            with torch.inference_mode(), self._weights.active(), slot_attention_in(self._config):
                self._run(deque(requests), advance, ended)
        except torch.OutOfMemoryError as error:
            self.release()
            raise EmailRLError(
                f"Out of memory with {self._slots.limit} trajectories at once.", "Lower MAX_BATCH_TRAJECTORIES."
            ) from error
        except BaseException:
            self._slots.clear()  # an interrupted step leaves rows half written
            raise
        if advance is None:
            ended.sort(key=lambda pair: order[id(pair[0])])
        return [completion for _, completion in ended]

    def _run(self, waiting: deque[Request], advance: Advance | None, ended: list[tuple[Request, Completion]]) -> None:
        slots = self._slots
        self._cache.reserve(min(slots.limit, len(slots.rows) + len(waiting)), 0)

        def end(request: Request, completion: Completion) -> Request | None:
            completion.policy_version, completion.adapter_sha256 = self.version, self.adapter_sha256
            ended.append((request, completion))
            return advance(completion) if advance is not None else None

        while waiting or slots.active:
            while waiting and slots.active < slots.limit:
                request = waiting.popleft()
                if (conversation := self._begin(request)) is not None:
                    slots.enter(conversation)
                elif (follow_up := end(request, _full(request))) is not None:
                    waiting.appendleft(follow_up)
            self._read_prompts()
            for slot, finish_reason in self._step():
                conversation = slots.rows[slot]
                follow_up = end(conversation.request, conversation.completion(finish_reason))
                next_turn = None
                while follow_up is not None and (next_turn := self._begin(follow_up)) is None:
                    follow_up = end(follow_up, _full(follow_up))
                if next_turn is not None:
                    slots.replace(slot, next_turn)
                else:
                    slots.leave(slot, keep=advance is None)

    def _begin(self, request: Request) -> Conversation | None:
        """A conversation ready to enter a slot; None when its prompt fills the context window."""
        if not request.prompt_ids:
            raise ValueError(f"request of trajectory {request.trajectory_id} has no prompt ids")
        room = self.max_model_len - len(request.prompt_ids)
        if room < 1:
            return None
        return Conversation(request, list(request.prompt_ids), min(request.sampling.max_tokens, room))

    def _read_prompts(self) -> None:
        """Fill the cache with all prompt tokens but the last, what new conversations have in common once."""
        rows = self._slots.running
        unread = {slot: len(row.tokens) - 1 for slot, row in enumerate(rows) if row.held < len(row.tokens) - 1}
        alike: dict[tuple[int, ...], list[int]] = {}
        for slot in unread:
            if rows[slot].held == 0:
                alike.setdefault(tuple(rows[slot].tokens), []).append(slot)
        for slots in alike.values():
            for slot in slots[1:]:
                del unread[slot]
        if alike:
            self._read_beginnings([slots[0] for slots in alike.values()])
        self._read(unread)
        for leader, *siblings in alike.values():
            self._share(leader, siblings, rows[leader].held)

    def _read_beginnings(self, fresh: list[int]) -> None:
        """Read what unread conversations have in common, or copy it from one that holds it already."""
        rows = self._slots.running
        prompts = {slot: row.tokens[:-1] for slot, row in enumerate(rows) if row.held or slot in fresh}
        copies = []
        for members, length in shared_beginnings(prompts):
            source = max(members, key=lambda slot: min(rows[slot].held, length))
            targets = [slot for slot in members if rows[slot].held == 0 and slot != source]
            if len(targets) * length > self._pass_tokens:
                copies.append((source, targets, length))
        self._read({source: length for source, _, length in copies if rows[source].held < length})
        for copy in copies:
            self._share(*copy)

    def _share(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first tokens of one conversation's slot to others that begin alike."""
        if targets:
            self._cache.copy(source, targets, length)
        for slot in targets:
            self._slots.rows[slot].held = length

    def _read(self, goals: dict[int, int]) -> None:
        """Read the tokens of each slot up to its goal, the shortest pieces first and together."""
        rows = self._slots.rows
        missing = {slot: goal - rows[slot].held for slot, goal in goals.items()}
        while missing:
            for slot, new in self._read_chunk(missing).items():
                missing[slot] -= new
            missing = {slot: left for slot, left in missing.items() if left}

    def _read_chunk(self, missing: dict[int, int]) -> dict[int, int]:
        """One pass over the shortest pieces; returns how many tokens of which slot it read."""
        rows = self._slots.rows
        first, *others = sorted(missing, key=lambda slot: missing[slot])
        chunk = [first]
        total = missing[first]
        for slot in others:
            total += missing[slot]
            padded = (len(chunk) + 1) * missing[slot]
            if padded > self._prefill_tokens or padded - total > self._pass_tokens:
                break
            chunk.append(slot)
        new = min(missing[chunk[-1]], self._prefill_tokens)
        chunk.sort()
        ids = [rows[slot].tokens[rows[slot].held :][: min(missing[slot], new)] for slot in chunk]
        self._fill(chunk, [row + [0] * (new - len(row)) for row in ids], [rows[slot].held for slot in chunk])
        for slot, row in zip(chunk, ids, strict=True):
            rows[slot].held += len(row)
        return {slot: len(row) for slot, row in zip(chunk, ids, strict=True)}

    def _step(self) -> list[tuple[int, str]]:
        """Sample one token for every running conversation; returns (slot, finish reason) of those that ended.

        The highest slot comes first, so that taking a row out never moves one that is still to be looked at.
        """
        running = self._slots.running
        if not running:
            return []
        logits = self._logits([row.tokens[-1] for row in running], [row.held for row in running])
        tokens, logprobs = sample(logits, [row.request.sampling for row in running], [row.uniforms for row in running])
        finished = []
        for slot, (row, token, logprob) in enumerate(zip(running, tokens, logprobs, strict=True)):
            row.held += 1
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in self.stop_ids:
                finished.append((slot, "stop"))
            elif len(row.logprobs) == row.limit:
                finished.append((slot, "length"))
        return finished[::-1]

    def _fill(self, slots: Sequence[int], ids: list[list[int]], starts: list[int]) -> None:
        """Write keys and values of new tokens [rows, new] that begin at ``starts`` in slots named in rising order."""
        with suppress(Filled):
            self._weights.model.get_decoder()(**self._inputs(slots, ids, starts, fills=True))

    def _logits(self, ids: list[int], starts: list[int]) -> torch.Tensor:
        """Logits [rows, words] after one new token in each of the first slots."""
        inputs = self._inputs(range(len(ids)), [[token] for token in ids], starts, fills=False)
        return self._weights.model(**inputs, logits_to_keep=1).logits[:, -1]

    def _inputs(self, slots: Sequence[int], ids: list[list[int]], starts: list[int], *, fills: bool) -> dict[str, Any]:
        """The model's arguments for a pass over new tokens; the cache is told where they go."""
        device = device_of(self._weights.model)
        input_ids = torch.tensor(ids, device=device)
        new = input_ids.shape[1]
        positions = torch.tensor(starts, device=device)[:, None] + torch.arange(new, device=device)
        window = max(starts) + new
        self._cache.reserve(0, window)
        self._cache.place(slots, positions, window, fills=fills)
        return {
            "input_ids": input_ids,
            "attention_mask": causal_mask(positions, window, self._weights.model.dtype),
            "position_ids": positions.clamp(max=self.max_model_len - 1),  # padding may point beyond
            "past_key_values": self._cache,
            "use_cache": True,
        }


def _full(request: Request) -> Completion:
    """The completion of a prompt that leaves no room for a token."""
    return Completion(request.trajectory_id, [], [], "length", prompt_tokens=len(request.prompt_ids))


def generation_stop_ids(model: nn.Module) -> frozenset[int]:
    """The ids that end a completion by the model's generation config."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return frozenset([ids] if isinstance(ids, int) else ids or ())
