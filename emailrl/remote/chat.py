"""The ``openai`` client as all parts use it: one host, bounded replies, and errors that can be told.

Importing it imports ``openai``, so it is imported where a connection is made.
"""

from __future__ import annotations

from typing import Any, Final

import openai

from emailrl.remote.reply import Body, EndlessReply

MAX_REPLY_BYTES: Final = 8 << 20
"""Much more than the longest completion, thoughts included."""


def connect(base_url: str, key: str, *, timeout: float) -> openai.OpenAI:
    """A client of the chat server at ``base_url``; ``timeout`` in seconds. It sends nothing twice."""
    http_client = _Client(follow_redirects=False, timeout=timeout)  # what is sent goes to the named host only
    # The client insists on a key; local servers take any.
    return openai.OpenAI(
        api_key=key or "none", base_url=base_url, timeout=timeout, max_retries=0, http_client=http_client
    )


def connect_async(base_url: str, key: str, *, timeout: float, retries: int = 0) -> openai.AsyncOpenAI:
    """The same for one event loop; ``retries`` are the client's own, after 408, 409, 429, 5xx and lost connections."""
    http_client = _AsyncClient(follow_redirects=False, timeout=timeout)
    return openai.AsyncOpenAI(
        api_key=key or "none", base_url=base_url, timeout=timeout, max_retries=retries, http_client=http_client
    )


def told(error: openai.APIError) -> str:
    """What went wrong, in words; a server may have put the key into them."""
    if isinstance(error, openai.APIStatusError):
        return f"HTTP {error.status_code}: {error.message}"
    return f"{type(error).__name__}: {str(error.__cause__ or '') or error.message}"


# Bodies are read here, since the client reads them however long they are. The types are those of httpx or of httpx2,
# as the version of openai has it.


class _Client(openai.DefaultHttpxClient):
    def send(self, request: Any, *, stream: bool = False, **how: Any) -> Any:
        response = super().send(request, stream=True, **how)
        try:
            body = Body(MAX_REPLY_BYTES, _seconds(request))
            for piece in response.iter_bytes():
                body.take(piece)
        except EndlessReply as error:
            raise openai.APIConnectionError(message=str(error), request=request) from error
        finally:
            response.close()
        return _with_body(response, body)


class _AsyncClient(openai.DefaultAsyncHttpxClient):
    async def send(self, request: Any, *, stream: bool = False, **how: Any) -> Any:
        response = await super().send(request, stream=True, **how)
        try:
            body = Body(MAX_REPLY_BYTES, _seconds(request))
            async for piece in response.aiter_bytes():
                body.take(piece)
        except EndlessReply as error:
            raise openai.APIConnectionError(message=str(error), request=request) from error
        finally:
            await response.aclose()
        return _with_body(response, body)


def _seconds(request: Any) -> float:
    return float(request.extensions["timeout"]["read"])


def _with_body(response: Any, body: Body) -> Any:
    """The response with its body, whose length and packing on the way are no longer true of it."""
    headers = {name: value for name, value in response.headers.items() if name not in _PACKING}
    return type(response)(response.status_code, headers=headers, content=body.whole(), request=response.request)


_PACKING: Final = ("content-encoding", "content-length", "transfer-encoding")
