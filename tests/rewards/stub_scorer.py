"""A reward server in a thread that answers as a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from local_server import LocalServer, QuietHandler

Reply = Callable[[dict[str, Any], int], "tuple[int, str | bytes]"]
"""From a request's body and its number (from 0) to (status, body)."""


class StubScorer:
    """Keeps what it is asked, with the headers; ``busiest`` is the most requests it saw at once."""

    def __init__(self, reply: Reply, *, delay: float = 0.0, drip: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.paths: list[str] = []
        self.busiest = self._running = 0
        lock, stub = threading.Lock(), self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(stub.requests)
                    stub.requests.append(body)
                    stub.keys.append(self.headers.get("Authorization", ""))
                    stub.paths.append(self.path)
                    stub._running += 1
                    stub.busiest = max(stub.busiest, stub._running)
                time.sleep(delay)
                status, content = reply(body, number)
                with lock:
                    stub._running -= 1
                payload = content.encode() if isinstance(content, str) else content
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                with suppress(BrokenPipeError):  # the client did not wait
                    for byte in payload if drip else ():
                        time.sleep(drip)
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                    if not drip:
                        self.wfile.write(payload)

        self._server = LocalServer(Handler)
        self.port = self._server.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/get_reward"

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
