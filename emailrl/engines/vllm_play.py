"""One call of ``generate`` on vLLM servers: its conversations keep the version they started with.

Every request names the adapter of its call, whatever is loaded meanwhile. A restarted server that lacks the adapter
gets it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from emailrl.engines.base import Advance, Completion, Request
from emailrl.engines.pacing import converse
from emailrl.engines.replicas import FULL, Replica, cause, completion_body, read_completion, retry_after
from emailrl.engines.vllm_answers import ReplicaDown
from emailrl.engines.vllm_fleet import Fleet, T, Version, room
from emailrl.remote.retry import may_pass

LONGEST_WAIT = 8.0
"""Seconds; retry pauses double from half a second, or follow ``Retry-After``, up to this."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sampling options of a call, in addition to its requests'."""

    stop_ids: list[int]
    max_model_len: int | None
    conversations: int
    """Maximum concurrent conversations."""
    retries: int


@dataclass
class Play:
    """The conversations of one call; ``sampled`` is called with each server's name, request and completion."""

    fleet: Fleet
    version: Version
    limits: Limits
    sampled: Callable[[str, Request, Completion], None]
    _homes: dict[str, Replica] = field(default_factory=dict, init=False)
    _restoring: dict[Replica, asyncio.Lock] = field(default_factory=dict, init=False)
    _waiting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _cancelled: bool = field(default=False, init=False)
    _under_way: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = field(default=None, init=False)

    def run(self, requests: Sequence[Request], advance: Advance | None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError if no replica is left, CancelledError after ``cancel``."""
        self._restoring, self._waiting = {}, asyncio.Lock()  # a lock belongs to one event loop, and so to one call

        async def playing(client: httpx.AsyncClient) -> list[Completion]:
            async def complete(request: Request) -> Completion:
                return await self._complete(client, request)

            return await converse(requests, complete, advance, limit=self.limits.conversations)

        return self.until_cancelled(playing)

    def until_cancelled(self, act: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        """Run ``act(client)``; CancelledError after ``cancel``."""

        async def acting(client: httpx.AsyncClient) -> T:
            task = asyncio.current_task()
            assert task is not None
            self._under_way = asyncio.get_running_loop(), task
            if self._cancelled:
                raise asyncio.CancelledError
            return await act(client)

        try:
            return self.fleet.run(acting)
        finally:
            self._under_way = None

    def cancel(self) -> None:
        """Cancel the running call, from another thread, and every later one."""
        self._cancelled = True
        if (under_way := self._under_way) is not None:
            with suppress(RuntimeError):  # it has already ended
                under_way[0].call_soon_threadsafe(under_way[1].cancel)

    async def _complete(self, client: httpx.AsyncClient, request: Request) -> Completion:
        started = time.perf_counter()
        completion = await self._sample(client, request)
        completion.seconds = time.perf_counter() - started
        completion.prompt_tokens = len(request.prompt_ids)
        completion.policy_version, completion.adapter_sha256 = self.version.label, self.version.expected.adapter_sha256
        return completion

    async def _sample(self, client: httpx.AsyncClient, request: Request) -> Completion:
        """Try one replica after another until one answers or the retries are used up."""
        failure, shunned, pause = "", None, 0.0
        for attempt in range(self.limits.retries + 1):
            await asyncio.sleep(min(LONGEST_WAIT, pause))
            replica = await self._choose(client, request.trajectory_id, shunned, failure)
            tokens = room(replica, len(request.prompt_ids), self.limits.max_model_len)
            if tokens < 1:
                return Completion(request.trajectory_id, [], [], "length")
            name = self.version.served or replica.base
            body = completion_body(request, name, stop_ids=self.limits.stop_ids, room=tokens)
            while not replica.begin(name):
                await asyncio.sleep(FULL)
            try:
                response = await replica.complete(client, body)
                if response.status_code == 200:
                    completion = read_completion(replica, request, body, response, self.fleet.probe.vocabulary)
                    self.sampled(str(replica), request, completion)
                    return completion
            except (httpx.RequestError, ReplicaDown) as error:
                failure, shunned = replica.redact(cause(error)), replica
                pause = 0.0 if len(self.fleet.alive) > 1 else 2.0 ** (attempt - 1)
                await self.fleet.examine(client, replica, failure)
                continue
            finally:
                replica.end(name)
            failure, shunned = replica.redact(f"HTTP {response.status_code}: {response.text}"), replica
            asked = retry_after(response)
            pause = 2.0 ** (attempt - 1) if asked is None else asked
            if response.status_code == 404:  # a restarted server has no adapters
                await self._restore(client, replica)
            elif response.status_code >= 500:
                await self.fleet.examine(client, replica, failure)
            elif not may_pass(response.status_code):
                break
        return Completion(request.trajectory_id, [], [], "error", error=f"{shunned}: {failure}")

    async def _choose(
        self, client: httpx.AsyncClient, trajectory_id: str, shunned: Replica | None, failure: str
    ) -> Replica:
        """The replica with the conversation's KV cache, else the least busy one."""
        if not self.fleet.alive:
            async with self._waiting:
                await self.fleet.wait_for_any(client, self.version, failure)
        home = self._homes.get(trajectory_id)
        if home is None or not home.alive or home is shunned:
            others = [replica for replica in self.fleet.alive if replica is not shunned] or self.fleet.alive
            home = min(others, key=lambda replica: replica.in_flight.total())
            self._homes[trajectory_id] = home
        return home

    async def _restore(self, client: httpx.AsyncClient, replica: Replica) -> None:
        """Reload the version on a restarted replica, once for all affected conversations."""
        async with self._restoring.setdefault(replica, asyncio.Lock()):
            try:
                lost = self.version.served not in await replica.models(client)
                failure = await self.fleet.restore(client, replica, self.version) if lost else None
            except ReplicaDown as error:
                failure = str(error)
        if failure is not None:
            self.fleet.leave_out(replica, failure)
