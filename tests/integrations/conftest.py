"""A mailbox of three mails, a chat server that finds the lease in it, and our servers as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines.chat_server import StubServer, said
from tiny import ANN, make_database
from typer.testing import CliRunner

from emailrl.cli.app import app
from emailrl.questions.load import questions_file, read_jsonl, write_demo, write_scenarios
from emailrl.records import read_trajectories
from emailrl.records.trajectory import Trajectory
from emailrl.settings import StoreSettings

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
    assert [process.wait(120) for process in started] == [0] * len(started)


@dataclass(frozen=True)
class Played:
    """Conversations of nano with the demo mailbox, as ``emailrl rollout`` records and rewards them."""

    db: Path
    file: Path
    trajectories: list[Trajectory]

    @property
    def calls(self) -> dict[str, list[tuple[str, str]]]:
        """The call of each turn, by the question."""
        return {
            each.scenario.question: [(turn.tool_name, json.dumps(turn.tool_args)) for turn in each.turns]
            for each in self.trajectories
        }

    @property
    def rewards(self) -> dict[str, float]:
        return {each.scenario.question: each.reward for each in self.trajectories}


@pytest.fixture(scope="session")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A right answer, a wrong one, and "I don't know"."""
    folder = tmp_path_factory.mktemp("played")
    db, file = folder / "mail.db", folder / "rollout.jsonl"
    write_demo(db, settings=StoreSettings(), seed=42)
    tests = [each for each in read_jsonl(questions_file(db)) if each.split == "test"]
    write_scenarios(folder / "chosen.jsonl", [tests[number] for number in (52, 97, 167)])
    command = ["rollout", "--model", "nano", "--db", str(db), "--questions", str(folder / "chosen.jsonl")]
    command += ["--split", "test", "--num-generations", "1", "--out", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("EMAILRL_JUDGE", "offline")
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = Played(db, file, [*read_trajectories(file)])
    assert len(set(found.rewards.values())) == 3
    return found


def foreign(name: str, *packages: str) -> Path:
    """The interpreter of an environment with these packages, which clash with ours or with one another, before ours."""
    folder = Path(sys.prefix) / "clients" / name
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        [site] = folder.glob("lib/python*/site-packages")
        (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        command = [folder / "bin/python", "-m", "pip", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{' '.join(packages)} cannot be installed: {done.stderr.strip()[-200:]}")
        (folder / "complete").touch()
    return folder / "bin/python"
