"""The chat client against servers that send too much, too slowly, packed, or to another host."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler

import openai
import pytest
from local_server import Answer, answering

from emailrl.base.chat import ChatReply, complete, connect, describe
from emailrl.base.errors import UsageError
from emailrl.base.http import Client, IncompleteReply, WholeReplies, wait_for

GOOD = json.dumps({
    "id": "1", "object": "chat.completion", "created": 0, "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ja"}}],
}).encode()  # fmt: skip


Serve = Callable[[Answer], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that lets ``answer`` write the whole response; gives its address."""
    with answering() as start:
        yield lambda answer: f"{start(answer)}/v1"


def replying(body: bytes, status: int = 200, heard: list[Message] | None = None, **headers: str) -> Answer:
    """Sends the body with its length, and keeps the headers of what it was asked."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if heard is not None:
            heard.append(handler.headers)
        handler.send_response(status)
        sent = {"Content_Type": "application/json", "Content_Length": str(len(body)), **headers}
        for name, value in sent.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def endless(status: int) -> Answer:
    """Sends without a length and without an end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        until = time.monotonic() + 20
        while time.monotonic() < until:
            handler.wfile.write(b" " * 65536)

    return answer


def ask(url: str, *, timeout: float = 5) -> ChatReply:
    async def once() -> ChatReply:
        async with connect(url, "key", timeout=timeout) as client:
            return await complete(client, model="m", messages=[])

    return asyncio.run(once())


def test_a_reply_is_read_packed_or_not(serve: Serve) -> None:
    for answer in (replying(GOOD), replying(gzip.compress(GOOD), Content_Encoding="gzip")):
        assert ask(serve(answer)).choice.message.text == "ja"


@pytest.mark.parametrize("status", [200, 500])
def test_a_reply_without_end_is_read_up_to_the_bound(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(WholeReplies, "max_bytes", 1 << 20)
    with pytest.raises(openai.APIConnectionError) as raised:
        ask(serve(endless(status)))
    assert describe(raised.value).startswith("the reply is longer than 1 MiB (http://127.0.0.1:")


def test_a_reply_packed_twice_is_refused_unread(serve: Serve) -> None:
    heard: list[Message] = []
    twice = gzip.compress(gzip.compress(b" " * (64 << 20)))  # as small as its like with gigabytes
    with pytest.raises(openai.APIConnectionError) as raised:
        ask(serve(replying(twice, heard=heard, Content_Encoding="gzip, gzip")))
    assert "the reply is compressed as 'gzip, gzip', although no compression was requested" in describe(raised.value)
    assert [headers["Accept-Encoding"] for headers in heard] == ["identity"]


def test_unpacking_never_holds_more_than_the_bound(serve: Serve) -> None:
    url = serve(replying(gzip.compress(b" " * (200 << 20)), Content_Encoding="gzip"))

    async def once() -> None:
        async with Client(timeout=300) as client:
            await client.post(url, content=b"")

    tracemalloc.start()
    try:
        with pytest.raises(IncompleteReply, match="longer than 8 MiB"):
            wait_for(once())
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held < 48 << 20


def test_headers_that_drip_are_given_up_too(serve: Serve) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while True:
            time.sleep(1)
            handler.wfile.write(b"x")

    begun = time.monotonic()
    with pytest.raises(openai.APIConnectionError) as raised:
        ask(serve(drip), timeout=1.5)
    assert describe(raised.value).startswith("no complete reply within 1.5 s (http://")
    assert 1.4 < time.monotonic() - begun < 300


def test_no_charset_that_a_server_names_is_believed(serve: Serve) -> None:
    body = b'{"error": {"message": "no"}}'  # as text by the codec named, the error itself would raise
    with pytest.raises(openai.APIStatusError, match="no"):
        ask(serve(replying(body, 401, Content_Type="application/json; charset=hex")))


def test_name_and_password_of_an_address_go_beside_it(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Message] = []
    with caplog.at_level(logging.DEBUG):
        ask(serve(replying(GOOD, heard=heard)).replace("//", "//ann:hush%40@"))
    assert [headers["Authorization"] for headers in heard] == ["Basic YW5uOmh1c2hA"]  # ann:hush@
    assert "127.0.0.1" in caplog.text and "hush" not in caplog.text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("[1]", "the whole"),
        ('{"choices": []}', "no choices"),
        ('{"choices": null, "error": {"message": "upstream is down"}}', "upstream is down"),
        ('{"choices": {"0": 1}}', "choices"),
        ('{"choices": [null]}', "choices.0"),
        ('{"choices": [{"message": "ja"}]}', "choices.0.message"),
        ('{"choices": [{"message": {"content": 5}}]}', "choices.0.message.content"),
        ('{"choices": [{"message": {"tool_calls": {"function": {"name": "f"}}}}]}', "tool_calls"),
        ('{"choices": ' + "[" * 100_000, "too deep"),
        ('{"choices": ' + "1" * 5000 + "}", "digits"),
    ],
)
def test_what_is_no_completion_is_a_value_error(serve: Serve, body: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        ask(serve(replying(body.encode())))


def test_parts_of_a_content_are_put_together_and_odd_counts_are_none(serve: Serve) -> None:
    content = [{"type": "thinking", "thinking": []}, {"type": "text", "text": "j"}, {"text": "a"}, {"text": 5}]
    usage = {"prompt_tokens": "7", "completion_tokens": 10**400, "cost": -1.0, "good": 3, "true": True}
    body = json.dumps({"choices": [{"message": {"content": content}}], "usage": usage}).encode()
    reply = ask(serve(replying(body)))
    assert reply.choice.message.text == "ja" and reply.cost_at() is None
    assert [reply.count(name) for name in (*usage, "none")] == [None, None, None, 3, None, None]


def test_what_was_asked_goes_to_no_host_that_a_server_points_to(serve: Serve) -> None:
    heard: list[Message] = []
    other = serve(replying(GOOD, heard=heard))
    with pytest.raises(openai.APIStatusError) as raised:
        ask(serve(replying(b"", 307, Location=f"{other}/chat/completions")))
    assert raised.value.status_code == 307 and heard == []


def test_nothing_of_the_environment_goes_along(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY", "OPENAI_API_KEY", "OPENAI_WEBHOOK_SECRET"):
        monkeypatch.setenv(name, "of-the-environment")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer of-the-environment\nX-Key: of-the-environment")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://of-the-environment.invalid/v1")
    heard: list[Message] = []
    ask(serve(replying(GOOD, heard=heard)))
    assert len(heard) == 1 and "of-the-environment" not in str(heard[0]) and "bearer key" in str(heard[0]).lower()


def test_an_invalid_host_name_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="not a valid URL: Invalid IDNA hostname: '\u2603'"):
        ask("http://\u2603/v1")
