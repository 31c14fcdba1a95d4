"""The shared ``openai`` client: one host, bounded replies parsed strictly, and clear errors.

Importing it imports ``openai``, so it is imported where a connection is made.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar

import httpx
import openai
from pydantic import BaseModel, ConfigDict, ValidationError

from emailrl.base.credentials import split_credentials, without_credentials
from emailrl.base.errors import UsageError
from emailrl.base.http import Bill, Failed, IncompleteReply, WholeReplies, pause_asked_for, retried

T = TypeVar("T")
MAX_COUNT = 10**9  # token counts and prices this large are invalid, and would overflow sums
QUOTED: Final = 60  # bytes quoted from a reply that is not JSON

_SENT = frozenset(
    ("accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "host", "user-agent")
)


class _Client(WholeReplies, openai.DefaultAsyncHttpxClient):
    """The types are those of httpx or of httpx2, as the version of openai has it."""


Prices = tuple[float | None, float | None]
"""US dollars per million prompt and completion tokens; None: unknown."""


class ChatClient(openai.AsyncOpenAI):
    """A client whose replies are added to a bill."""

    def __init__(self, bill: Bill, prices: Prices, **options: Any) -> None:
        super().__init__(**options)
        self.bill, self.prices = bill, prices


def connect(
    base_url: str,
    key: str,
    *,
    timeout: float,
    retries: int = 0,
    bill: Bill | None = None,
    prices: Prices = (None, None),
) -> ChatClient:
    """A client of the chat server at ``base_url`` for one event loop; ``timeout`` in seconds for each whole reply.
    ``retries`` are its own, after 408, 409, 429, 5xx and lost connections. ``bill`` gets what replies cost by
    ``prices``, else as the server reports it. UsageError for an invalid URL."""
    address, credentials = split_credentials(base_url)  # httpx logs request URLs
    try:
        httpx.URL(address)
    except httpx.InvalidURL as error:
        raise UsageError(f"The chat server's address is not a valid URL: {error}.", "Check its host name.") from error
    # Requests go to the named host only.
    http_client = _Client(
        follow_redirects=False, timeout=timeout, auth=credentials, event_hooks={"request": [_drop_what_is_not_ours]}
    )
    key = key or "none"  # the client requires one; local servers accept any
    return ChatClient(
        bill or Bill(), prices,
        api_key=key, base_url=address, timeout=timeout, max_retries=retries, http_client=http_client,
        default_headers={"Authorization": f"Bearer {key}"},
    )  # fmt: skip


async def _drop_what_is_not_ours(request: Any) -> None:
    """Remove headers that the client adds from the environment (OPENAI_CUSTOM_HEADERS, OPENAI_ORG_ID)."""
    for name in list(request.headers):
        if name not in _SENT and not name.startswith("x-stainless-"):  # the client's own headers, which it reads back
            del request.headers[name]


async def complete(client: ChatClient, **body: Any) -> ChatReply:
    """Request a chat completion; raises openai.APIError, ValueError for any invalid reply, or CostReached."""
    await client.bill.wait_for_a_price()
    with client.bill.request():
        # Raw, since the client does not validate the server's reply.
        read = _read((await client.chat.completions.with_raw_response.create(**body)).content)
        client.bill.pay(read.cost_at(client.prices), str(client.base_url))
    if not read.choices:
        raise ValueError(f"no choices{f': {read.error}' if read.error else ''}")
    return read


def _read(content: bytes) -> ChatReply:
    if not content.strip():
        raise ValueError("it is empty")
    try:
        return ChatReply.model_validate(json.loads(content))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"it is not JSON, but {content[:QUOTED].decode(errors='replace')!r}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


async def ask(
    client: ChatClient,
    read: Callable[[ChatReply], T],
    *,
    retries: int,
    wait: Callable[[float], Awaitable[None]] | None = None,
    **body: Any,
) -> T | Failed:
    """What ``read`` makes of a chat completion, asked for again as by ``retried``; ``read`` may raise ValueError."""

    async def attempt() -> T:
        try:
            return read(await complete(client, **body))
        except openai.APIStatusError as error:
            raise Failed(describe(error), error.status_code, pause_asked_for(error.response.headers)) from error
        except openai.APIError as error:
            raise Failed(describe(error)) from error
        except ValueError as error:
            raise Failed(f"the reply cannot be read: {error}") from error

    return await retried(attempt, retries, wait)


def describe(error: openai.APIError) -> str:
    """The failure in words, with the address that gave no reply; may contain the key, if a server echoes it."""
    if isinstance(error, openai.APIStatusError):
        phrase = http.client.responses.get(error.status_code, "no message")
        return f"HTTP {error.status_code}: {_stated(error.body) or phrase}"
    reason = next(filter(None, map(_reason, _causes(error))), "") or str(error.__cause__ or "") or error.message
    return f"{reason.rstrip('.')} ({without_credentials(str(error.request.url))})"


def is_timeout(error: openai.APIError) -> bool:
    """Whether the server did not reply in time."""
    return any(isinstance(cause, TimeoutError | openai.APITimeoutError) for cause in _causes(error))


def is_incomplete(error: openai.APIError) -> bool:
    """Whether the server's reply was cut off, too slow or too long."""
    return any(isinstance(cause, IncompleteReply) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all its causes, the nearest first."""
    left = [error]
    while left:
        error = left.pop()
        yield error
        if isinstance(error, BaseExceptionGroup):  # of several addresses, or address families
            left += error.exceptions
        if (cause := error.__cause__ or error.__context__) is not None:
            left.append(cause)


def _reason(cause: BaseException) -> str:
    """Why a connection failed; empty if this cause does not show it."""
    match cause:
        case IncompleteReply():
            return str(cause)
        case socket.gaierror():
            return "the host name cannot be resolved"
        case ConnectionRefusedError():
            return "connection refused"
        case ssl.SSLCertVerificationError():
            return f"TLS failed: {cause.verify_message}"
        case ssl.SSLError():
            return f"TLS failed: {cause.reason or 'no secure connection'}; is it an http:// address?"
    return ""


def _stated(body: object) -> str:
    """The message in an error's body, in any server's layout; empty for HTML."""
    for _ in range(3):
        match body:
            case str(body) | {"message": str(body)} | {"detail": str(body)}:
                return "" if body.lstrip().startswith("<") else body.strip()
            case {"error": body} | [body, *_]:
                pass
    return ""


class _Part(BaseModel):
    text: Any = None


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str | None = None
    arguments: Any = None  # JSON as text; some servers send the value itself


class _Call(BaseModel):
    id: str | None = None
    type: str | None = None
    function: _Function | None = None


class ChatMessage(BaseModel):
    """The model's message."""

    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None

    @property
    def text(self) -> str:
        """The content; for content in parts, the text parts."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content if isinstance(part.text, str))
        return self.content or ""


class _Choice(BaseModel):
    message: ChatMessage
    finish_reason: str | None = None


class ChatReply(BaseModel):
    """The fields read from a chat completion."""

    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None  # OpenRouter reports errors with status 200

    @property
    def choice(self) -> _Choice:
        """The first choice."""
        assert self.choices
        return self.choices[0]

    def count(self, *names: str) -> int | None:
        """The server's token count under this name, in the object of the one before; None if missing or invalid."""
        value = self._used(*names)
        return value if isinstance(value, int) else None

    def cost_at(self, prices: Prices = (None, None)) -> float | None:
        """US dollars, by the prices if there are any and tokens to pay for, else as the server reports them."""
        tokens = self.count("prompt_tokens") or 0, self.count("completion_tokens") or 0
        if prices != (None, None) and any(tokens):
            return sum(number * (price or 0.0) for number, price in zip(tokens, prices, strict=True)) / 1e6
        value = self._used("cost")
        return None if value is None else float(value)

    def _used(self, *names: str) -> float | None:
        value = self.usage
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return value if 0 <= value < MAX_COUNT else None
