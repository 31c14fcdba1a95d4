"""The chat client against servers that send too much, too slowly, packed, or to another host."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import openai
import pytest
from local_server import LocalServer, QuietHandler

from emailrl.remote import chat
from emailrl.remote.chat import connect, connect_async, told

GOOD = json.dumps({
    "id": "1", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ja"}}],
}).encode()  # fmt: skip
Answer = Callable[[BaseHTTPRequestHandler], None]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Starts a server that lets ``answer`` write the whole response; gives its address."""
    servers: list[LocalServer] = []

    def start(answer: Answer) -> str:
        class Handler(QuietHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    answer(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client had enough, as the test meant it to

        servers.append(LocalServer(Handler))
        return f"http://127.0.0.1:{servers[-1].port}/v1"

    yield start
    for server in servers:
        server.close()


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content_Type": "application/json", **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def endless(status: int, piece: bytes, pause: float = 0.0) -> Answer:
    """Sends without a length and without an end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, b"", status)
        until = time.monotonic() + 20
        while time.monotonic() < until:
            handler.wfile.write(piece)
            time.sleep(pause)

    return answer


def ask(url: str, *, timeout: float = 5) -> Any:
    return connect(url, "key", timeout=timeout).chat.completions.create(model="m", messages=[])


def ask_async(url: str, *, timeout: float = 5) -> Any:
    async def once() -> Any:
        async with connect_async(url, "key", timeout=timeout) as client:
            return await client.chat.completions.create(model="m", messages=[])

    return asyncio.run(once())


both = pytest.mark.parametrize("how", [ask, ask_async])


@both
@pytest.mark.parametrize("packed", [False, True])
def test_a_reply_is_read_packed_or_not(serve: Callable[[Answer], str], how: Any, packed: bool) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = gzip.compress(GOOD) if packed else GOOD
        more = {"Content_Encoding": "gzip"} if packed else {}
        send(handler, body, Content_Length=str(len(body)), **more)

    assert how(serve(answer)).choices[0].message.content == "ja"


@both
@pytest.mark.parametrize("status", [200, 500])
def test_a_reply_without_end_is_read_up_to_the_bound(
    serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch, how: Any, status: int
) -> None:
    monkeypatch.setattr(chat, "MAX_REPLY_BYTES", 1 << 20)
    with pytest.raises(openai.APIConnectionError) as raised:
        how(serve(endless(status, b" " * 65536)))
    assert told(raised.value) == "APIConnectionError: the reply is longer than 1 MiB"


@both
def test_a_reply_that_unpacks_without_end_is_too_long(
    serve: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    monkeypatch.setattr(chat, "MAX_REPLY_BYTES", 1 << 20)
    bomb = gzip.compress(b" " * (16 << 20))
    assert len(bomb) < 1 << 16
    with pytest.raises(openai.APIConnectionError) as raised:
        how(serve(lambda handler: send(handler, bomb, Content_Encoding="gzip", Content_Length=str(len(bomb)))))
    assert "longer than 1 MiB" in told(raised.value)


@both
def test_a_reply_that_drips_is_given_up(serve: Callable[[Answer], str], how: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(openai.APIConnectionError) as raised:
        how(serve(endless(200, b" ", pause=0.05)), timeout=0.4)
    assert told(raised.value) == "APIConnectionError: no whole reply within 0.4 s"
    assert time.monotonic() - begun < 10


@both
def test_what_was_asked_goes_to_no_host_that_a_server_points_to(serve: Callable[[Answer], str], how: Any) -> None:
    asked: list[str] = []
    other = serve(lambda handler: asked.append(handler.path))
    with pytest.raises(openai.APIStatusError) as raised:
        how(serve(lambda handler: send(handler, b"", 307, Location=f"{other}/chat/completions", Content_Length="0")))
    assert raised.value.status_code == 307 and asked == []


def test_what_went_wrong_is_told_with_its_cause(serve: Callable[[Answer], str]) -> None:
    with pytest.raises(openai.APIConnectionError) as raised:
        ask("http://127.0.0.1:9/v1")
    assert "refused" in told(raised.value)
    body = b'{"error": {"message": "no such key"}}'
    with pytest.raises(openai.APIStatusError) as refused:
        ask(serve(lambda handler: send(handler, body, 401, Content_Length=str(len(body)))))
    assert told(refused.value).startswith("HTTP 401: ") and "no such key" in told(refused.value)
