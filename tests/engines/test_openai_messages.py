"""What a user reads when a chat server fails: the cause in words, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.chat_server import StubServer, ask

from emailrl.base.errors import UsageError

KEY = "my-own-key-0123"
HUNG_UP = (None, None)
Serve = Callable[..., StubServer]


def refuse(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message}}


def address(server: StubServer) -> str:
    return server.url.removesuffix("/v1")


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
    ("reply", "error"),
    [
        (refuse(401, f"Incorrect API key: {KEY}."), "HTTP 401: Incorrect API key: ***. Check OPENAI_API_KEY."),
        (refuse(402, "No credit"), "HTTP 402: No credit. Add credit to the account."),
        (refuse(403, "Not yours"), "HTTP 403: Not yours. Check what the key in OPENAI_API_KEY may use."),
        (refuse(404, "No model"), "HTTP 404: No model. Check --model (org/big) and OPENAI_BASE_URL (URL)."),
        (
            (400, [{"error": {"message": "No tools"}}]),
            "HTTP 400: No tools. Check that org/big supports tool calls and the sampling settings.",
        ),
        (refuse(429, "Slow down"), "HTTP 429: Slow down. Try again later, or lower ROLLOUT_CONCURRENCY."),
        ((502, b"<html><h1>nginx</h1></html>"), f"HTTP 502: Bad Gateway. {LATER}"),
        ((599, b"[[[[[[1]]]]]]"), f"HTTP 599: no message. {LATER}"),
        ((302, b""), "HTTP 302: Found. The server redirects requests: check OPENAI_BASE_URL (URL)."),
        (
            (200, b"<html>Log in</html>"),
            f"the server's reply cannot be read: it is not JSON, but '<html>Log in</html>'. {WRONG}",
        ),
        ((200, b"\xff\xfe"), f"the server's reply cannot be read: it is not JSON, but '\ufffd\ufffd'. {WRONG}"),
        ((200, b""), f"the server's reply cannot be read: it is empty. {WRONG}"),
        ((200, b'{"choices": [', {"Content-Length": "500"}), f"the reply was cut off (URL/chat/completions). {WRONG}"),
        (HUNG_UP, f"Server disconnected without sending a response (URL/chat/completions). {OFF}"),
    ],
)
def test_a_failing_server(serve: Serve, tmp_path: Path, reply: Any, error: str) -> None:
    assert failure(address(serve(lambda body: reply)), tmp_path) == error


def test_a_missing_key_a_late_reply_and_servers_that_cannot_be_reached(serve: Serve, tmp_path: Path) -> None:
    error = failure(address(serve(lambda body: refuse(401, "No key"))), tmp_path, key=None)
    assert error == "HTTP 401: No key. Set OPENAI_API_KEY to a key of this server."
    error = failure(address(serve(lambda body: HUNG_UP, delay=1)), tmp_path, timeout=0.2)
    assert error.startswith("no complete reply within 0.2 s (URL/") and error.endswith("raise LITELLM_TIMEOUT.")
    assert failure("http://127.0.0.1:9", tmp_path) == f"connection refused (URL/chat/completions). {OFF}"
    unknown = failure("http://no-such-host.invalid", tmp_path)
    assert unknown == f"the host name cannot be resolved (URL/chat/completions). {OFF}"
    plain = address(serve(lambda body: HUNG_UP)).replace("http:", "https:")
    assert failure(plain, tmp_path).startswith("TLS failed: ")
    with pytest.raises(UsageError, match="OPENAI_BASE_URL is localhost:1/v1, which does not start with http"):
        failure("localhost:1/v1", tmp_path)


def test_no_part_of_an_address_that_is_secret_is_shown(serve: Serve, tmp_path: Path) -> None:
    url = serve(lambda body: refuse(404, "No model")).url.replace("//", "//ann:hush@") + "?api_key=hushed"
    assert "hush" not in failure(url, tmp_path)
