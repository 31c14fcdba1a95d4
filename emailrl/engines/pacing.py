"""Concurrent conversations with remote servers, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from emailrl.engines.base import Advance, Completion, Request

Complete = Callable[[Request], Awaitable[Completion]]


async def converse(
    requests: Sequence[Request], complete: Complete, advance: Advance | None, *, limit: int
) -> list[Completion]:
    """Complete every request and every follow-up (``Engine.generate``), at most ``limit`` conversations at a time.

    A conversation keeps its slot until it ends, so that its next turn soon hits the server's prompt cache. An exception
    from ``complete`` cancels all of them and propagates.
    """
    gate = asyncio.Semaphore(limit)
    ended: list[tuple[int, Completion]] = []

    async def conversation(place: int, request: Request | None) -> None:
        async with gate:
            while request is not None:
                completion = await complete(request)
                ended.append((place, completion))
                request = advance(completion) if advance is not None else None

    tasks = [asyncio.ensure_future(conversation(place, request)) for place, request in enumerate(requests)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if advance is None:
        ended.sort(key=lambda pair: pair[0])
    return [completion for _, completion in ended]
