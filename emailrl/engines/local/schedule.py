"""Schedules conversations: which run, which wait for cache space, and which share their beginning."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

from emailrl.engines.base import Completion, Request
from emailrl.engines.budget import BLOCK, blocks_of
from emailrl.engines.local.cache import BlockCache, Table, new_table

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


@dataclass(slots=True, eq=False)
class Conversation:
    """One trajectory in the engine: its tokens and how many of them are cached."""

    request: Request
    place: int = 0
    """Index of its first request in the call to ``generate``."""
    tokens: list[int] = field(init=False)
    """Prompt and sampled tokens; the model has not read the last one yet."""
    blocks: Table = field(default_factory=new_table)
    """Its cache blocks, in order."""
    held: int = 0
    """The first ``held`` tokens are cached in the blocks, once ``source`` has read that many."""
    source: Conversation | None = None
    """The conversation that fills its shared prefix blocks."""
    logprobs: list[float] = field(default_factory=list)
    uniforms: Uniforms = field(init=False)
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.uniforms = Uniforms(self.request.seed)
        self.started = time.perf_counter()

    @property
    def unread(self) -> int:
        """Unread tokens before the last one, which the sampling step reads."""
        return len(self.tokens) - 1 - self.held

    @property
    def is_shared_read(self) -> bool:
        """Whether ``source`` has read the shared prefix."""
        return self.source is None or self.source.held >= self.held

    def rewind(self) -> None:
        """Rewind the random stream after a failed step to the number of the next token."""
        self.uniforms = Uniforms(self.request.seed)
        if self.request.sampling.temperature:
            for _ in self.logprobs:
                self.uniforms.draw()

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


class Schedule:
    """Every conversation that has blocks, or lost them and resumes when enough are free."""

    def __init__(self, cache: BlockCache, limit: int) -> None:
        self.cache = cache
        self.limit = limit
        """Maximum concurrent conversations."""
        self.running: list[Conversation] = []
        """In arrival order."""
        self.paused: deque[Conversation] = deque()
        """Started but without blocks; they resume in order before new ones start."""

    @property
    def has_place(self) -> bool:
        """Whether one more conversation may run."""
        return len(self.running) < self.limit

    def admit(self, conversation: Conversation) -> bool:
        """Run a conversation if its tokens fit with one spare block per running one; else pause it."""
        self._share_beginning(conversation)
        if not self.running:
            self._let_alone(conversation)
        if not self.cache.extend(conversation.blocks, len(conversation.tokens), spare=len(self.running)):
            self._forget(conversation)
            self.paused.appendleft(conversation)
            return False
        self.running.append(conversation)
        return True

    def make_room(self) -> int:
        """Give every running conversation blocks for all its tokens; if too few are left, pause the latest ones.

        Returns how many were paused. The first always continues.
        """
        place = pauses = 0
        if self.running:
            self._let_alone(self.running[0])
        while place < len(self.running):
            if self.cache.extend(self.running[place].blocks, len(self.running[place].tokens)):
                place += 1
            else:
                self._pause()
                pauses += 1
        return pauses

    def pause_all(self) -> None:
        """Release all blocks; running conversations resume first."""
        while self.running:
            self._pause()

    def go_on(self, conversation: Conversation, next_turn: Conversation) -> None:
        """Replace a conversation by its next turn."""
        self._take_over(next_turn, conversation)
        self.running[self.running.index(conversation)] = next_turn

    def leave(self, conversation: Conversation) -> None:
        """Remove a conversation from the running ones, and free its blocks."""
        self.running.remove(conversation)
        self._forget(conversation)

    def clear(self) -> None:
        """Forget every conversation and free the cache, even after an interrupted step."""
        self.running.clear()
        self.paused.clear()
        self.cache.free()

    def _let_alone(self, first: Conversation) -> None:
        """Ignore a limit lowered after an out-of-memory error when only one conversation runs."""
        self.cache.most = max(self.cache.most, blocks_of(len(first.tokens)))

    def _take_over(self, conversation: Conversation, before: Conversation) -> None:
        """Continue in an earlier turn's blocks; if history changed, from the first block that differs.

        Blocks are reused whole or not at all, because others may share them.
        """
        conversation.held = before.held
        if conversation.tokens[:-1][: before.held] != before.tokens[: before.held]:
            same = blocks_alike(conversation, before)
            self.cache.release(before.blocks, keep=same)
            conversation.held = same * BLOCK
        conversation.blocks, before.blocks = before.blocks, new_table()

    def _share_beginning(self, conversation: Conversation) -> None:
        """Start with the blocks of the conversation with the longest common prefix; of several, the first."""
        same, source = 0, None
        for other in self.running:
            if (longer := blocks_alike(conversation, other, same)) > same:
                same, source = longer, other
        if source is not None:
            self.cache.share(source.blocks[:same], conversation.blocks)
            conversation.held = same * BLOCK
            conversation.source = source

    def _pause(self) -> None:
        conversation = self.running.pop()
        self._forget(conversation)
        self.paused.appendleft(conversation)

    def _forget(self, conversation: Conversation) -> None:
        self.cache.release(conversation.blocks)
        conversation.held, conversation.source = 0, None


def blocks_alike(new: Conversation, other: Conversation, least: int = 0) -> int:
    """The number of another's blocks that a new conversation can share, at least ``least``.

    Only whole blocks, which their owner no longer writes to once it has read its tokens.
    """
    most = min((len(new.tokens) - 1) // BLOCK, (len(other.tokens) - 1) // BLOCK, len(other.blocks))
    if least >= most or new.tokens[: least * BLOCK] != other.tokens[: least * BLOCK]:
        return least
    for start in range(least * BLOCK, most * BLOCK, BLOCK):
        if new.tokens[start : start + BLOCK] != other.tokens[start : start + BLOCK]:
            return start // BLOCK
    return most
