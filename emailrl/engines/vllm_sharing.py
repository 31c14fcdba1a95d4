"""Whether a vLLM server is in use by another training run, or by this one under two addresses.

The probe asks for a prompt's log-probabilities, which may end a vLLM engine that answers other requests meanwhile. A
run holds back its own requests, but not those of another run. vLLM lists an adapter with its folder as ``root`` and its
base model as ``parent`` (seen with 0.26), so a run is recognized by the folder that its adapters were loaded from.

A server with two addresses (localhost and 127.0.0.1) would count as two replicas, so that requests sent to one address
would not be held back for a probe at the other. It is recognized by an adapter that is loaded at one address and listed
at both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import httpx

from emailrl.disk import LOCK, is_locked
from emailrl.engines.replicas import Replica
from emailrl.engines.report import report
from emailrl.engines.vllm_answers import ReplicaDown
from emailrl.errors import UsageError

PREFIX: Final = "emailrl"
"""Prefix of the names of adapters that runs load into servers."""
HINT: Final = "Give each training run servers of its own; emailrl serve starts some."


async def check_unshared(
    client: httpx.AsyncClient, replica: Replica, own: Path | None, as_seen_here: Callable[[Path], Path]
) -> None:
    """Raise UsageError if a replica holds an adapter of another run under way; report runs that cannot be seen here.

    ``own`` is the folder of this engine's adapter. A replica that is down is skipped.
    """
    try:
        listed = await replica.listed(client)
    except ReplicaDown:
        return
    roots = [Path(model.root) for model in listed if model.root and model.parent and model.id.startswith(f"{PREFIX}-")]
    others = {_run_of(as_seen_here(root)) for root in roots} - {None if own is None else _run_of(own)}
    for run in sorted(filter(None, others)):
        if is_locked(run / LOCK):
            raise UsageError(f"{replica} is in use by another training run, {run}.", HINT)
        if not run.exists():
            report(f"{replica} holds adapters of another run, {run}, which is not visible here. {HINT}")


async def check_distinct(client: httpx.AsyncClient, replicas: Sequence[Replica], name: str, path: str) -> None:
    """Load an adapter on one replica after another, under a name never used before; UsageError if two are one server.

    Replicas that are down are skipped.
    """

    async def lists(replica: Replica) -> bool | None:
        try:
            return name in await replica.models(client)
        except ReplicaDown:
            return None

    listed = await asyncio.gather(*map(lists, replicas))
    up = [replica for replica, found in zip(replicas, listed, strict=True) if found is not None]
    while len(up) > 1:
        replica, *up = up
        try:
            await replica.load(client, name, path)
        except ReplicaDown:
            continue
        for other, found in zip(up, await asyncio.gather(*map(lists, up)), strict=True):
            if found:
                raise UsageError(
                    f"{replica} is listed twice in VLLM_URLS, also as {other.shown}.",
                    "Remove one of the two addresses.",
                )


def _run_of(adapter: Path) -> Path | None:
    """The run that wrote ``RUN/policy/v-000001``; None for what cannot be a path."""
    try:
        return adapter.resolve().parent.parent
    except (OSError, RuntimeError, ValueError):  # a circle of links, a null character
        return None
