"""Serves a run's page, read-only, to browsers on this machine.

Email is private, and any page that a browser opens can send requests to 127.0.0.1. So every request must name this
server as its host, come from its own page or the address bar, and carry the token of the printed address, which other
users of the machine do not have. A cookie would not keep the token from them: browsers send it to every port of a host.
"""

from __future__ import annotations

import hmac
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.page import dump, served_page
from emailrl.page.served import Served

ADDRESS = "127.0.0.1"
_NOTHING = "default-src 'none'; frame-ancestors 'none'"
"""The Content-Security-Policy of every response except the page itself."""
_ONCE = ("Host", "Origin", "Sec-Fetch-Site")
"""Headers that identify the client; duplicates would be ambiguous."""


class PageServer(ThreadingHTTPServer):
    """Serves one run until ``shutdown``; ``port`` 0 picks any free port. Raises ``UsageError`` if the port is in
    use."""

    daemon_threads = True

    def __init__(self, served: Served, port: int = 0) -> None:
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            raise UsageError(f"Port {port}: {error.strerror}.", "Choose another --port, or leave it out.") from None
        self.served = served
        self.token = secrets.token_urlsafe(16)
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Refused(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "emailrl", ""
    timeout = 60

    def do_GET(self) -> None:
        try:
            self._check()
            self._answer()
        except _Refused as refused:
            self._refuse(refused.status, str(refused))
        except EmailRLError as error:  # a damaged line
            self._refuse(HTTPStatus.NOT_FOUND, error.message)
        except FileNotFoundError:
            self._refuse(HTTPStatus.NOT_FOUND, "The run was moved or removed.")
        except (PermissionError, IsADirectoryError) as error:
            self._refuse(HTTPStatus.NOT_FOUND, f"{error.filename}: {error.strerror}.")

    def _refuse_method(self) -> None:
        self.close_connection = True  # the request's body is not read
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is allowed.")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reject requests that the base class cannot parse, without quoting them."""
        self.close_connection = True
        self._refuse(HTTPStatus(code), f"{HTTPStatus(code).phrase}.")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: addresses hold the token."""

    def _check(self) -> None:
        """Reject a request unless it comes from a browser with the printed address."""
        own = {f"http://{host}" for host in self.server.hosts}
        if not self.path.startswith("/"):
            raise _Refused(HTTPStatus.BAD_REQUEST, "The request's target must be a path.")
        if twice := [name for name in _ONCE if len(self.headers.get_all(name, [])) > 1]:
            raise _Refused(HTTPStatus.BAD_REQUEST, f"More than one {twice[0]} header.")
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the request's body is not read
        if self.headers.get("Host") not in self.server.hosts:
            raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, "Unknown host.")
        if self.headers.get("Origin", next(iter(own))) not in own:
            raise _Refused(HTTPStatus.FORBIDDEN, "Requests from other pages are refused.")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise _Refused(HTTPStatus.FORBIDDEN, "Requests from other pages are refused.")
        given = self._query().get("token", "")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise _Refused(HTTPStatus.FORBIDDEN, "Open the address that emailrl view printed.")

    def _query(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(self.path.partition("?")[2]).items()}

    def _answer(self) -> None:
        served, query = self.server.served, self._query()
        match self.path.partition("?")[0]:
            case "/":
                self._send_page()
            case "/data/run.json":
                self._send_json(dump(served.run()))
            case "/data/trajectories":
                self._send_json(dump(served.rows(_number(query, "from"), _number(query, "to"))))
            case "/data/trajectory":
                found = served.trajectory(query.get("file", ""), _number(query, "offset"))
                if found is None:
                    raise _Refused(HTTPStatus.NOT_FOUND, "No such trajectory.")
                self._send_json(dump(found))
            case _:
                raise _Refused(HTTPStatus.NOT_FOUND, "Nothing is served here.")

    def _send_page(self) -> None:
        page, policy = served_page(self.server.served.place.name)
        headers = {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode("utf-8", "replace"), headers)

    def _send_json(self, text: str) -> None:
        self._send(HTTPStatus.OK, "application/json", text.encode(), {"Content-Security-Policy": _NOTHING})

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        headers = {"Content-Security-Policy": _NOTHING}
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET"
        self._send(status, "application/json", dump({"error": message}).encode(), headers)

    def _send(self, status: HTTPStatus, kind: str, content: bytes, headers: dict[str, str]) -> None:
        common = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        self.send_response(status)
        for name, value in (common | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _number(query: dict[str, str], name: str) -> int:
    value = query.get(name, "")
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise _Refused(HTTPStatus.BAD_REQUEST, f"{name} must be a number from 0 on.")
    return int(value)
