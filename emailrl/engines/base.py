"""The engine interface: batched completions, each trajectory at its own pace; and what all engines share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from emailrl.base.http import CostReached
from emailrl.base.plain import tell
from emailrl.records.trajectory import Message
from emailrl.settings import AgentSettings


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. ``temperature=0`` is greedy. ``top_p=1`` and ``top_k=0`` are off. ``max_tokens`` is 1 or more."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_thinking_tokens: int | None = None
    """Of a turn, whose answer then has ``max_tokens`` of its own (`play`); engines read only ``max_tokens``."""

    @classmethod
    def of(cls, agent: AgentSettings, temperature: float) -> SamplingParams:
        return cls(agent.max_tokens, temperature, agent.top_p, agent.top_k, agent.max_thinking_tokens)


@dataclass(slots=True)
class Request:
    """Ask for one completion. ``trajectory_id`` names the conversation: if ``prompt_ids`` of a follow-up extend its
    tokens, its KV cache is reused. Token engines read ``prompt_ids``; chat engines read ``messages``. ``seed``
    determines the sampled ids independently of the rest of the batch."""

    trajectory_id: str
    sampling: SamplingParams
    prompt_ids: list[int] = field(default_factory=list)
    messages: Sequence[Message] = ()
    seed: int = 0


@dataclass(slots=True)
class Completion:
    """The policy's completion of one request. ``token_ids`` include a sampled stop token. ``logprobs`` has one value
    per id: natural logarithm, after temperature, before top-p / top-k; at temperature 0 those of the untempered
    distribution. Both are empty for engines that only return text."""

    trajectory_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # ``stop``, ``length``, or ``error`` (then ``error`` says what happened)
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int | None = None  # the chat server's count; None means ``len(token_ids)``
    thinking_tokens: int | None = None  # the chat server's count, if it reports one
    message: Message | None = None  # set by chat engines: the assistant message as the server parsed it
    error: str | None = None
    cost: float | None = None  # US dollars; None for engines without a price
    policy_version: str = ""  # the weights that sampled it: the ``version`` given to ``load_adapter``
    adapter_sha256: str | None = None  # the hash of that adapter's file; None: the bare base model

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.completion_tokens is None else self.completion_tokens


Advance = Callable[[Completion], Request | None]
"""Called as each completion ends; returns the trajectory's next request, or None when the trajectory is over."""


class Engine(Protocol):
    """An engine that completes prompts."""

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """Complete every request, and every follow-up that ``advance`` returns, batched over all of them. A follow-up
        joins the running batch immediately; no trajectory waits for another's turn. Returns all completions in the
        order they ended (without ``advance``: in the order of ``requests``)."""

    def close(self) -> None:
        """Release the engine's resources."""


class Sampler(Protocol):
    """A sampler that follows the trainer's weights: one engine, or the engines of several ranks."""

    def load_adapter(self, path: Path | None, version: str) -> None:
        """Sample from the adapter in ``path`` (None: the bare base model) from now on, under the name ``version``."""

    def release(self) -> None:
        """Release memory while the trainer works."""

    def resume(self) -> None:
        """Reclaim memory before the next rollout."""


@runtime_checkable
class PolicyEngine(Engine, Sampler, Protocol):
    """An engine that follows the trainer's weights."""


@runtime_checkable
class LocalEngine(Engine, Protocol):
    """An engine that samples in this process."""

    steps: int  # passes over all running conversations so far: the number grows as long as it samples


class Ended:
    """The completions of one call of ``generate``, as they end."""

    def __init__(self, advance: Advance | None, version: str = "", adapter_sha256: str | None = None) -> None:
        self._advance, self._stamp = advance, (version, adapter_sha256)
        self._ended: list[tuple[int, Completion]] = []

    def add(self, place: int, completion: Completion) -> Request | None:
        """Stamp and add one of the conversation that began with request number ``place``; returns its next request."""
        completion.policy_version, completion.adapter_sha256 = self._stamp
        self._ended.append((place, completion))
        return self._advance(completion) if self._advance is not None else None

    def completions(self) -> list[Completion]:
        """All of them, in the order of ``Engine.generate``."""
        if self._advance is None:
            self._ended.sort(key=lambda pair: pair[0])
        return [completion for _, completion in self._ended]


Complete = Callable[[Request], Awaitable[Completion]]


async def converse(requests: Sequence[Request], complete: Complete, ended: Ended, *, limit: int) -> list[Completion]:
    """``Engine.generate`` on remote servers, at most ``limit`` conversations at a time. A conversation keeps its slot
    until it ends, so that its next turn soon hits the server's prompt cache. An exception from ``complete`` cancels all
    of them and propagates; but at CostReached, the others end the turn that is paid for."""
    gate = asyncio.Semaphore(limit)

    async def conversation(place: int, request: Request | None) -> CostReached | None:
        async with gate:
            try:
                while request is not None:
                    request = ended.add(place, await complete(request))
            except CostReached as reached:
                return reached
        return None

    tasks = [asyncio.ensure_future(conversation(place, request)) for place, request in enumerate(requests)]
    try:
        stopped = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for reached in filter(None, stopped):
        raise reached
    return ended.completions()


def report(line: str) -> None:
    """Report to the user on stderr, and to the run's log if there is one."""
    logger = logging.getLogger("emailrl.engines")
    if logger.hasHandlers():
        logger.warning("%s", line)
    tell(line)
