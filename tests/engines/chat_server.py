"""A chat-completions server in a thread that answers as a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from local_server import LocalServer, QuietHandler

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.openai import OpenAIEngine
from emailrl.records.trajectory import Message
from emailrl.settings import Settings, load_settings

Reply = Callable[[dict[str, Any]], "tuple[int, Any] | tuple[int, Any, dict[str, str]]"]
"""From a request's body to (status, JSON body) or (status, JSON body, headers); bytes are sent as they are."""


class StubServer:
    """Keeps what it is asked, ``(path, body)``, and how many requests it held at once (``busiest``). ``reply`` is
    called with the body, to which ``"path"`` is added; a GET has no other keys. ``None`` as a status drops the
    connection without an answer."""

    def __init__(self, reply: Reply, *, delay: float = 0.0) -> None:
        self.reply = reply
        self.delay = delay
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []
        self.busiest = 0
        self.running: list[dict[str, Any]] = []  # the bodies of those it holds now
        self._lock = threading.Lock()
        stub = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def answer(self, body: dict[str, Any]) -> None:
                with stub._lock:
                    stub.requests.append((self.path, body))
                    stub.keys.append(self.headers.get("Authorization", ""))
                    stub.running.append(body)
                    stub.busiest = max(stub.busiest, len(stub.running))
                if body:
                    time.sleep(stub.delay)
                status, content, *headers = stub.reply(body | {"path": self.path})
                with stub._lock:
                    del stub.running[next(n for n, one in enumerate(stub.running) if one is body)]
                if status is None:
                    self.close_connection = True
                    return
                payload = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(BrokenPipeError):  # the client did not wait
                    self.wfile.write(payload)

        self._server = LocalServer(Handler)
        self.port = self._server.port
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        self._server.close()


SEARCH = ("search_emails", '{"keywords": ["lease"]}')
ANSWER = ("return_final_answer", '{"answer": "31 May 2002", "sources": ["<m0@x>"]}')


def settings_for(url: str, tmp_path: Path, **overrides: Any) -> Settings:
    given = {"engine": "openai", "openai_base_url": url, "model_name": "org/big", "openai_retries": 2, "max_turns": 3}
    return load_settings(given | overrides, environ={}, cwd=tmp_path)


def ask(url: str, tmp_path: Path, *texts: str, **overrides: Any) -> list[Completion]:
    """What the chat engine makes of a server's replies to each text."""
    sampling = SamplingParams(9, temperature=0.5)
    requests = [Request(str(n), sampling, messages=[Message("user", text)], seed=n) for n, text in enumerate(texts)]
    return OpenAIEngine(settings_for(url, tmp_path, **overrides), []).generate(requests)


def said(
    content: str | None = None, *calls: tuple[str, str], finish: str = "stop", usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A chat completion; each call is (name, arguments as JSON text)."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"id{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": finish, "message": message}],
        "usage": usage or {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }
