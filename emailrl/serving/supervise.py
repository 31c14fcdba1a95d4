"""Keep several servers running: wait until all are healthy, restart them a few times, stop them together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from emailrl.errors import EmailRLError
from emailrl.serving.orphans import adopt_orphans, end_children
from emailrl.serving.server import Server

PAUSE = 1.0
"""Seconds between health checks."""
PROGRESS_SECONDS = 15.0

Say = Callable[[str], None]


@contextmanager
def running(servers: Sequence[Server]) -> Iterator[None]:
    """Start the servers, and stop them when the block ends."""
    adopt_orphans()
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.release()
        for server in servers:
            _end(server, servers)


def _end(server: Server, servers: Sequence[Server]) -> None:
    """End one of the servers; if its keeper was killed, also what that left behind: this process adopts it.

    All other children of this process are keepers.
    """
    if not server.end():
        end_children(besides={one.keeper for one in servers if one.keeper is not None} - {server.keeper})


def wait_until_well(servers: Sequence[Server], *, timeout: float, say: Say) -> float:
    """Wait until every server answers; returns the seconds it took.

    Raises EmailRLError with the end of its log for one that dies first or is not healthy after ``timeout`` seconds.
    """
    begun = told = time.monotonic()
    while waiting := [server for server in servers if not server.was_well]:
        for server in waiting:
            if (why := server.check()) is not None:
                raise EmailRLError(f"{server.url} did not start ({why.rstrip('.')}).", _remedy(why, server))
            if server.was_well:
                say(f"{server.url} is ready after {time.monotonic() - begun:.0f} s.")
        now = time.monotonic()
        if now - begun > timeout:
            raise EmailRLError(
                f"{waiting[0].url} is not ready after {timeout:g} s.",
                f"Raise --start-timeout, or see {waiting[0].log}.",
            )
        if now - told > PROGRESS_SECONDS:
            told = now
            ready = sum(server.was_well for server in servers)
            say(f"{ready} of {len(servers)} servers are ready after {now - begun:.0f} s.")
        time.sleep(PAUSE)
    return time.monotonic() - begun


def _remedy(why: str, server: Server) -> str:
    memory = "Lower --gpu-memory-utilization, or free memory. " if "memory utilization" in why.lower() else ""
    return f"{memory}The whole log: {server.log}."


def supervise(servers: Sequence[Server], *, restarts: int, timeout: float, say: Say) -> None:
    """Restart servers that die or hang, each at most ``restarts`` times; never returns.

    A server that is not healthy ``timeout`` seconds after its restart counts as dead. Raises EmailRLError when none is
    left.
    """
    alive, since = list(servers), dict.fromkeys(map(id, servers), time.monotonic())
    while alive:
        for server in list(alive):
            was_well = server.was_well
            why = server.check()
            if why is None and not server.was_well and time.monotonic() - since[id(server)] > timeout:
                why = f"it is not ready after {timeout:g} s"
            if why is None:
                if server.was_well and not was_well:
                    say(f"{server.url} is back.")
                continue
            _end(server, servers)
            if server.starts > restarts:
                say(f"{server.url} died ({why}); it will not be restarted again (--max-restarts {restarts}).")
                alive.remove(server)
                continue
            say(f"{server.url} died ({why}); restart {server.starts} of {restarts}.")
            since[id(server)] = time.monotonic()
            server.start()
        time.sleep(PAUSE)
    raise EmailRLError("No server is left.", f"The logs are in {servers[0].log.parent}.")
