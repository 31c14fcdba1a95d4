"""The vLLM servers of one engine: which are in use, what they have loaded, and how to reach them.

Thread-safe: rollouts and evaluations of different versions run concurrently, each in its own event loop.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import httpx

from emailrl.engines.budget import rows_per_server
from emailrl.engines.probe import Expected, Probe
from emailrl.engines.replicas import HEALTH_TIMEOUT, Replica, sampling_body
from emailrl.engines.report import report
from emailrl.engines.vllm_answers import Choice, ReplicaDown
from emailrl.engines.vllm_arguments import api_key, read_urls
from emailrl.errors import EmailRLError
from emailrl.remote.destination import tell
from emailrl.remote.reply import Client
from emailrl.settings import Settings

KEPT = 16
"""Connections per pool above which idle ones are closed: httpcore compares every idle one with all others, twice per
request."""
LOOK_AGAIN = 2.0
"""Poll interval in seconds while all servers are down."""

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
    path: str | None = None
    """Its folder, as the servers see it."""


@dataclass
class Fleet:
    """The servers of VLLM_URLS. ``wait`` is how many seconds all of them may be down before a rollout fails."""

    replicas: list[Replica]
    probe: Probe
    key: str
    timeout: float
    wait: float
    sampling: dict[str, float | int | bool] = field(default_factory=dict)
    _waiting: int = field(default=0, init=False)
    """Calls waiting for any server; only the first reports it."""

    @classmethod
    def of(cls, settings: Settings, probe: Probe) -> Fleet:
        """The servers in the settings, not contacted yet."""
        vllm, agent = settings.vllm, settings.agent
        key = api_key(settings)
        replicas = _replicas(settings)
        allow_connections(sum(replica.most for replica in replicas))
        # The default of LITELLM_TIMEOUT suits shared chat servers; it applies here only if set explicitly.
        given = "litellm_timeout" in settings.rewards.model_fields_set and "vllm_timeout" not in vllm.model_fields_set
        timeout = settings.rewards.litellm_timeout if given else vllm.vllm_timeout
        sampling = sampling_body(agent.temperature, agent.top_p, agent.top_k)
        return cls(replicas, probe, key, timeout, vllm.vllm_return_timeout, sampling)

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
        sampled: Callable[[str, Choice], None],
    ) -> None:
        """Load a version on replicas and verify it; exclude those that fail, and wait if none is left.

        ``again`` means they were in use before: their return is reported, and all may be down for a while. ``sampled``
        is called with the tokens that each verified replica sampled. Raises EmailRLError if a replica refuses the
        adapter or fails the probe (naming it), or none is left.
        """
        before = {replica for replica in replicas if replica.alive}
        failures = await asyncio.gather(*(self._bring(client, replica, version, sampled) for replica in replicas))
        for replica, failure in zip(replicas, failures, strict=True):
            if failure is not None and (replica in before or not again):
                report(f"{replica} is excluded: {failure.rstrip('.')}.")
            elif failure is None and replica not in before and again:
                report(f"{replica} is back in use.")
        if not self.alive:
            why = next(filter(None, failures), "no replica")
            if not again:
                raise self._nobody(why)
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
                    raise self._nobody(why)
                await asyncio.sleep(min(LOOK_AGAIN, self.wait))
                for replica in self.replicas:
                    if not replica.alive and await self.restore(client, replica, version) is None:
                        report(f"{replica} is back in use, with {version.label or 'its base model'}.")
        finally:
            self._waiting -= 1

    async def restore(self, client: httpx.AsyncClient, replica: Replica, version: Version) -> str | None:
        """Load and verify a version on a replica that was in use before; returns why it failed, or None."""
        return await self._bring(client, replica, version, lambda who, choice: None)

    async def _bring(
        self,
        client: httpx.AsyncClient,
        replica: Replica,
        version: Version,
        sampled: Callable[[str, Choice], None],
    ) -> str | None:
        try:
            await replica.check_health(client)
            await replica.models(client)
            if version.served is not None and version.path is not None:
                await replica.load(client, version.served, version.path)
            name = version.served or replica.base
            sampled(str(replica), await replica.probe(client, name, self.probe, self.sampling, version.expected))
        except ReplicaDown as error:
            replica.alive = False
            return str(error)
        except EmailRLError:
            replica.alive = False
            raise
        replica.alive = True
        return None

    async def examine(self, client: httpx.AsyncClient, replica: Replica, failure: str) -> None:
        """After a failed request, exclude the replica unless it is healthy and lists its models.

        Health alone is not enough: a proxy may answer ``/health`` with its own page.
        """
        try:
            await replica.check_health(client)
            await replica.models(client)
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

    def _nobody(self, why: str) -> EmailRLError:
        return _none_available(len(self.replicas), why)

    def run(self, act: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        """Run ``act(client)`` in its own event loop."""
        return _with_client(self.key, self.timeout, act)


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


def room(replica: Replica, prompt_tokens: int, max_model_len: int | None) -> int:
    """Maximum tokens after a prompt."""
    lengths = [length for length in (replica.max_model_len, max_model_len) if length is not None]
    return min(lengths, default=sys.maxsize) - prompt_tokens
