"""One or more vLLM servers as sampling replicas: token ids in and out, one immutable adapter name for each version.

An adapter is loaded on every replica, checked to be listed there and verified by its log-probabilities (``probe``)
before it is sampled from; every completion records its hash. Of each replica, one completion per version is scored by
the trainer's model too. Conversations keep the version they started with while later ones are loaded. A replica that
dies is reported and excluded, its requests go to the others, and it is readmitted once it is healthy and its adapter is
verified.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import httpx

from emailrl.base.disk import LOCK, is_locked
from emailrl.base.errors import UsageError
from emailrl.engines.base import Advance, Completion, Request, report
from emailrl.engines.vllm.arguments import read_path_map
from emailrl.engines.vllm.fleet import Fleet, PinnedVersion, Version
from emailrl.engines.vllm.probe import LONGEST, SAMPLED, Probe
from emailrl.engines.vllm.replica import ListedModel, Replica, ReplicaDown
from emailrl.settings import Settings

PREFIX: Final = "emailrl"
"""Prefix of the names of adapters that runs load into servers."""
HINT: Final = "Give each training run servers of its own; emailrl serve starts some."
Load = Callable[[httpx.AsyncClient], Awaitable[None]]


class VllmServers:
    """Samples on the servers of ``settings.vllm.vllm_urls``, from their base model until ``load_adapter`` is called."""

    def __init__(self, settings: Settings, probe: Probe, stop_ids: Collection[int]) -> None:
        self._probe = probe
        self.fleet = Fleet(settings, probe, stop_ids)
        self._kept = settings.vllm.staleness(servers=True) + 2
        self._path_map = read_path_map(settings.vllm.vllm_adapter_path_map)
        self._run = uuid.uuid4().hex[:8]
        self._version: Version | None = None
        """The version that new conversations sample from; None before the first is verified."""
        self._held: Counter[str | None] = Counter()
        self._rollouts: dict[Version, dict[str, tuple[Request, Completion] | None]] = {}
        """For each recent version, by replica, its first completion in a rollout, until it is scored; then None. The
        probe's model has the last version."""

    @property
    def alive(self) -> list[Replica]:
        """The replicas in use."""
        return self.fleet.alive

    def load_adapter(self, path: Path | None, version: str) -> None:
        """Load and verify the adapter in ``path`` on every healthy replica, under a name never used before.

        Running conversations keep theirs. Raises EmailRLError if a replica refuses it or fails the probe (naming the
        replica), or none is left; new conversations then keep using the previous version.
        """
        self.fleet.run(partial(self._take, version=self._prepare(path, version)))

    def hand_over(self, path: Path | None, version: str) -> PinnedVersion:
        """See ``VersionedEngine.hand_over``."""
        new = self._prepare(path, version)
        return self._pinned(new, partial(self._take, version=new))

    def settle(self) -> None:
        """See ``VersionedEngine.settle``."""
        newest = next(reversed(self._rollouts), None)
        for version, drawn in self._rollouts.items():
            if version is newest:
                self._score(drawn)
            elif any(list(drawn.values())):  # a copy: other threads add to it
                self._probe.load(version.folder)
                try:
                    self._score(drawn)
                finally:
                    self._probe.load(newest.folder if newest is not None else None)

    def _score(self, drawn: dict[str, tuple[Request, Completion] | None]) -> None:
        """Compare completions with the probe's model, which has their version."""
        for who, kept in list(drawn.items()):
            if kept is not None:
                request, completion = kept
                sampled, logprobs = completion.token_ids[:LONGEST], completion.logprobs[:LONGEST]
                self._probe.check_sampled(who, sampled, logprobs, request.prompt_ids)
                drawn[who] = None

    def _prepare(self, path: Path | None, version: str) -> Version:
        """A version with all that must be computed by the trainer's model."""
        expected = self._probe.load(path)  # also checks its files before a server reads them
        if self._version is None:
            self.fleet.run(partial(self._check_unshared, own=path))
        sha256 = expected.adapter_sha256
        new = Version(
            version,
            expected,
            served=None if sha256 is None else self._new_name(version, sha256),
            folder=path,
            path=None if path is None else self._as_seen_there(path.absolute()),
        )
        self._rollouts = dict(list(self._rollouts.items())[1 - self._kept :]) | {new: {}}
        return new

    async def _take(self, client: httpx.AsyncClient, version: Version) -> None:
        """Load and verify a version, and unload old ones."""
        await self.fleet.admit(client, self.fleet.replicas, version, again=self._version is not None)
        self._version = version
        await self.fleet.unload(client, kept=self._kept, held=set(+self._held))

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        """See ``Engine.generate``. Raises EmailRLError when no replica is left."""
        with closing(self.pin()) as pinned:
            return pinned.generate(requests, advance)

    def pin(self) -> PinnedVersion:
        """An engine pinned to the version loaded now."""
        return self._pinned(self._current())

    def release(self) -> None:
        """Verify what was sampled, before it is trained on; the servers keep their GPUs."""
        self.settle()

    def resume(self) -> None:
        """Readmit excluded replicas that are healthy again."""
        if self._version is not None and (away := [each for each in self.fleet.replicas if not each.alive]):
            self.fleet.run(partial(self.fleet.admit, replicas=away, version=self._version, again=True))

    def close(self) -> None:
        """Unload this engine's adapters from the healthy replicas."""
        self.fleet.run(partial(self.fleet.unload, kept=0))

    def _current(self) -> Version:
        if self._version is None:
            self.load_adapter(None, "")
        assert self._version is not None
        return self._version

    def _pinned(self, version: Version, load: Load | None = None) -> PinnedVersion:
        self._held[version.served] += 1
        release = partial(self._held.subtract, [version.served])
        return PinnedVersion(self.fleet, version, load=load, sampled=partial(self._keep, version), close=release)

    def _keep(self, version: Version, who: str, request: Request, completion: Completion) -> None:
        """Keep a replica's first completion by a version that is long enough to be compared."""
        like_training = request.sampling.temperature == self._probe.temperature
        if like_training and len(completion.token_ids) >= SAMPLED:
            self._rollouts.get(version, {}).setdefault(who, (request, completion))

    async def _check_unshared(self, client: httpx.AsyncClient, own: Path | None) -> None:
        """Raise UsageError if a replica holds an adapter of another run under way; report runs that cannot be seen
        here.

        The probe asks for a prompt's log-probabilities, which may end a vLLM engine that answers other requests
        meanwhile; a run holds back only its own. vLLM lists an adapter with its folder as ``root`` and its base model
        as ``parent`` (seen with 0.26), so a run is recognized by the folder that its adapters were loaded from. ``own``
        is the folder of this engine's adapter.
        """

        async def models(replica: Replica) -> list[ListedModel]:
            try:
                return await replica.listed(client)
            except ReplicaDown:
                return []

        replicas = self.fleet.replicas
        for replica, listed in zip(replicas, await asyncio.gather(*map(models, replicas)), strict=True):
            loaded = [each for each in listed if each.root and each.parent and each.id.startswith(f"{PREFIX}-")]
            others = {_run_of(self._as_seen_here(Path(each.root or ""))) for each in loaded}
            for run in sorted(filter(None, others - {None if own is None else _run_of(own)})):
                if is_locked(run / LOCK):
                    raise UsageError(f"{replica} is in use by another training run, {run}.", HINT)
                if not run.exists():
                    report(f"{replica} holds adapters of another run, {run}, which is not visible here. {HINT}")

    def _new_name(self, version: str, sha256: str) -> str:
        """A globally unique name, from run, version and content."""
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", version).strip("-")[-40:]
        return f"{PREFIX}-{self._run}-{plain}-{sha256[:12]}"

    def _as_seen_there(self, path: Path) -> str:
        if self._path_map is None:
            return str(path)
        here, there = self._path_map
        if not path.is_relative_to(here):
            raise UsageError(f"The adapter {path} is not under {here}.", "Fix VLLM_ADAPTER_PATH_MAP.")
        return str(there / path.relative_to(here))

    def _as_seen_here(self, path: Path) -> Path:
        """The inverse of ``_as_seen_there``."""
        if self._path_map is None or not path.is_relative_to(self._path_map[1]):
            return path
        here, there = self._path_map
        return here / path.relative_to(there)


def _run_of(adapter: Path) -> Path | None:
    """The run that wrote ``RUN/policy/v-000001``; None for what cannot be a path."""
    try:
        return adapter.resolve().parent.parent
    except (OSError, RuntimeError, ValueError):  # a circle of links, a null character
        return None
