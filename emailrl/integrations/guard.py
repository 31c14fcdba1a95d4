"""Who may ask a server on this machine. Email is private, and any page that a browser opens can send requests to
127.0.0.1: such a request names another host (DNS rebinding) or another origin, and is refused. Whoever can reach a
server from beyond this machine must send its bearer token."""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

import uvicorn

from emailrl.base import plain
from emailrl.base.errors import UsageError
from emailrl.base.http import is_this_machine

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Guard:
    """An ASGI application that passes on to ``app`` only requests of those who may ask. Without a ``token`` they must
    come to a loopback address; a request that names an origin must name the server's own. ``is_open`` exempts paths
    that check a key of their own."""

    def __init__(self, app: App, token: str | None, is_open: Callable[[str], bool] = lambda path: False) -> None:
        self.app, self.token, self.is_open = app, token, is_open

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or (problem := self._problem(scope)) is None:
            await self.app(scope, receive, send)
            return
        status, message = problem
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": None}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _problem(self, scope: Scope) -> tuple[int, str] | None:
        named = [(key.decode("latin-1"), value.decode("latin-1")) for key, value in scope["headers"]]
        once = {key: value for key, value in named if key in ("host", "origin", "authorization")}
        if scope["type"] != "http" or len(once) < sum(key in once for key, _ in named):
            return 400, "Malformed request."
        host = once.get("host", "")
        if self.token is None and not is_this_machine(host.rpartition(":")[0].strip("[]") or host):
            return 421, "Unknown host."
        if once.get("origin", f"http://{host}") not in (f"http://{host}", f"https://{host}"):
            return 403, "Requests from other pages are refused."
        given, token = once.get("authorization", "").removeprefix("Bearer "), self.token
        if token is None or self.is_open(scope["path"]) or hmac.compare_digest(given.encode(), token.encode()):
            return None
        return 401, "Send the server's token: Authorization: Bearer …"


def listen(app: App, host: str, port: int, what: str) -> None:
    """Serve ``app``, and say ``what``, until Ctrl-C, a normal end, or SIGTERM; UsageError for an unusable address."""
    config = uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False, server_header=False)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family) as bound, suppress(KeyboardInterrupt):
            plain.tell(f"Serving {what}. Ctrl-C ends it.")
            uvicorn.Server(config).run(sockets=[bound])
    except OSError as error:
        raise UsageError(f"{host}, port {port}: {error.strerror or error}.", "Choose another --port.") from None
