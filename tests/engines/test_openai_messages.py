"""What a user reads when a chat server fails: the cause in words, and what to do next."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from engines.chat_server import ask
from local_server import Answer, answering

from emailrl.base.errors import UsageError

KEY = "my-own-key-0123"


def send(status: int, body: bytes, *, length: int | None = None) -> Answer:
    """Sends the body, and states ``length`` as its length."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return answer


def refuse(status: int, message: str) -> Answer:
    return send(status, json.dumps({"error": {"message": message}}).encode())


def echo_key(handler: BaseHTTPRequestHandler) -> None:
    refuse(401, f"Incorrect API key: {handler.headers['Authorization'].split()[1]}.")(handler)


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Starts a server that lets ``answer`` write the response; gives its address."""
    with answering() as start:
        yield start


def failure(url: str, tmp_path: Path, *, key: str | None = KEY, timeout: float = 30) -> str:
    """The error of one completion, with the server's address as ``URL``."""
    [completion] = ask(url, tmp_path, "?", openai_api_key=key, openai_retries=0, litellm_timeout=timeout)
    error = completion.error
    assert error is not None and KEY not in error and "\n" not in error
    assert not re.search(r"\w(Error|Exception)\b", error), error
    return error.replace(url, "URL")


LATER, WRONG = "Try again later, or check the server's log.", "Check OPENAI_BASE_URL (URL): most addresses end in /v1."
OFF = "Check OPENAI_BASE_URL, and that the server runs."


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (echo_key, "HTTP 401: Incorrect API key: ***. Check OPENAI_API_KEY."),
        (refuse(402, "No credit"), "HTTP 402: No credit. Add credit to the account."),
        (refuse(403, "Not yours"), "HTTP 403: Not yours. Check what the key in OPENAI_API_KEY may use."),
        (refuse(404, "No model"), "HTTP 404: No model. Check --model (org/big) and OPENAI_BASE_URL (URL)."),
        (
            send(400, b'[{"error": {"message": "No tools"}}]'),
            "HTTP 400: No tools. Check that org/big supports tool calls and the sampling settings.",
        ),
        (refuse(429, "Slow down"), "HTTP 429: Slow down. Try again later, or lower ROLLOUT_CONCURRENCY."),
        (send(502, b"<html><h1>nginx</h1></html>"), f"HTTP 502: Bad Gateway. {LATER}"),
        (send(599, b"[[[[[[1]]]]]]"), f"HTTP 599: no message. {LATER}"),
        (send(302, b""), "HTTP 302: Found. The server redirects requests: check OPENAI_BASE_URL (URL)."),
        (
            send(200, b"<html>Log in</html>"),
            f"the server's reply cannot be read: it is not JSON, but '<html>Log in</html>'. {WRONG}",
        ),
        (send(200, b"\xff\xfe"), f"the server's reply cannot be read: it is not JSON, but '\ufffd\ufffd'. {WRONG}"),
        (send(200, b""), f"the server's reply cannot be read: it is empty. {WRONG}"),
        (send(200, b'{"choices": [', length=500), f"the reply was cut off (URL/chat/completions). {WRONG}"),
        (hang_up, f"Server disconnected without sending a response (URL/chat/completions). {OFF}"),
    ],
)
def test_a_failing_server(serve: Callable[[Answer], str], tmp_path: Path, answer: Answer, error: str) -> None:
    assert failure(serve(answer), tmp_path) == error


def test_a_missing_key_a_late_reply_and_servers_that_cannot_be_reached(
    serve: Callable[[Answer], str], tmp_path: Path
) -> None:
    error = failure(serve(refuse(401, "No key")), tmp_path, key=None)
    assert error == "HTTP 401: No key. Set OPENAI_API_KEY to a key of this server."
    error = failure(serve(lambda _: time.sleep(1)), tmp_path, timeout=0.2)
    assert error.startswith("no complete reply within 0.2 s (URL/") and error.endswith("raise LITELLM_TIMEOUT.")
    assert failure("http://127.0.0.1:9", tmp_path) == f"connection refused (URL/chat/completions). {OFF}"
    unknown = failure("http://no-such-host.invalid", tmp_path)
    assert unknown == f"the host name cannot be resolved (URL/chat/completions). {OFF}"
    plain = serve(hang_up).replace("http:", "https:")
    assert failure(plain, tmp_path).startswith("TLS failed: ")
    with pytest.raises(UsageError, match="OPENAI_BASE_URL is localhost:1/v1, which does not start with http"):
        failure("localhost:1/v1", tmp_path)


def test_no_part_of_an_address_that_is_secret_is_shown(serve: Callable[[Answer], str], tmp_path: Path) -> None:
    url = serve(refuse(404, "No model")).replace("//", "//ann:hush@") + "/v1?api_key=hushed"
    assert "hush" not in failure(url, tmp_path)
