"""An HTTP server in a thread, for tests of whatever talks to servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """Does not write what it was asked to stderr."""

    def log_message(self, format: str, *args: object) -> None:
        pass


class LocalServer:
    """Answers by ``handler`` on a free port of this machine, each request in a thread of its own."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.port: int = self._server.server_port
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


Reply = Callable[[dict[str, Any], int], "tuple[Any, ...]"]
"""From a request's body and its number, from 1, to (status, content), or (status, content, headers)."""


class JsonStub:
    """A server that answers each JSON body, {} for a GET, as ``reply`` says: text and bytes as they are, else as JSON.

    A status of None drops the connection, 0 hangs until the stub closes, 1 drips a byte each tenth of a second;
    ``delay`` seconds pass before each reply to a POST. It keeps what it is asked; ``busiest`` is the most requests seen
    at once.
    """

    def __init__(self, reply: Reply, *, path: str = "", delay: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.paths: list[str] = []
        self.busiest = self._running = 0
        self.delay = delay
        self._closing = Event()
        lock, stub = Lock(), self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: dict[str, Any]) -> None:
                with lock:
                    stub.requests.append(body)
                    stub.keys.append(self.headers.get("Authorization", ""))
                    stub.paths.append(self.path)
                    number = len(stub.requests)
                    stub._running += 1
                    stub.busiest = max(stub.busiest, stub._running)
                if body:
                    stub._closing.wait(stub.delay)
                status, content, *headers = reply(body, number)
                with lock:
                    stub._running -= 1
                if status == 0:
                    stub._closing.wait()
                if not status:
                    self.close_connection = True
                    return
                text = content if isinstance(content, str | bytes) else json.dumps(content)
                payload = text.encode() if isinstance(text, str) else text
                self.send_response(max(status, 200))
                sent = {"Content-Type": "application/json", "Content-Length": str(len(payload))}
                for name, value in (sent | (headers[0] if headers else {})).items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(BrokenPipeError, ConnectionResetError):  # the client gave up, as the test meant it to
                    for at in range(len(payload) if status == 1 else 0):
                        if stub._closing.wait(0.1):
                            return
                        self.wfile.write(payload[at : at + 1])
                    if status != 1:
                        self.wfile.write(payload)

        self._server = LocalServer(Handler)
        self.port = self._server.port
        self.url = f"http://127.0.0.1:{self.port}{path}"

    def wait_for(self, number: int) -> None:
        """Until so many requests have come; fails after minutes."""
        until = time.monotonic() + 300
        while len(self.requests) < number:
            assert time.monotonic() < until, f"{len(self.requests)} requests came, not {number}"
            time.sleep(0.01)

    def close(self) -> None:
        """Stop serving, and let what hangs go."""
        self._closing.set()
        self._server.close()


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def answering() -> Iterator[Callable[[Answer], str]]:
    """Starts servers that let ``answer`` write the whole response to a POST; gives their addresses."""
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
        return f"http://127.0.0.1:{servers[-1].port}"

    try:
        yield start
    finally:
        for server in servers:
            server.close()
