"""Which conversations run, which wait for room in the cache, and whose keys are kept for their next turn."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from emailrl.engines.base import Completion, Request
from emailrl.engines.budget import BLOCK, blocks_of
from emailrl.engines.kv_cache import BlockCache, Table, new_table
from emailrl.engines.sampling import Uniforms


@dataclass(slots=True, eq=False)
class Conversation:
    """One trajectory in the engine: its tokens, and how many of them the cache holds."""

    request: Request
    place: int = 0
    """Which of the requests that ``generate`` was given it began with."""
    tokens: list[int] = field(init=False)
    """Prompt and sampled tokens; the last one has yet to be read by the model."""
    blocks: Table = field(default_factory=new_table)
    """Where its keys and values lie in the cache, in order."""
    held: int = 0
    """The first ``held`` tokens have their keys and values in the blocks, once ``source`` has read as many."""
    source: Conversation | None = None
    """Who fills the blocks that it begins with."""
    logprobs: list[float] = field(default_factory=list)
    uniforms: Uniforms = field(init=False)
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        self.uniforms = Uniforms(self.request.seed)
        self.started = time.perf_counter()

    @property
    def unread(self) -> int:
        """Tokens that have yet to be read before the last one, which is read by the step that samples."""
        return len(self.tokens) - 1 - self.held

    @property
    def is_shared_read(self) -> bool:
        """Whether ``source`` has read what this one begins with."""
        return self.source is None or self.source.held >= self.held

    @property
    def is_read(self) -> bool:
        """Whether the next token can be sampled."""
        return not self.unread and self.is_shared_read

    def rewind(self) -> None:
        """After a step that failed half-way: the next number drawn is again that of the next token."""
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
    """Every conversation that has blocks, or had some and goes on when there are enough again."""

    def __init__(self, cache: BlockCache, limit: int) -> None:
        self.cache = cache
        self.limit = limit
        """Most conversations that run at once, those kept beside them included."""
        self.running: list[Conversation] = []
        """In the order they came."""
        self.paused: deque[Conversation] = deque()
        """Begun, and without blocks: they go on, in order, before anyone new begins."""
        self.kept: dict[str, Conversation] = {}
        """Over, by trajectory, the oldest first: blocks that nobody else needs yet."""

    @property
    def has_place(self) -> bool:
        """Whether one more may run."""
        return len(self.running) < self.limit

    def admit(self, conversation: Conversation) -> bool:
        """Let a conversation run if there is room for its tokens and a block for each that runs; else pause it."""
        before = self.kept.pop(conversation.request.trajectory_id, None)
        if before is not None:
            self._take_over(conversation, before)
        else:
            self._share_beginning(conversation)
        if not self.running:
            self._let_alone(conversation)
        if not self._extend(conversation, spare=len(self.running)):
            self._forget(conversation)
            self.paused.appendleft(conversation)
            return False
        self.running.append(conversation)
        while self.kept and len(self.running) + len(self.kept) > self.limit:
            self._drop_oldest()
        return True

    def make_room(self) -> int:
        """Give every running conversation blocks for all its tokens; where there are too few, the latest ones pause.

        Returns how many do. The first always goes on.
        """
        place = pauses = 0
        if self.running:
            self._let_alone(self.running[0])
        while place < len(self.running):
            if self._extend(self.running[place]):
                place += 1
            else:
                self._pause()
                pauses += 1
        return pauses

    def pause_all(self) -> None:
        """Take all blocks back; those that ran go on first."""
        while self.running:
            self._pause()
        self.drop_kept()

    def drop_kept(self) -> None:
        """Take back the blocks of all that is over."""
        while self.kept:
            self._drop_oldest()

    def go_on(self, conversation: Conversation, next_turn: Conversation) -> None:
        """Put a conversation's next turn in its place."""
        self._take_over(next_turn, conversation)
        self.running[self.running.index(conversation)] = next_turn

    def leave(self, conversation: Conversation, *, keep: bool) -> None:
        """Take a conversation out of the running ones; ``keep`` its keys for a later request, or free its blocks."""
        self.running.remove(conversation)
        if not keep:
            self._forget(conversation)
            return
        identity = conversation.request.trajectory_id
        if identity in self.kept:
            self._forget(self.kept.pop(identity))
        self.kept[identity] = conversation

    def clear(self) -> None:
        """Forget every conversation and free the cache, in whatever state an interrupted step left them."""
        self.running.clear()
        self.paused.clear()
        self.kept.clear()
        self.cache.free()

    def _let_alone(self, first: Conversation) -> None:
        """A bound that was lowered after running out of memory is no bound to one conversation by itself."""
        self.cache.most = max(self.cache.most, blocks_of(len(first.tokens)))

    def _take_over(self, conversation: Conversation, before: Conversation) -> None:
        """Go on in an earlier turn's blocks; where history changed, from the first block that is not as it was.

        Blocks are left whole or not at all, for others may begin with them.
        """
        conversation.held = before.held
        if conversation.tokens[:-1][: before.held] != before.tokens[: before.held]:
            same = blocks_alike(conversation, before)
            self.cache.release(before.blocks, keep=same)
            conversation.held = same * BLOCK
        conversation.blocks, before.blocks = before.blocks, new_table()

    def _share_beginning(self, conversation: Conversation) -> None:
        """Begin with the blocks of whoever has most of them in common: of several the first, who fills them itself."""
        same, source = 0, None
        for other in (*self.running, *self.kept.values()):
            if (longer := blocks_alike(conversation, other, same)) > same:
                same, source = longer, other
        if source is not None:
            self.cache.share(source.blocks[:same], conversation.blocks)
            conversation.held = same * BLOCK
            conversation.source = source if source in self.running else None  # what is over has been read

    def _extend(self, conversation: Conversation, spare: int = 0) -> bool:
        while not self.cache.extend(conversation.blocks, len(conversation.tokens), spare):
            if not self.kept:
                return False
            self._drop_oldest()
        return True

    def _pause(self) -> None:
        conversation = self.running.pop()
        self._forget(conversation)
        self.paused.appendleft(conversation)

    def _drop_oldest(self) -> None:
        self._forget(self.kept.pop(next(iter(self.kept))))

    def _forget(self, conversation: Conversation) -> None:
        self.cache.release(conversation.blocks)
        conversation.held, conversation.source = 0, None


def blocks_alike(new: Conversation, other: Conversation, least: int = 0) -> int:
    """How many of another's blocks, if more than ``least``, a new conversation can begin with; else ``least``.

    Whole ones, which the other writes to no more once it has read its tokens.
    """
    most = min((len(new.tokens) - 1) // BLOCK, (len(other.tokens) - 1) // BLOCK, len(other.blocks))
    if least >= most or new.tokens[: least * BLOCK] != other.tokens[: least * BLOCK]:
        return least
    for start in range(least * BLOCK, most * BLOCK, BLOCK):
        if new.tokens[start : start + BLOCK] != other.tokens[start : start + BLOCK]:
            return start // BLOCK
    return most
