"""A mailbox of three mails, a chat server that finds the lease in it, and our servers as processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.chat_server import StubServer, said
from tiny import ANN, make_database

CALLS = (
    ("search_emails", '{"keywords": ["lease"]}'),
    ("read_email", '{"message_id": "<m0@x>"}'),
    ("return_final_answer", '{"answer": "On 31 May 2002.", "sources": ["<m0@x>", "<gone@x>"]}'),
)


def scripted(body: dict[str, Any]) -> tuple[int, Any]:
    """The call of each turn; earlier answers of a conversation have no call."""
    if "fail" in str(body["messages"][-1]["content"]):
        return 400, {"error": {"message": "\x1b]0;title\x07refused"}}
    return 200, said(None, CALLS[sum(bool(message.get("tool_calls")) for message in body["messages"])])


@pytest.fixture
def stub() -> Iterator[StubServer]:
    server = StubServer(scripted)
    yield server
    server.close()


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return make_database(tmp_path / "mail.db")


@pytest.fixture
def environment(stub: StubServer) -> dict[str, str]:
    own = {"OPENAI_BASE_URL": stub.url, "EMAILRL_ENGINE": "openai", "MODEL_NAME": "m", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


@pytest.fixture
def serve(db: Path, environment: dict[str, str]) -> Iterator[Callable[..., str]]:
    """Start a server command; returns its address. Ctrl-C ends each in the end, with exit code 0."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **more: str) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        own = [*arguments, "--db", str(db), "--inbox", ANN, "--port", str(port)]
        command = [sys.executable, "-m", "emailrl", *own]
        started.append(subprocess.Popen(command, cwd=db.parent, env=environment | more))
        for _ in range(300):
            if started[-1].poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return f"http://127.0.0.1:{port}"
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
    assert [process.wait(20) for process in started] == [0] * len(started)
