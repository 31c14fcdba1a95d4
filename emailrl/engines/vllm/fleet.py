"""The vLLM servers of one engine: which are in use, what they have loaded, and the conversations on them.

Thread-safe: rollouts and evaluations of different versions run concurrently, each in its own event loop. Every request
names the adapter of its conversation, whatever is loaded meanwhile. A restarted server that lacks the adapter gets it
again.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import httpx

from emailrl.base.destination import tell
from emailrl.base.errors import EmailRLError
from emailrl.base.reply import Client
from emailrl.base.retry import may_pass, pause_asked_for
from emailrl.engines.base import Advance, Completion, Request, converse, report
from emailrl.engines.budget import most_requests, rows_per_server
from emailrl.engines.vllm.arguments import api_key, read_urls
from emailrl.engines.vllm.probe import Expected, Probe
from emailrl.engines.vllm.replica import (
    FULL,
    HEALTH_TIMEOUT,
    Replica,
    ReplicaDown,
    cause,
    completion_body,
    read_completion,
    sampling_body,
)
from emailrl.settings import Settings

KEPT = 16
"""Connections per pool above which idle ones are closed: httpcore compares every idle one with all others, twice per
request."""
LOOK_AGAIN = 2.0
"""Poll interval in seconds while all servers are down."""
LONGEST_WAIT = 8.0
"""Seconds; retry pauses double from half a second, or follow ``Retry-After``, up to this."""
OTHER_FILES = 1024
"""Files that a process may hold open besides its connections."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Version:
    """An adapter as the servers know it, or the bare base model (``served`` and ``path`` are None)."""

    label: str
    """The trainer's name for it."""
    expected: Expected
    """The trainer's log-probabilities of the probe's text."""
    served: str | None = None
    """Its name on the servers, never used for another adapter."""
    folder: Path | None = None
    """Where the trainer has it."""
    path: str | None = None
    """The same folder, as the servers see it."""


class Fleet:
    """The servers of VLLM_URLS, not contacted yet, and how they are sampled from."""

    def __init__(self, settings: Settings, probe: Probe, stop_ids: Collection[int]) -> None:
        vllm, agent = settings.vllm, settings.agent
        self.probe, self.stop_ids = probe, sorted(stop_ids)
        self.replicas = _replicas(settings)
        self.max_model_len = settings.model.max_model_len
        self.conversations = most_requests(agent, len(self.replicas))
        """Maximum concurrent conversations of one call."""
        self.retries = vllm.vllm_retries
        self.wait = vllm.vllm_return_timeout
        """How many seconds all servers may be down before a rollout fails."""
        # The default of LITELLM_TIMEOUT suits shared chat servers; it applies here only if set explicitly.
        given = "litellm_timeout" in settings.rewards.model_fields_set and "vllm_timeout" not in vllm.model_fields_set
        self._timeout = settings.rewards.litellm_timeout if given else vllm.vllm_timeout
        self._key = api_key(settings)
        self._sampling = sampling_body(agent.temperature, agent.top_p, agent.top_k)
        """Of the probe: the training rollouts'."""
        self._waiting = 0
        """Calls waiting for any server; only the first reports it."""
        allow_connections(sum(replica.most for replica in self.replicas))

    @property
    def alive(self) -> list[Replica]:
        """The replicas in use."""
        return [replica for replica in self.replicas if replica.alive]

    async def admit(
        self,
        client: httpx.AsyncClient,
        replicas: Collection[Replica],
        version: Version,
        *,
        again: bool,
    ) -> None:
        """Load a version on replicas and verify it; exclude those that fail, and wait if none is left.

        ``again`` means they were in use before: their return is reported, and all may be down for a while. Raises
        EmailRLError if a replica refuses the adapter or fails the probe (naming it), or none is left.
        """
        before = {replica for replica in replicas if replica.alive}
        failures = await asyncio.gather(*(self.bring(client, replica, version) for replica in replicas))
        for replica, failure in zip(replicas, failures, strict=True):
            if failure is not None and (replica in before or not again):
                report(f"{replica} is excluded: {failure.rstrip('.')}.")
            elif failure is None and replica not in before and again:
                report(f"{replica} is back in use.")
        if not self.alive:
            why = next(filter(None, failures), "no replica")
            if not again:
                raise _none_available(len(self.replicas), why)
            await self.wait_for_any(client, version, why)

    async def wait_for_any(self, client: httpx.AsyncClient, version: Version, why: str) -> None:
        """Wait for an excluded replica to come back and load the version on it; EmailRLError if none does."""
        if self.wait and not self.alive and not self._waiting:
            because = f" ({why.rstrip('.')})" if why else ""
            report(f"No vLLM server is left{because}; waiting up to {self.wait:g} s for one to come back.")
        until = time.monotonic() + self.wait
        self._waiting += 1
        try:
            while not self.alive:
                if time.monotonic() >= until:
                    raise _none_available(len(self.replicas), why)
                await asyncio.sleep(min(LOOK_AGAIN, self.wait))
                for replica in self.replicas:
                    if not replica.alive and await self.bring(client, replica, version) is None:
                        report(f"{replica} is back in use, with {version.label or 'its base model'}.")
        finally:
            self._waiting -= 1

    async def bring(self, client: httpx.AsyncClient, replica: Replica, version: Version) -> str | None:
        """Load and verify a version on a replica; returns why it cannot be used, or None."""
        try:
            await replica.check_health(client)
            if version.served is not None and version.path is not None:
                await replica.load(client, version.served, version.path)
            name = version.served or replica.base
            await replica.probe(client, name, self.probe, self._sampling, version.expected)
        except ReplicaDown as error:
            replica.alive = False
            return str(error)
        except EmailRLError:
            replica.alive = False
            raise
        replica.alive = True
        return None

    async def examine(self, client: httpx.AsyncClient, replica: Replica, failure: str) -> None:
        """After a failed request, exclude the replica unless it is healthy."""
        try:
            await replica.check_health(client)
        except (ReplicaDown, EmailRLError):
            self.leave_out(replica, failure)

    def leave_out(self, replica: Replica, why: str) -> None:
        """Send nothing more to a replica until it is admitted again."""
        if replica.alive:
            replica.alive = False
            report(f"{replica} is excluded: {why.rstrip('.')}. {len(self.alive)} of {len(self.replicas)} remain.")

    async def unload(self, client: httpx.AsyncClient, *, kept: int, held: Collection[str | None] = ()) -> None:
        """Unload all versions but the last ``kept``, those ``held`` and those with requests in flight."""
        for replica in self.replicas:
            for name in replica.loaded[: max(len(replica.loaded) - kept, 0)]:
                if replica.alive and name not in held and not replica.in_flight[name]:
                    try:
                        await replica.unload(client, name)
                    except ReplicaDown as error:
                        self.leave_out(replica, str(error))

    def run(self, act: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        """Run ``act(client)`` in its own event loop."""
        return _with_client(self._key, self._timeout, act)


def check_servers(settings: Settings) -> None:
    """Raise EmailRLError if none of the servers in VLLM_URLS answers; for use before a model is loaded."""
    replicas = _replicas(settings)

    async def failure(client: httpx.AsyncClient, replica: Replica) -> str | None:
        try:
            await replica.check_health(client)
        except (ReplicaDown, EmailRLError) as error:
            return str(error)
        return None

    async def failures(client: httpx.AsyncClient) -> list[str | None]:
        return await asyncio.gather(*(failure(client, replica) for replica in replicas))

    found = _with_client(api_key(settings), HEALTH_TIMEOUT, failures)
    if all(found):
        raise _none_available(len(replicas), found[0] or "")


def _replicas(settings: Settings) -> list[Replica]:
    """The servers in the settings, not contacted yet; prints where conversations go."""
    key = api_key(settings)
    most, needed = rows_per_server(settings.agent), settings.model.max_model_len
    replicas = [Replica(url, key, most, needed=needed) for url in read_urls(settings.vllm.vllm_urls)]
    for replica in replicas:
        tell(replica.url, "policy", with_key=bool(key))
    return replicas


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files, often 1,024, to what ``count`` connections need; report if it is lower.

    Without a free handle no server can be reached, so that all would be excluded.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        report(
            f"At most {hard:,} files can be open at once, but {count:,} requests to vLLM servers and other files need"
            f" {needed:,}: raise the limit (ulimit -Hn), or lower MAX_BATCH_TRAJECTORIES."
        )


def _none_available(count: int, why: str) -> EmailRLError:
    reason = why.rstrip(".") or "all were excluded"
    return EmailRLError(f"No vLLM server available ({count} configured): {reason}.", "Start one with emailrl serve.")


def _with_client(key: str, timeout: float, act: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    """Run ``act(client)`` in its own event loop."""

    async def acting() -> T:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT)
        waits = httpx.Timeout(timeout, connect=10.0, pool=None)
        async with Client(headers=headers, timeout=waits, limits=limits, verify=_certificates()) as client:
            return await act(client)

    return asyncio.run(acting())


_certificates = cache(httpx.create_ssl_context)
"""Read once: it takes longer than all else that a client needs, and every step has several clients."""


class PinnedVersion:
    """An engine pinned to one version.

    ``load`` brings the version to the servers, ``sampled`` is called with each server's name, request and completion,
    and ``close`` once the version is no longer needed.
    """

    def __init__(
        self,
        fleet: Fleet,
        version: Version,
        *,
        load: Callable[[httpx.AsyncClient], Awaitable[None]] | None,
        sampled: Callable[[str, Request, Completion], None],
        close: Callable[[], None],
    ) -> None:
        self.fleet, self.version = fleet, version
        self._load, self._sampled, self.close = load, sampled, close
        self._homes: dict[str, Replica] = {}
        self._restoring: dict[Replica, asyncio.Lock] = {}
        self._waiting = asyncio.Lock()
        self._cancelled = False
        self._under_way: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None

    def load(self) -> None:
        """See ``PinnedEngine.load``."""
        if self._load is not None:
            self._until_cancelled(self._load)

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError if no replica is left, CancelledError after ``cancel``."""
        self._restoring, self._waiting = {}, asyncio.Lock()  # a lock belongs to one event loop, and so to one call

        async def playing(client: httpx.AsyncClient) -> list[Completion]:
            async def complete(request: Request) -> Completion:
                return await self._complete(client, request)

            return await converse(requests, complete, advance, limit=self.fleet.conversations)

        return self._until_cancelled(playing)

    def _until_cancelled(self, act: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
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
        """See ``PinnedEngine.cancel``."""
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
        for attempt in range(self.fleet.retries + 1):
            await asyncio.sleep(min(LONGEST_WAIT, pause))
            replica = await self._choose(client, request.trajectory_id, shunned, failure)
            tokens = room(replica, len(request.prompt_ids), self.fleet.max_model_len)
            if tokens < 1:
                return Completion(request.trajectory_id, [], [], "length")
            name = self.version.served or replica.base
            body = completion_body(request, name, stop_ids=self.fleet.stop_ids, room=tokens)
            while not replica.begin(name):
                await asyncio.sleep(FULL)
            try:
                response = await replica.complete(client, body)
                if response.status_code == 200:
                    completion = read_completion(replica, request, body, response, self.fleet.probe.vocabulary)
                    self._sampled(str(replica), request, completion)
                    return completion
            except (httpx.RequestError, ReplicaDown) as error:
                failure, shunned = replica.redact(cause(error)), replica
                pause = 0.0 if len(self.fleet.alive) > 1 else 2.0 ** (attempt - 1)
                await self.fleet.examine(client, replica, failure)
                continue
            finally:
                replica.end(name)
            failure, shunned = replica.redact(f"HTTP {response.status_code}: {response.text}"), replica
            pause = pause_asked_for(response.headers) or 2.0 ** (attempt - 1)
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
                lost = self.version.served is None or not await replica.lists(client, self.version.served)
                failure = await self.fleet.bring(client, replica, self.version) if lost else None
            except ReplicaDown as error:
                failure = str(error)
        if failure is not None:
            self.fleet.leave_out(replica, failure)


def room(replica: Replica, prompt_tokens: int, max_model_len: int | None) -> int:
    """Maximum tokens after a prompt."""
    lengths = [length for length in (replica.max_model_len, max_model_len) if length is not None]
    return min(lengths, default=sys.maxsize) - prompt_tokens
