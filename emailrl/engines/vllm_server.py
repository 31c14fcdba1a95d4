"""One or more vLLM servers as sampling replicas: token ids in and out, one immutable adapter name for each version.

An adapter is loaded on every replica, seen listed there and proven by its log-probabilities (``probe``) before anything
is sampled from it; its hash stands on every completion. A replica that dies is reported and left out, its requests go
to the others, and it is taken in again at the next rollout once it is well and has proven the adapter.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx

from emailrl.engines.base import Advance, Completion, Request
from emailrl.engines.pacing import converse
from emailrl.engines.probe import Probe
from emailrl.engines.replicas import Replica, cause, completion_body, read_completion, retry_after, sampling_body
from emailrl.engines.report import report
from emailrl.engines.vllm_answers import ReplicaDown
from emailrl.engines.vllm_arguments import read_path_map, read_urls
from emailrl.errors import EmailRLError, UsageError
from emailrl.remote.destination import tell
from emailrl.remote.reply import Client
from emailrl.settings import Settings

KEPT_ADAPTERS = 3
"""Versions that stay loaded: the one in use and the two before (requests may still be ending on them)."""
LONGEST_WAIT = 8.0
"""Seconds; pauses between tries double from half a second, or follow ``Retry-After``, up to this."""

T = TypeVar("T")


class VllmServers:
    """Samples on the servers of ``settings.vllm.vllm_urls``, from their base model until ``load_adapter``."""

    def __init__(self, settings: Settings, probe: Probe, stop_ids: Collection[int]) -> None:
        self._settings = settings.vllm
        self._agent = settings.agent
        self._probe = probe
        self._stop_ids = sorted(stop_ids)
        self._max_model_len = settings.model.max_model_len
        self._key = self._settings.vllm_api_key.get_secret_value() if self._settings.vllm_api_key else ""
        self._replicas = [Replica(url, self._key) for url in read_urls(self._settings.vllm_urls)]
        for replica in self._replicas:
            tell(replica.url, "policy", with_key=bool(self._key))
        # The defaults of these two suit chat servers that strangers share; they hold here where they were chosen.
        chosen = settings.agent.model_fields_set | settings.rewards.model_fields_set
        most = self._agent.max_batch_trajectories * len(self._replicas)
        self._limit = self._agent.rollout_concurrency if "rollout_concurrency" in chosen else most
        given = "litellm_timeout" in chosen and "vllm_timeout" not in self._settings.model_fields_set
        self.timeout = settings.rewards.litellm_timeout if given else self._settings.vllm_timeout
        self._path_map = read_path_map(self._settings.vllm_adapter_path_map)
        self._run = uuid.uuid4().hex[:8]
        self._path: Path | None = None
        self._name: str | None = None
        """The adapter's name on the servers; None: their base model."""
        self._proven = False
        self._homes: dict[str, Replica] = {}
        self._restoring: dict[Replica, asyncio.Lock] = {}
        self.version = ""
        self.adapter_sha256: str | None = None

    @property
    def alive(self) -> list[Replica]:
        """The replicas that take part."""
        return [replica for replica in self._replicas if replica.alive]

    def load_adapter(self, path: Path | None, version: str) -> None:
        """Load and prove the adapter in ``path`` on every replica that is well, under a name never used before.

        Raises EmailRLError where a replica refuses or mistakes it (naming the replica), or none is left.
        """
        self._probe.load(path)  # which also checks its files, before a server gets to see them
        self._path = None if path is None else path.absolute()
        self.version, self.adapter_sha256 = version, self._probe.adapter_sha256
        self._name = None if self.adapter_sha256 is None else self._new_name(version, self.adapter_sha256)
        self._homes.clear()
        for replica in self._replicas:
            replica.alive = False
        self._proven = False
        self._in_loop(self._admit_all)
        self._proven = True

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError when no replica is left."""
        if not self._proven:
            self.load_adapter(self._path, self.version)

        async def play(client: httpx.AsyncClient) -> list[Completion]:
            return await converse(requests, partial(self._complete, client), advance, limit=self._limit)

        try:
            return self._in_loop(play)
        finally:
            self._homes.clear()
            self._restoring.clear()  # locks belong to one event loop

    def release(self) -> None:
        """Nothing to do: the servers have GPUs of their own."""

    def resume(self) -> None:
        """Take in replicas again that were left out and are well now."""
        if self._proven and len(self.alive) < len(self._replicas):
            self._in_loop(self._admit_all)

    def close(self) -> None:
        """Unload this engine's adapters from the replicas that are well."""
        self._in_loop(partial(self._unload_stale, kept=0))

    # -- replicas

    async def _admit_all(self, client: httpx.AsyncClient) -> None:
        missing = [replica for replica in self._replicas if not replica.alive]
        returning = [replica for replica in missing if self._proven]
        failures = await asyncio.gather(*(self._admit(client, replica) for replica in missing))
        for replica, failure in zip(missing, failures, strict=True):
            if failure is None and replica in returning:
                report(f"{replica} is back in use.")
            elif failure is not None and replica not in returning:
                report(f"{replica} is excluded: {failure.rstrip('.')}.")
        if not self.alive:
            raise self._nobody(next(filter(None, failures), "no replica"))
        await self._unload_stale(client, kept=KEPT_ADAPTERS)

    async def _admit(self, client: httpx.AsyncClient, replica: Replica) -> str | None:
        """Bring a replica to the version in use and let it prove it; returns why it is not well, None when it is."""
        try:
            await replica.check_health(client)
            await replica.models(client)
            if self._name is not None:
                assert self._path is not None
                await replica.load(client, self._name, self._as_seen_there(self._path))
            agent = self._agent
            sampling = sampling_body(agent.temperature, agent.top_p, agent.top_k)
            await replica.probe(client, self._name or replica.base, self._probe, sampling)
        except ReplicaDown as error:
            return str(error)
        replica.alive = True
        return None

    async def _unload_stale(self, client: httpx.AsyncClient, *, kept: int) -> None:
        """Unload versions that are no longer wanted, where no request is under way on them."""
        for replica in self._replicas:
            for name in replica.loaded[: max(len(replica.loaded) - kept, 0)]:
                if replica.alive and not replica.in_flight[name]:
                    try:
                        await replica.unload(client, name)
                    except ReplicaDown as error:
                        self._leave_out(replica, str(error))

    async def _examine(self, client: httpx.AsyncClient, replica: Replica, failure: str) -> None:
        """After a failed request: leave the replica out unless it says that it is well and lists its models.

        A proxy may answer ``/health`` with a page of its own.
        """
        try:
            await replica.check_health(client)
            await replica.models(client)
        except (ReplicaDown, EmailRLError):
            self._leave_out(replica, failure)

    async def _restore(self, client: httpx.AsyncClient, replica: Replica) -> None:
        """Give a replica that was started anew the version in use again, once for all who found it without."""
        async with self._restoring.setdefault(replica, asyncio.Lock()):
            try:
                lost = self._name not in await replica.models(client)
                failure = await self._admit(client, replica) if lost else None
            except ReplicaDown as error:
                failure = str(error)
        if failure is not None:
            self._leave_out(replica, failure)

    def _leave_out(self, replica: Replica, why: str) -> None:
        if replica.alive:
            replica.alive = False
            report(f"{replica} is excluded: {why.rstrip('.')}. {len(self.alive)} of {len(self._replicas)} remain.")

    def _nobody(self, why: str) -> EmailRLError:
        return EmailRLError(
            f"No vLLM server available ({len(self._replicas)} configured): {why.rstrip('.') or 'all were excluded'}.",
            "Start one and run the command again; emailrl train continues with --resume auto.",
        )

    # -- completions

    async def _complete(self, client: httpx.AsyncClient, request: Request) -> Completion:
        started = time.perf_counter()
        completion = await self._sample(client, request)
        completion.seconds = time.perf_counter() - started
        completion.prompt_tokens = len(request.prompt_ids)
        completion.policy_version, completion.adapter_sha256 = self.version, self.adapter_sha256
        return completion

    async def _sample(self, client: httpx.AsyncClient, request: Request) -> Completion:
        """Ask one replica after the other until one answers or the tries are used up."""
        failure, shunned, pause = "", None, 0.0
        for attempt in range(self._settings.vllm_retries + 1):
            await asyncio.sleep(min(LONGEST_WAIT, pause))
            replica = self._choose(request.trajectory_id, shunned, failure)
            room = self._room(replica, request)
            if room < 1:
                return Completion(request.trajectory_id, [], [], "length")
            name = self._name or replica.base
            body = completion_body(request, name, stop_ids=self._stop_ids, room=room)
            replica.in_flight[name] += 1
            try:
                response = await replica.complete(client, body)
                if response.status_code == 200:
                    return read_completion(replica, request, response, name, self._probe.vocabulary)
            except (httpx.RequestError, ReplicaDown) as error:
                failure, shunned = replica.redact(cause(error)), replica
                pause = 0.0 if len(self.alive) > 1 else 2.0 ** (attempt - 1)
                await self._examine(client, replica, failure)
                continue
            finally:
                replica.in_flight[name] -= 1
            failure, shunned = replica.redact(f"HTTP {response.status_code}: {response.text}"), replica
            asked = retry_after(response)
            pause = 2.0 ** (attempt - 1) if asked is None else asked
            if response.status_code == 404:  # started anew, it knows no adapters
                await self._restore(client, replica)
            elif response.status_code >= 500:
                await self._examine(client, replica, failure)
            elif response.status_code not in (408, 429):
                break
        return Completion(request.trajectory_id, [], [], "error", error=f"{shunned}: {failure}")

    def _choose(self, trajectory_id: str, shunned: Replica | None, failure: str) -> Replica:
        """The replica that holds the conversation's keys and values, else the least busy one."""
        if not self.alive:
            raise self._nobody(failure)
        home = self._homes.get(trajectory_id)
        if home is None or not home.alive or home is shunned:
            others = [replica for replica in self.alive if replica is not shunned] or self.alive
            home = min(others, key=lambda replica: replica.in_flight.total())
            self._homes[trajectory_id] = home
        return home

    def _room(self, replica: Replica, request: Request) -> int:
        """Tokens that may follow the prompt."""
        lengths = [length for length in (replica.max_model_len, self._max_model_len) if length is not None]
        return min(lengths, default=sys.maxsize) - len(request.prompt_ids)

    # -- names, paths, connections

    def _new_name(self, version: str, sha256: str) -> str:
        """Run, version and content: never the name of another adapter, on no server, in no process."""
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", version).strip("-")[-40:]
        return f"emailrl-{self._run}-{plain}-{sha256[:12]}"

    def _as_seen_there(self, path: Path) -> str:
        if self._path_map is None:
            return str(path)
        here, there = self._path_map
        if not path.is_relative_to(here):
            raise UsageError(f"The adapter {path} is not under {here}.", "Fix VLLM_ADAPTER_PATH_MAP.")
        return str(there / path.relative_to(here))

    def _in_loop(self, act: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        """Run ``act(client)`` in an event loop of its own."""

        async def run() -> T:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            timeout = httpx.Timeout(self.timeout, connect=10.0, pool=None)
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with Client(headers=headers, timeout=timeout, limits=limits) as client:
                return await act(client)

        return asyncio.run(run())
