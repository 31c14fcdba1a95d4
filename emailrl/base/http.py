"""Servers of others: where mail goes, what they cost, what may be sent, bounded replies, which failures to retry.

A server may send a byte at a time without end, and an ordinary client's timeout restarts with every byte. Only an event
loop can set one deadline up to the last byte, so requests are asynchronous, and ``wait_for`` runs them for others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import re
import signal
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from threading import Lock, Thread, current_thread, main_thread
from types import FrameType
from typing import Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

import httpx

from emailrl.base import plain
from emailrl.base.errors import EmailRLError
from emailrl.base.process import SIGNALS, handled_by

MAX_REPLY_BYTES: Final = 8 << 20  # much more than the longest completion, reasoning included
LONGEST_WAIT: Final = 60.0  # seconds; waits double from one second up to this, even if the server asks for more
_LATER: Final = (408, 409, 425, 429)
sleep = asyncio.sleep
_PACKING: Final = ("content-encoding", "content-length", "transfer-encoding")
T = TypeVar("T")


@cache
def tell(url: str, use: str, *, with_key: bool) -> None:
    """Report on stderr, once per process, which host gets email and why; warn if the connection is unencrypted."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    open_to_all = parts.scheme == "http" and not is_this_machine(parts.hostname or "")
    key = ", key included" if with_key else ""
    warning = f" (warning: plain http, readable by anyone on the way{key})" if open_to_all else ""
    plain.tell(f"mail goes to {host}: {use}{warning}")


def is_this_machine(host: str) -> bool:
    """Whether a host name or IP address, without brackets, is a loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class CostReached(EmailRLError):
    """The next request might cost more than MAX_COST leaves."""

    code = "max-cost"


SECONDS_BETWEEN_LOOKS: Final = 0.05


class Bill:
    """The US dollars that a command has spent on servers, at most ``limit`` (None: any number). ``go_on`` tells the
    user how to continue once it is reached. Thread-safe."""

    def __init__(self, limit: float | None = None, go_on: str = "") -> None:
        self.limit, self.spent = limit, 0.0
        self._go_on, self._num_paid, self._num_asked, self._in_flight = go_on, 0, 0, 0.0
        self._told, self._is_closed, self._lock = set[str](), False, Lock()

    async def wait_for_a_price(self) -> None:
        """Wait while the first request has no reply: with a limit, what another may cost is not known before."""
        while self.limit is not None and not self._num_paid and self._num_asked:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    @contextmanager
    def request(self, estimate: float = 0.0) -> Iterator[None]:
        """For the time of a request, set aside what it may cost: the ``estimate``, or the average so far if that is
        more. Raises CostReached if the limit does not leave that, and from then on."""
        with self._lock:
            expected = max(estimate, self.spent / max(self._num_paid, 1))
            if self.limit is not None and self.spent + self._in_flight + expected > self.limit:
                self._is_closed = True
            if self._is_closed:
                paid = plain.counted(self._num_paid, "request")
                raise CostReached(f"--max-cost {self.limit:g} was reached: {paid} cost ${self.spent:.4g}.", self._go_on)
            self._in_flight += expected
            self._num_asked += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= expected
                self._num_asked -= 1

    def pay(self, cost: float | None, url: str) -> None:
        """Add a reply's cost. None: the server at ``url`` reports none; unless it is on this machine, where it is free,
        that is said once, as the limit cannot hold."""
        host = urlsplit(url).hostname or ""
        with self._lock:
            self.spent += cost or 0.0
            self._num_paid += 1
            unknown = self.limit is not None and cost is None and not is_this_machine(host) and host not in self._told
            if unknown:
                self._told.add(host)
        if unknown:
            plain.tell(f"warning: {host} does not report what a reply costs: --max-cost cannot bound it")


_TAGS = (
    r"s|cls|sep|mask|unk|pad|[be]o[a-z]|sop|think|tools?|toolcall|escape|unused\d{1,4}|image|audio|video|seed:[a-z]{1,32}|"
    r"img|ref|box|quad|filename|reponame|2mass|"
    r"(?:function|parameter|invoke)(?:[= ][^<>\n]{0,64})?"
)
_BRACKETED = (
    "INST|IMG|AUDIO|PREFIX|SUFFIX|MIDDLE|THINK|ARGS|REF|BBOX|STEP|CLS|SEP|MASK|PAD|UNK|BOS|EOS|EOT|[gs]MASK|TRANSCRIBE|"
    "multimodal|@BOS@"
)
_PART = (
    "(?:available|system|prompt|model|settings|arg|key|value|tool|call|result|response|function|content|token|special|"
    "bos|eos|pad|unk|sep|cls|mask|start|end|begin|of|turn|header|id|img|image|im|patch|newline|break|context|audio|video|"
    "vision|text|ref|smiles|amino|dna|think|thought|reasoning|fim|prefix|middle|suffix|extra|repo|gh|stars|issue|comment|"
    "closed|jupyter|code|script|output|empty|commit|before|after)s?"
)
_COMPOUND = (
    rf"(?:{_PART}(?:_{_PART}){{1,5}}|(?:special|control|reserved|extra_id|(?:unused|special|reserved)_token)_\d{{1,4}}|"
    "(?:repo_name|file_sep|commit_msg))"
)
"""Words that tokenizers use in control tokens; other words with an underscore are ids and placeholders in emails."""
_CONTROL = re.compile(
    r"[<\[](?=[|｜])|<(?=[^\s<>|｜][^<>|｜\n]{0,64}[|｜]>"  # <|im_end|>, <｜User｜>, [|user|], <|turn>, <turn|>
    rf"|(?i:/?(?:[a-z]{{1,32}}:)?{_COMPOUND}>"  # <start_of_turn>, </tool_call>, <minimax:tool_call>
    rf"|/?(?:{_TAGS})>)|</?SYS>>)"
    rf"|\[(?=/?(?:{_BRACKETED}|(?i:{_COMPOUND}))\])|\](?=~!?b[\[\]])|\[(?=e~\[)"  # [INST], [TOOL_CALLS], ]~b]
)
"""The start of any string that is a control token, or has a meaning in chat templates, in any model family."""


def sendable(text: str) -> str:
    """The text without lone surrogates, which JSON may contain but which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def harmless(text: str) -> str:
    """Insert a space after the first character of each string that looks like a control token."""
    return _CONTROL.sub(r"\g<0> ", text)  # one pass suffices: an inserted space cannot create a new match


class Failed(Exception):
    """One attempt failed: why, the reply's HTTP status if there is one, and the seconds that the server asks for."""

    def __init__(self, why: str, status: int | None = None, wait: float = 0.0) -> None:
        super().__init__(why)
        self.why, self.status, self.wait = why, status, wait


async def retried(
    attempt: Callable[[], Awaitable[T]], retries: int, wait: Callable[[float], Awaitable[None]] | None = None
) -> T | Failed:
    """The result of ``attempt``, or its last failure after ``retries`` more attempts, or one that retries cannot mend.
    A failure is returned, since an error raised while it is handled would carry the request, and with it the key."""
    for tries in itertools.count(1):
        try:
            return await attempt()
        except Failed as error:
            failed = error
        if tries > retries or (failed.status is not None and not may_pass(failed.status)):
            break
        await (wait or sleep)(pause(tries, failed.wait))
    return failed


def may_pass(status: int) -> bool:
    """Whether a request that got this HTTP status may succeed on retry."""
    return status in _LATER or status >= 500


def pause(tries: int, asked_for: float = 0.0) -> float:
    """Seconds to wait after ``tries`` attempts: 1, 2, 4, … or what the server ``asked_for``, if longer."""
    return min(LONGEST_WAIT, max(asked_for, 2.0 ** min(tries - 1, 30)))


def pause_asked_for(headers: Mapping[str, str]) -> float:
    """The seconds in a reply's ``Retry-After``; 0 if missing or unreadable."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return 0.0


class IncompleteReply(httpx.TransportError):
    """A reply that is cut off, or exceeds the size or time limit."""


class WholeReplies:
    """Makes an asynchronous httpx client return complete replies of at most ``max_bytes``. A request's read timeout
    limits the whole exchange. IncompleteReply for a reply that is cut off, or over a limit; httpx.DecodingError for one
    that cannot be decompressed (gzip is allowed, once)."""

    max_bytes: ClassVar[int] = MAX_REPLY_BYTES

    async def send(self, request: Any, *, stream: bool = False, **how: Any) -> Any:
        """The reply to a request, read to its end."""
        seconds: float | None = request.extensions["timeout"]["read"]
        request.headers["Accept-Encoding"] = "identity"
        try:
            async with asyncio.timeout(seconds):
                response = await super().send(request, stream=True, **how)  # type: ignore[misc]
                try:
                    body = await self._body(response)
                finally:
                    await response.aclose()
        except TimeoutError as error:
            raise IncompleteReply(f"no complete reply within {seconds:g} s") from error
        # Without its outdated length and encoding, and without its charset, which could name any Python codec.
        headers = {name: value for name, value in response.headers.items() if name not in _PACKING}
        if "content-type" in headers:
            headers["content-type"] = headers["content-type"].partition(";")[0]
        return type(response)(response.status_code, headers=headers, content=body, request=response.request)

    async def _body(self, response: Any) -> bytes:
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):
            raise httpx.DecodingError(f"the reply is compressed as {encoding!r}, although no compression was requested")
        # Up to a limit: some KB can expand to gigabytes.
        gzip = zlib.decompressobj(zlib.MAX_WBITS | 16) if encoding.endswith("gzip") else None
        pieces: list[bytes] = []
        received = size = 0
        try:
            async for sent in response.aiter_raw():
                received += len(sent)
                pieces.append(gzip.decompress(sent, self.max_bytes - size + 1) if gzip else sent)
                size += len(pieces[-1])
                if max(received, size) > self.max_bytes:
                    break
            else:
                return b"".join(pieces)
        except zlib.error as error:
            raise httpx.DecodingError(str(error)) from error
        except Exception as error:  # of httpx or of httpx2, by the client
            raise IncompleteReply("the reply was cut off") from error
        raise IncompleteReply(f"the reply is longer than {self.max_bytes >> 20} MiB")


class Client(WholeReplies, httpx.AsyncClient):
    """A client for servers of any kind."""


def wait_for(exchange: Coroutine[Any, Any, T]) -> T:
    """Run an exchange in the event loop shared by all threads; interrupting the wait cancels it."""
    with _beginning:
        loop = _event_loop()
    future = asyncio.run_coroutine_threadsafe(exchange, loop)
    try:
        return future.result()
    finally:
        future.cancel()


def run(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``; in the main thread, what a signal's handler raises cancels the work and is raised after it.
    Raised inside a library's task, it may be replaced by another error."""
    if current_thread() is not main_thread():
        return asyncio.run(work)
    before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    raised: list[BaseException] = []

    async def working() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                before[signal.Signals(number)](number, frame)
            except BaseException as error:
                raised.append(error)
                task.cancel()
                loop.call_soon_threadsafe(lambda: None)  # the loop may be waiting

        with handled_by(handle, before):
            return await work

    try:
        return asyncio.run(working())
    finally:
        for error in raised:
            raise error from None


_beginning = Lock()


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Its thread ends with the process, even with requests in flight."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="servers", daemon=True).start()
    return loop
