"""A chat-completions server in a thread that answers as a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from local_server import LocalServer, QuietHandler

Reply = Callable[[dict[str, Any]], "tuple[int, str]"]
"""From a request's body to (status, content of the assistant's message, or the body of an error)."""


class StubJudge:
    """Counts and keeps what it is asked; ``busiest`` is the most requests it saw at once."""

    def __init__(self, reply: Reply, *, delay: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.busiest = 0
        self._running = 0
        self._lock = threading.Lock()
        stub = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub._lock:
                    stub.requests.append(body)
                    stub.keys.append(self.headers.get("Authorization", ""))
                    stub._running += 1
                    stub.busiest = max(stub.busiest, stub._running)
                time.sleep(delay)
                status, content = reply(body)
                with stub._lock:
                    stub._running -= 1
                message = {"role": "assistant", "content": content}
                answer: dict[str, Any] = {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                }
                if status != 200:
                    answer = {"error": {"message": content}}
                payload = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

        self._server = LocalServer(Handler)
        self.url = f"http://127.0.0.1:{self._server.port}/v1"

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
