"""One or more vLLM servers as sampling replicas: token ids in and out, one immutable adapter name for each version. An
adapter is loaded on every replica and verified by its log-probabilities (``probe``) before it is sampled from; one
completion per version and replica is scored by the trainer's model too. Conversations keep the version they started
with, in several threads, each call in its own event loop. A replica that dies is reported and excluded, its requests go
to the others, and it is readmitted once it is healthy and its adapter is verified."""

from __future__ import annotations

import asyncio
import re
import resource
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeVar

import httpx

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import Client, may_pass, pause_asked_for, run, tell
from emailrl.engines.base import Advance, Completion, Ended, Request, SamplingParams, converse, report
from emailrl.engines.budget import most_requests
from emailrl.engines.vllm.arguments import api_key, read_path_map, read_urls
from emailrl.engines.vllm.probe import SHORTEST, Expected, Probe
from emailrl.engines.vllm.replica import HEALTH_TIMEOUT, Replica, ReplicaDown, cause, completion_body, read_completion
from emailrl.settings import PolicySettings, VllmSettings

KEPT: Final = 16
"""Connections per pool above which idle ones are closed: httpcore compares each with all others, twice per request."""
LOOK_AGAIN: Final = 2.0  # seconds between polls while all servers are down
LONGEST_WAIT: Final = 8.0  # seconds; retry pauses double from half a second, or follow ``Retry-After``, up to this

T = TypeVar("T")
Act = Callable[[httpx.AsyncClient], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class Version:
    """An adapter as the servers know it, or the bare base model (``served`` and ``path`` are None)."""

    label: str  # the trainer's name for it
    expected: Expected
    served: str | None = None  # its name on the servers, never used for another adapter
    folder: Path | None = None  # where the trainer has it
    path: str | None = None  # the same folder, as the servers see it


class VllmServers:
    """Samples on the servers of VLLM_URLS, from their base model until ``load_adapter`` is called."""

    def __init__(self, settings: PolicySettings, probe: Probe, stop_ids: Collection[int]) -> None:
        agent, vllm = settings.agent, settings.vllm
        self.probe, self.stop_ids, self.max_model_len = probe, sorted(stop_ids), settings.model.max_model_len
        self.replicas = _replicas(vllm, self.max_model_len)
        self.conversations = most_requests(agent, len(self.replicas))
        self.retries, self.timeout = vllm.vllm_retries, vllm.vllm_timeout
        self._return_timeout, self._key = vllm.vllm_return_timeout, api_key(vllm)
        self._sampling = SamplingParams(1, agent.temperature, agent.top_p, agent.top_k)
        self._kept = vllm.staleness(servers=True) + 2
        self._path_map = read_path_map(vllm.vllm_adapter_path_map)
        self._run = uuid.uuid4().hex[:8]
        self._version: Version | None = None  # what new conversations sample from; None before the first is verified
        self.held: Counter[str | None] = Counter()
        """How many engines are pinned to a version, by its name on the servers."""
        self._rollouts: dict[Version, dict[str, tuple[Request, Completion] | None]] = {}
        """For each recent version, by replica, its first completion in a rollout, until it is scored; then None."""
        self._probed: Version | None = None  # the version that the probe's model has
        # Every request has a connection: without a free handle, of often 1,024, all servers would be excluded.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.alive]

    def load_adapter(self, path: Path | None, version: str) -> None:
        """Load and verify the adapter in ``path`` on every healthy replica, under a name never used before. Running
        conversations keep theirs. Raises EmailRLError if a replica refuses it or fails the probe (naming the replica),
        or none is left; new conversations then keep using the previous version."""
        with closing(self.hand_over(path, version)) as new:
            new.load()

    def hand_over(self, path: Path | None, version: str) -> PinnedVersion:
        """Run the part of loading that needs the trainer's model; ``load`` on the result does the rest. Call it, and
        anything else that loads a version, only after the last one's ``load`` has ended and ``settle``."""
        expected = self._probe(path)  # also checks its files before a server reads them
        new = Version(version, expected)
        if path is not None:
            seen = path.absolute()
            if self._path_map is not None:
                here, there = self._path_map
                if not seen.is_relative_to(here):
                    raise UsageError(f"The adapter {seen} is not under {here}.", "Fix VLLM_ADAPTER_PATH_MAP.")
                seen = there / seen.relative_to(here)
            plain = re.sub(r"[^A-Za-z0-9.]+", "-", version).strip("-")[-40:]
            served = f"emailrl-{self._run}-{plain}-{str(expected.adapter_sha256)[:12]}"
            new = Version(version, expected, served, path, str(seen))
        self._rollouts = dict(list(self._rollouts.items())[1 - self._kept :]) | {new: {}}
        self._probed = new
        return PinnedVersion(self, new, is_new=True)

    def pin(self) -> PinnedVersion:
        """An engine pinned to the version loaded now, regardless of later loads."""
        if self._version is None:
            self.load_adapter(None, "")
        assert self._version is not None
        return PinnedVersion(self, self._version)

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError when no replica is left."""
        with closing(self.pin()) as pinned:
            return pinned.generate(requests, advance)

    def settle(self) -> None:
        """Check everything sampled since the last call against the trainer's model, before training on it. Raises
        EmailRLError if it is wrong."""
        for version, drawn in self._rollouts.items():
            kept = [(who, *pair) for who, pair in list(drawn.items()) if pair]  # a copy: other threads add to it
            for who, request, completion in kept:
                if version is not self._probed:
                    self._probe(version.folder)
                    self._probed = version
                self.probe.check_completion(who, request.prompt_ids, completion.token_ids, completion.logprobs)
                drawn[who] = None

    def keep(self, version: Version, who: str, request: Request, completion: Completion) -> None:
        """Keep a replica's first completion by a version that is long enough to be scored."""
        like_training = request.sampling.temperature == self.probe.temperature
        if like_training and len(completion.token_ids) >= SHORTEST:
            self._rollouts.get(version, {}).setdefault(who, (request, completion))

    def _probe(self, path: Path | None) -> Expected:
        self._probed = None  # if it fails
        return self.probe.load(path)

    async def take(self, version: Version, client: httpx.AsyncClient) -> None:
        """Load and verify a version on all replicas, and unload old ones."""
        await self._admit(client, self.replicas, version)
        self._version = version
        await self._unload(client, kept=self._kept)

    async def _unload(self, client: httpx.AsyncClient, *, kept: int) -> None:
        """Unload all versions but the last ``kept``, those held and those with requests in flight."""
        for replica in self.alive:
            old = replica.loaded[: max(len(replica.loaded) - kept, 0)]
            try:
                for name in [each for each in old if not (kept and self.held[each]) and each not in replica.in_flight]:
                    await replica.unload(client, name)
            except ReplicaDown as error:
                self.leave_out(replica, str(error))

    def release(self) -> None:
        """Verify what was sampled, before it is trained on; the servers keep their GPUs."""
        self.settle()

    def resume(self) -> None:
        """Readmit excluded replicas that are healthy again."""
        if self._version is not None and (away := [each for each in self.replicas if not each.alive]):
            self.run(partial(self._admit, replicas=away, version=self._version))

    def close(self) -> None:
        """Unload this engine's adapters from the healthy replicas."""
        self.run(partial(self._unload, kept=0))

    async def _admit(self, client: httpx.AsyncClient, replicas: Sequence[Replica], version: Version) -> None:
        """Load a version on replicas and verify it; exclude those that fail, and wait if none is left. Raises
        EmailRLError if a replica refuses the adapter or fails the probe (naming it), or none is left: at the start at
        once, else after VLLM_RETURN_TIMEOUT."""
        failures = await asyncio.gather(*(self.bring(client, replica, version) for replica in replicas))
        if not self.alive:
            why = next(filter(None, failures), "")
            if self._version is None:
                raise _none_available(len(self.replicas), why)
            await self.wait_for_any(client, version, why)

    async def bring(self, client: httpx.AsyncClient, replica: Replica, version: Version) -> str | None:
        """Load and verify a version on a replica; returns why it cannot be used, or None."""
        try:
            await replica.check_health(client)
            if version.served is not None and version.path is not None:
                await replica.load(client, version.served, version.path)
            await replica.prove(client, version.served or replica.base, self.probe, self._sampling, version.expected)
        except ReplicaDown as error:
            self.leave_out(replica, str(error))
            return str(error)
        except EmailRLError:
            replica.alive = False
            raise
        if not replica.alive:
            replica.alive = True
            report(f"{replica} is back in use.")
        return None

    async def wait_for_any(self, client: httpx.AsyncClient, version: Version, why: str) -> None:
        """Wait for an excluded replica to come back and load the version on it; EmailRLError if none does."""
        if self._return_timeout and not self.alive:
            because = f" ({why.rstrip('.')})" if why else ""
            report(f"No vLLM server is left{because}; waiting up to {self._return_timeout:g} s for one to come back.")
        until = time.monotonic() + self._return_timeout
        while not self.alive:
            if time.monotonic() >= until:
                raise _none_available(len(self.replicas), why)
            await asyncio.sleep(min(LOOK_AGAIN, self._return_timeout))
            for replica in [each for each in self.replicas if not each.alive]:
                await self.bring(client, replica, version)

    async def examine(self, client: httpx.AsyncClient, replica: Replica, failure: str) -> list[str]:
        """After a failed request, the models that the replica lists; it is excluded unless it is healthy."""
        try:
            return await replica.check_health(client)
        except (ReplicaDown, EmailRLError):
            self.leave_out(replica, failure)
            return []

    def leave_out(self, replica: Replica, why: str) -> None:
        """Send nothing more to a replica until it is admitted again."""
        if replica.alive:
            replica.alive = False
            report(f"{replica} is excluded: {why.rstrip('.')}. {len(self.alive)} of {len(self.replicas)} remain.")

    def run(self, act: Act[T]) -> T:
        return with_client(self._key, self.timeout, act)


class PinnedVersion:
    """An engine that stays on one version of the servers' adapters until it is closed, in any thread."""

    def __init__(self, servers: VllmServers, version: Version, *, is_new: bool = False) -> None:
        self._servers, self.version, self._is_new = servers, version, is_new
        self._homes: dict[str, Replica] = {}  # where each conversation has its KV cache
        self._mending = asyncio.Lock()
        self._cancelled = False
        self._under_way: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None
        servers.held[version.served] += 1

    def load(self) -> None:
        """Load and verify the version before it is sampled from; does nothing if it already is. Raises EmailRLError if
        a server refuses it or fails the verification."""
        if self._is_new:
            self._until_cancelled(partial(self._servers.take, self.version))

    def close(self) -> None:
        """Let the version be unloaded."""
        self._servers.held[self.version.served] -= 1

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError if no replica is left, CancelledError after ``cancel``."""
        self._mending = asyncio.Lock()  # it belongs to one event loop, and so to one call
        ended = Ended(advance, self.version.label, self.version.expected.adapter_sha256)
        most = self._servers.conversations
        return self._until_cancelled(
            lambda client: converse(requests, partial(self._complete, client), ended, limit=most)
        )

    def _until_cancelled(self, act: Act[T]) -> T:
        async def acting(client: httpx.AsyncClient) -> T:
            task = asyncio.current_task()
            assert task is not None
            self._under_way = asyncio.get_running_loop(), task
            if self._cancelled:
                raise asyncio.CancelledError
            return await act(client)

        try:
            return self._servers.run(acting)
        finally:
            self._under_way = None

    def cancel(self) -> None:
        """Abort loading or generation running in another thread, and any later call, with an exception."""
        self._cancelled = True
        if (under_way := self._under_way) is not None:
            with suppress(RuntimeError):  # it has already ended
                under_way[0].call_soon_threadsafe(under_way[1].cancel)

    async def _complete(self, client: httpx.AsyncClient, request: Request) -> Completion:
        started = time.perf_counter()
        completion = await self._sample(client, request)
        completion.seconds, completion.prompt_tokens = time.perf_counter() - started, len(request.prompt_ids)
        return completion

    async def _sample(self, client: httpx.AsyncClient, request: Request) -> Completion:
        """Try one replica after another until one answers or the retries are used up."""
        servers = self._servers
        failure, shunned, pause = "", None, 0.0
        for attempt in range(servers.retries + 1):
            await asyncio.sleep(min(LONGEST_WAIT, pause))
            if not servers.alive:
                async with self._mending:
                    await servers.wait_for_any(client, self.version, failure)
            # The replica with the conversation's KV cache, else the least busy one.
            replica, alive = self._homes.get(request.trajectory_id), servers.alive
            if replica is None or not replica.alive or replica is shunned:
                others = [each for each in alive if each is not shunned] or alive
                replica = self._homes[request.trajectory_id] = min(others, key=lambda each: len(each.in_flight))
            window = min(replica.max_model_len or sys.maxsize, servers.max_model_len or sys.maxsize)
            if (room := window - len(request.prompt_ids)) < 1:
                return Completion(request.trajectory_id, [], [], "length")
            name = self.version.served or replica.base
            body = completion_body(name, request.sampling, request.prompt_ids, request.seed, room, servers.stop_ids)
            try:
                response = await replica.complete(client, body)
                if response.status_code == 200:
                    completion = read_completion(replica, request, body, response, servers.probe.vocabulary)
                    servers.keep(self.version, str(replica), request, completion)
                    return completion
            except (httpx.RequestError, ReplicaDown) as error:
                failure, shunned = replica.redact(cause(error)), replica
                pause = 0.0 if len(servers.alive) > 1 else 2.0 ** (attempt - 1)
                await servers.examine(client, replica, failure)
                continue
            failure, shunned = replica.redact(f"HTTP {response.status_code}: {response.text}"), replica
            pause = pause_asked_for(response.headers) or 2.0 ** (attempt - 1)
            if response.status_code == 404:  # a restarted server has no adapters: one conversation loads it for all
                async with self._mending:
                    listed = await servers.examine(client, replica, failure)
                    if replica.alive and self.version.served not in listed:
                        await servers.bring(client, replica, self.version)
            elif response.status_code >= 500:
                await servers.examine(client, replica, failure)
            elif not may_pass(response.status_code):
                break
        return Completion(request.trajectory_id, [], [], "error", error=f"{shunned}: {failure}")


def check_servers(vllm: VllmSettings) -> None:
    """Raise EmailRLError if none of the servers in VLLM_URLS answers; for use before a model is loaded."""
    replicas = _replicas(vllm)

    async def examine(client: httpx.AsyncClient) -> list[list[str] | BaseException]:
        return await asyncio.gather(*(replica.check_health(client) for replica in replicas), return_exceptions=True)

    found = with_client(api_key(vllm), HEALTH_TIMEOUT, examine)
    if all(isinstance(each, BaseException) for each in found):
        raise _none_available(len(replicas), str(found[0]))


def _replicas(vllm: VllmSettings, needed: int | None = None) -> list[Replica]:
    """The servers in the settings, not contacted yet; prints where conversations go."""
    key = api_key(vllm)
    replicas = [Replica(url, key, needed) for url in read_urls(vllm.vllm_urls)]
    for replica in replicas:
        tell(replica.url, "policy", with_key=bool(key))
    return replicas


def _none_available(count: int, why: str) -> EmailRLError:
    reason = why.rstrip(".") or "all were excluded"
    return EmailRLError(f"No vLLM server available ({count} configured): {reason}.", "Start one with emailrl serve.")


def with_client(key: str, timeout: float, act: Act[T]) -> T:
    async def acting() -> T:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT)
        waits = httpx.Timeout(timeout, connect=10.0, pool=None)
        async with Client(headers=headers, timeout=waits, limits=limits, verify=_certificates()) as client:
            return await act(client)

    return run(acting())


_certificates = cache(httpx.create_ssl_context)
"""Read once: it takes longer than all else that a client needs, and every step has several clients."""
