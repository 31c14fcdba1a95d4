"""Which conversation sits in which slot of the cache: running ones first, then idle ones, then free slots."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from emailrl.engines.base import Completion, Request
from emailrl.engines.kv_cache import SlotCache
from emailrl.engines.prefixes import common_length
from emailrl.engines.sampling import Uniforms


@dataclass(slots=True, eq=False)
class Conversation:
    """One trajectory in the engine: its tokens, and how many of them the cache holds."""

    request: Request
    tokens: list[int]
    """Prompt and sampled tokens; the last one has yet to be read by the model."""
    limit: int
    """Tokens this completion may still have, at least 1."""
    held: int = 0
    """The first ``held`` tokens have their keys and values in the slot."""
    logprobs: list[float] = field(default_factory=list)
    uniforms: Uniforms = field(init=False)
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = Uniforms(self.request.seed)
        self.started = time.perf_counter()

    def completion(self, finish_reason: str) -> Completion:
        """What was sampled."""
        prompt_tokens = len(self.request.prompt_ids)
        return Completion(
            self.request.trajectory_id,
            token_ids=self.tokens[prompt_tokens:],
            logprobs=self.logprobs,
            finish_reason=finish_reason,
            seconds=time.perf_counter() - self.started,
            prompt_tokens=prompt_tokens,
        )


class Slots:
    """The rows of the cache. ``rows[:active]`` take part in each step; the rest are kept for their next turn."""

    def __init__(self, cache: SlotCache, limit: int) -> None:
        self.cache = cache
        self.limit = limit
        self.rows: list[Conversation] = []
        self.active = 0

    @property
    def running(self) -> list[Conversation]:
        """The conversations of the next step, in slot order."""
        return self.rows[: self.active]

    def enter(self, conversation: Conversation) -> None:
        """Give a conversation a place among the running ones: its old slot, a free one, or an idle one's."""
        identity = conversation.request.trajectory_id
        slot = next(
            (i for i in range(self.active, len(self.rows)) if self.rows[i].request.trajectory_id == identity), None
        )
        if slot is not None:
            conversation.held = reusable(self.rows[slot], conversation.tokens)
            self.rows[slot] = conversation
        elif len(self.rows) < self.limit:
            slot = len(self.rows)
            self.rows.append(conversation)
        else:
            slot = len(self.rows) - 1
            self.rows[slot] = conversation
        self._swap(slot, self.active)
        self.active += 1

    def replace(self, slot: int, conversation: Conversation) -> None:
        """The conversation in a slot goes on with its next turn."""
        conversation.held = reusable(self.rows[slot], conversation.tokens)
        self.rows[slot] = conversation

    def leave(self, slot: int, *, keep: bool) -> None:
        """Take a conversation out of the running ones; ``keep`` its tokens for a later request, or free the slot."""
        self.active -= 1
        last = self.active
        if keep:
            self._swap(slot, last)
        else:
            self._move(last, slot)
            self._move(len(self.rows) - 1, last)
            self.rows.pop()

    def clear(self) -> None:
        """Forget every conversation."""
        self.rows.clear()
        self.active = 0

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            self.cache.swap(one, other, max(self.rows[one].held, self.rows[other].held))
            self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self.cache.copy(source, [target], self.rows[source].held)
            self.rows[target] = self.rows[source]


def reusable(before: Conversation, tokens: list[int]) -> int:
    """How many leading tokens of a new prompt the slot already holds; the last token is always read anew."""
    return common_length(before.tokens[: before.held], tokens[:-1])
