"""Bounded replies: a server may send without end, or a byte at a time, headers included.

Only an event loop can set one deadline from connecting to the last byte: an ordinary client's timeout restarts with
every byte. So all requests are asynchronous, and ``wait_for`` runs them for synchronous callers.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from threading import Lock, Thread
from typing import Any, ClassVar, Final, TypeVar

import httpx

MAX_REPLY_BYTES: Final = 8 << 20
"""Much more than the longest completion, reasoning included."""
T = TypeVar("T")


class IncompleteReply(httpx.TransportError):
    """A reply that is cut off, or exceeds the size or time limit."""


class WholeReplies:
    """Makes an asynchronous httpx client return complete replies of at most ``max_bytes``.

    A request's read timeout limits the whole exchange, from connecting to the last byte. Servers are asked not to
    compress; those that do may use gzip, once. IncompleteReply for one that is cut off, or over the time or size limit;
    httpx.DecodingError for one that cannot be decompressed.
    """

    max_bytes: ClassVar[int] = MAX_REPLY_BYTES

    async def send(self, request: Any, *, stream: bool = False, **how: Any) -> Any:
        """The reply to a request, read to its end."""
        seconds: float | None = request.extensions["timeout"]["read"]
        request.headers["Accept-Encoding"] = "identity"
        try:
            async with asyncio.timeout(seconds):
                response = await super().send(request, stream=True, **how)  # type: ignore[misc]
                try:
                    return _with_body(response, await self._body(response))
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise IncompleteReply(f"no complete reply within {seconds:g} s") from error

    async def _body(self, response: Any) -> bytes:
        unpacked = _unpacking(response.headers.get("content-encoding", ""))
        pieces, received, size = [], 0, 0
        async for sent in _pieces(response):
            received += len(sent)
            pieces.append(unpacked(sent, self.max_bytes - size + 1))
            size += len(pieces[-1])
            if max(received, size) > self.max_bytes:
                raise IncompleteReply(f"the reply is longer than {self.max_bytes >> 20} MiB")
        return b"".join(pieces)


async def _pieces(response: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_raw():
            yield piece
    except Exception as error:  # of httpx or of httpx2, by the client
        raise IncompleteReply("the reply was cut off") from error


class Client(WholeReplies, httpx.AsyncClient):
    """A client for servers of any kind."""


def _unpacking(encoding: str) -> Callable[[bytes, int], bytes]:
    """Decompress a piece of a reply, up to a limit: some KB can expand to gigabytes."""
    match encoding.strip().lower():
        case "" | "identity":
            return lambda sent, most: sent
        case "gzip" | "x-gzip":
            gzip = zlib.decompressobj(zlib.MAX_WBITS | 16)
        case _:
            raise httpx.DecodingError(f"the reply is compressed as {encoding!r}, although no compression was requested")

    def unpacked(sent: bytes, most: int) -> bytes:
        try:
            return gzip.decompress(sent, most)
        except zlib.error as error:
            raise httpx.DecodingError(str(error)) from error

    return unpacked


def _with_body(response: Any, body: bytes) -> Any:
    """The response with its decoded body, without its outdated length and encoding headers.

    Its charset is dropped: it could name any Python codec, including ones that do not produce text.
    """
    headers = {name: value for name, value in response.headers.items() if name not in _PACKING}
    if "content-type" in headers:
        headers["content-type"] = headers["content-type"].partition(";")[0]
    return type(response)(response.status_code, headers=headers, content=body, request=response.request)


_PACKING: Final = ("content-encoding", "content-length", "transfer-encoding")


# -- for those who do not run in an event loop ------------------------------------------------------------------------


def wait_for(exchange: Coroutine[Any, Any, T]) -> T:
    """Run an exchange in the event loop shared by all threads; interrupting the wait cancels it."""
    future = asyncio.run_coroutine_threadsafe(exchange, _loop())
    try:
        return future.result()
    finally:
        future.cancel()


_beginning = Lock()
_running: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Started on first use; its thread ends with the process, even with requests in flight."""
    with _beginning:
        if not _running:
            _running.append(asyncio.new_event_loop())
            Thread(target=_running[0].run_forever, name="servers", daemon=True).start()
        return _running[0]
