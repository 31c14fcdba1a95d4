"""An HTTP server in a thread, for tests of whatever talks to servers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread


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


class DrippingServer:
    """Answers with one header, a byte every ``pause`` seconds, and never comes to its end."""

    def __init__(self, *, pause: float = 1.0) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._pause = pause
        self._over = Event()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._over.set()
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                Thread(target=self._drip, args=self._socket.accept()[:1], daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client had enough
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self._over.wait(self._pause):
                connection.sendall(b"x")
