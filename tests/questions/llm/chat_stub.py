"""A chat-completions server in a thread, well-behaved or hostile as a test tells it, and a model that answers well."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from local_server import LocalServer, QuietHandler

Answer = Callable[[dict[str, Any], int], "tuple[int, Any]"]
"""From a request's body and its number, counted from 1, to (status, content of the message, or an error's text).

A status of 0 hangs until the stub closes, 1 drips a byte every tenth of a second, 2 sends the content as the body.
"""


class ChatStub:
    """Keeps what it is asked and the keys it is shown."""

    def __init__(self, answer: Answer, *, usage: dict[str, Any] | None = None, retry_after: str | None = None,
                 location: str | None = None) -> None:  # fmt: skip
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self._closing = threading.Event()
        lock = threading.Lock()
        stub = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    stub.requests.append(body)
                    stub.keys.append(self.headers.get("Authorization", ""))
                    number = len(stub.requests)
                status, content = answer(body, number)
                if status == 0:
                    stub._closing.wait()
                    return
                self._reply(status, content)

            def _reply(self, status: int, content: Any) -> None:
                value: Any = {
                    "id": "1", "object": "chat.completion", "created": 0, "model": "m", "usage": usage,
                    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant",
                                                                                  "content": content}}],
                }  # fmt: skip
                if status >= 300:
                    value = {"error": {"message": content}}
                payload = content.encode() if status == 2 else json.dumps(value).encode()
                self.send_response(200 if status < 100 else status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                if retry_after is not None and status >= 300:
                    self.send_header("Retry-After", retry_after)
                if location is not None:
                    self.send_header("Location", location)
                self.end_headers()
                try:
                    for byte in payload if status == 1 else [payload]:
                        if status == 1 and stub._closing.wait(0.1):
                            return
                        self.wfile.write(bytes([byte]) if isinstance(byte, int) else byte)
                except (BrokenPipeError, ConnectionResetError):
                    return  # the client gave up waiting, as the test meant it to

        self._server = LocalServer(Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.port}/v1"

    def wait_for(self, number: int) -> None:
        """Until so many requests have come; fails after a minute."""
        until = time.monotonic() + 60
        while len(self.requests) < number:
            assert time.monotonic() < until, f"{len(self.requests)} requests came, not {number}"
            time.sleep(0.01)

    def close(self) -> None:
        """Stop serving, and let what hangs go."""
        self._closing.set()
        self._server.close()


def mails_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The mails that a request's prompt shows."""
    mails = json.loads(body["messages"][1]["content"])["mails"]
    assert isinstance(mails, list)
    return mails


def questions_on(mails: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Good questions, one on each of the first ten mails: what a careful model writes."""
    return [
        {
            "question": f"What is the code of the {mail['subject']}?",
            "answer": mail["body"].split("The code is ")[1].split(".")[0],
            "message_ids": [mail["message_id"]],
            "how_realistic": 0.7,
        }
        for mail in mails[:10]
    ]


def good(body: dict[str, Any], number: int) -> tuple[int, str]:
    """The answer of a model that does as it is told."""
    return 200, json.dumps(questions_on(mails_of(body)))
