"""Serves a run's page, read-only, to browsers on this machine. Email is private, and any page that a browser opens can
send requests to 127.0.0.1. So every request must name this server as its host, come from its own page or the address
bar, and carry the token of the printed address, which other users of the machine do not have. A cookie would not keep
the token from them: browsers send it to every port of a host."""

from __future__ import annotations

import hmac
import html
import secrets
import shlex
import sys
import threading
from bisect import bisect_left
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from emailrl.base.disk import stamp_of
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.page.build import document, served_data
from emailrl.page.place import file_record, name_of, place_of, run_record, runs_in, runs_record
from emailrl.page.shapes import TokenTexts, conversation, detail, fitting_tokenizer, rows, tokenizer_folders
from emailrl.records import Record, TrainingNote, TrajectoryIndex, encode, training_notes
from emailrl.records.trajectory import notes_path

MOST = {"rows": 2000, "texts": 500}  # rows and conversations per response; the page itself holds the first rows


class Served:
    """Reads a run or file that may still grow, or a folder of runs; thread-safe. UsageError without a trajectory."""

    def __init__(self, path: Path, *, model_name: str) -> None:
        self._path, self._model_name = path, model_name
        self._files: dict[Path, _File] = {}
        self._shown: list[tuple[_File, int]] = []
        """The files of the last returned record, with their trajectory counts."""
        self._lock = threading.Lock()
        self._runs: dict[Path, Served] = {}
        self.place = place_of(path)

    def of_run(self, name: str | None) -> Served:
        """Return the folder's run of this name, itself without one; ``UsageError`` if there is none."""
        if name is None:
            return self
        if (run := next((run for run in runs_in(self._path) if run.name == name), None)) is None:
            raise UsageError(f"No run {name} here.", "Open the address that emailrl view printed.")
        with self._lock:
            if run not in self._runs:
                self._runs[run] = Served(run, model_name=self._model_name)
            return self._runs[run]

    def run(self) -> Record:
        """Return the record of the whole (``page.run_record``), including newly written files and trajectories."""
        with self._lock:
            self.place = place_of(self._path)
            if self.place.runs:
                return runs_record(self.place.runs)
            self._files = {path: self._files.get(path) or _File(path) for path in self.place.files}
            files = list(self._files.values())
            records = [file.refreshed() for file in files]
            self._shown = [(file, record["count"]) for file, record in zip(files, records, strict=True)]
            run = run_record(self.place, records)
            run["left_out"] += [line for file in files for line in file.bad_lines]
            return run | {"folder": shlex.quote(str(self.place.folder.absolute()))}  # local: not in a shared report

    def listed(self, what: str, start: int, stop: int) -> list[Record]:
        """Return the ``rows``, or the ``texts`` for a search, of ``start`` up to ``stop``, at most ``MOST`` of them."""
        stop = min(stop, start + MOST[what])
        with self._lock:
            found: list[Record] = []
            for file, count in self._shown:
                found += getattr(file, what)(max(start, 0), min(stop, count))
                start, stop = start - count, stop - count
            return found

    def trajectory(self, name: str, offset: int) -> Record | None:
        """Return the full trajectory at a byte offset of a file of the run; None if there is none."""
        with self._lock:
            file = next((file for file, _ in self._shown if name_of(file.path) == name), None)
            if file is None or not file.path.is_file():  # reading a pipe would block
                return None
            return file.trajectory(offset, self._model_name)


class _File:
    """One trajectory file, whose index is reread when the file changes."""

    def __init__(self, path: Path) -> None:
        self.path, self.bad_lines = path, list[str]()
        self._index = TrajectoryIndex(path)
        self._record: Record = {}
        self._notes: dict[str, TrainingNote] = {}
        self._stamp: tuple[int, int, int] | None = None  # of the file as last read
        self._notes_stamp: tuple[int, int, int] | None = None  # of its training record
        self._tokens: TokenTexts | None = None

    def refreshed(self) -> Record:
        if (stamp := stamp_of(self.path)) != self._stamp:
            self._index.refresh()
            readable = self._index.readable
            first = self._index.trajectory(readable[0]) if readable else None
            self._record = file_record(self.path, first, len(readable))
            self.bad_lines, self._stamp = self._index.bad_lines, stamp
        return self._record

    def rows(self, start: int, stop: int) -> list[Record]:
        readable = self._index.readable[start : max(stop, start)]
        if not readable:
            return []
        if (stamp := stamp_of(notes_path(self.path))) != self._notes_stamp:
            self._notes, self._notes_stamp = training_notes(self.path, brief=True)[0], stamp
        return rows(self.path, self._index.entries(readable[0], readable[-1] + 1), self._notes)

    def texts(self, start: int, stop: int) -> list[Record]:
        own, places = name_of(self.path), self._index.readable[start : max(stop, start)]
        found = ((self._index[at].offset, self._index.trajectory(at)) for at in places)
        return [{"file": own, "offset": offset, "conversation": [*conversation(each)]} for offset, each in found]

    def trajectory(self, offset: int, model_name: str) -> Record | None:
        position = bisect_left(self._index, offset, key=lambda entry: entry.offset)
        if position == len(self._index) or self._index[position].offset != offset:
            return None
        found = self._index.trajectory(position)
        note = training_notes(self.path)[0].get(found.id)
        if self._tokens is None:
            self._tokens = fitting_tokenizer(tokenizer_folders(self.path, model_name), found)
        return detail(found, note=note, tokens=self._tokens)


ADDRESS = "127.0.0.1"
_NOTHING = "default-src 'none'; frame-ancestors 'none'"
"""The Content-Security-Policy of every response except the page itself."""
_ONCE = ("Host", "Origin", "Sec-Fetch-Site")  # Headers that identify the client; duplicates would be ambiguous.

_LOST = "Open the whole address that emailrl view printed, with its token; if it is lost, start emailrl view again."
_REFUSAL = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>emailrl view</title>
<main><h1>Nothing is shown here</h1><p>{}</p></main></html>
"""


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
        return f"http://{ADDRESS}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that disconnect."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Refused(Exception):
    """A status and a message."""


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
            self._refuse(*refused.args)
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
        site = self.headers.get("Sec-Fetch-Site", "none")
        if self.headers.get("Origin", next(iter(own))) not in own or site not in ("none", "same-origin"):
            raise _Refused(HTTPStatus.FORBIDDEN, "Requests from other pages are refused.")
        given = self._query().get("token", "")
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            raise _Refused(HTTPStatus.FORBIDDEN, _LOST)

    def _query(self) -> dict[str, str]:
        return {name: values[-1] for name, values in parse_qs(self.path.partition("?")[2]).items()}

    def _number(self, name: str) -> int:
        value = self._query().get(name, "")
        if not (value.isascii() and value.isdigit() and len(value) < 20):
            raise _Refused(HTTPStatus.BAD_REQUEST, f"{name} must be a number from 0 on.")
        return int(value)

    def _answer(self) -> None:
        served = self.server.served.of_run(self._query().get("run"))
        found: Any
        match self.path.partition("?")[0]:
            case "/":
                return self._send_page(served)
            case "/data/run.json":
                found = served.run()
            case "/data/trajectories":
                found = served.listed("rows", self._number("from"), self._number("to"))
            case "/data/texts":
                found = served.listed("texts", self._number("from"), self._number("to"))
            case "/data/trajectory":
                found = served.trajectory(self._query().get("file", ""), self._number("offset"))
                if found is None:
                    raise _Refused(HTTPStatus.NOT_FOUND, "No such trajectory.")
            case _:
                raise _Refused(HTTPStatus.NOT_FOUND, "Nothing is served here.")
        self._send(HTTPStatus.OK, "application/json", encode(found))

    def _send_page(self, served: Served) -> None:
        """Send the page at once, so that it shows while its data are read."""
        page, policy = document(served.place.name, {"served": True}, connect="'self'")
        headers = {"Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode("utf-8", "replace"), headers)
        try:
            data = served_data(served.run(), served.listed("rows", 0, MOST["rows"]))
        except (EmailRLError, OSError):
            return  # the page asks for the data, and shows why there is none
        self.wfile.write(data.encode())

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Say why not: to a browser that shows it as a page, else as JSON."""
        kind, content = "application/json", encode({"error": message})
        if "text/html" in getattr(self, "headers", {}).get("Accept", ""):
            kind, content = "text/html; charset=utf-8", _REFUSAL.format(html.escape(message)).encode()
        self._send(status, kind, content, {"Allow": "GET"})

    def _send(self, status: HTTPStatus, kind: str, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        common = {
            "Content-Type": kind,
            "Content-Security-Policy": _NOTHING,
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        } | ({"Content-Length": str(len(content))} if kind == "application/json" else {"Connection": "close"})
        self.send_response(status)
        for name, value in (common | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
