"""A process's rank, from the environment, and the address at which several hosts meet."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

import pytest

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.ranks import Place
from emailrl.ranks.launch import Launch

from .processes import free_port


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, Place()),
        ({"LOCAL_RANK": "3"}, Place(local_rank=3)),
        ({"RANK": "0"}, Place()),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Place(5, 8, 1, 4)),
    ],
)
def test_a_place_is_read(environ: dict[str, str], place: Place) -> None:
    assert Place.here(environ) == place


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"RANK": "abc"}, "RANK=abc"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE=x"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK="),
        ({"RANK": "1"}, "RANK=1, but WORLD_SIZE=1 (not set)"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, but WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but no RANK"),
    ],
)
def test_what_torchrun_does_not_set_is_refused(environ: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match="unset them") as refused:
        Place.here(environ)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("environ", "arguments", "reason"),
    [
        ({"RANK": "abc"}, [], "RANK=abc"),
        ({"RANK_TIMEOUT": "1e300"}, [], "RANK_TIMEOUT='1e300'"),
        ({}, ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:99999"], "is not HOST:PORT"),
    ],
)
def test_the_command_reports_it_on_one_line(
    environ: dict[str, str], arguments: list[str], reason: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "emailrl", "train", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | environ, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and reason in line


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "node0:", ":29500", "node0:0", "node0:65536", "node0:x", "a b:1/c", "[::1:29500", "u@h:1"]
)
def test_what_is_no_address_and_port_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not HOST:PORT") as refused:
        Launch(nnodes=2, rdzv_endpoint=endpoint)
    assert "node0:29500" in refused.value.hint


def test_a_host_without_address_is_waited_for_as_long_as_the_setting_allows() -> None:
    said: list[str] = []
    begun = time.monotonic()
    with pytest.raises(EmailRLError, match=r"the host nowhere\.invalid has no address after 1 s") as raised:
        Launch(nnodes=2, rdzv_endpoint="nowhere.invalid:29500", start_seconds=1).wait_for_address(said.append)
    assert 1 <= time.monotonic() - begun < 120 and "RANK_START_TIMEOUT" in raised.value.hint
    assert said == ["Waiting up to 1 s (RANK_START_TIMEOUT) for the host nowhere.invalid, which has no address."]


def test_a_host_that_gets_its_address_while_others_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Any] = []

    def resolve(*name: Any, **kind: Any) -> list[Any]:
        tries.append(name)
        if len(tries) < 3:
            raise OSError("not yet")
        return []

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    Launch(nnodes=2, rdzv_endpoint="trainer-0:29500", start_seconds=60).wait_for_address(lambda line: None)
    assert tries == [("trainer-0", 29500)] * 3


class Web(BaseRequestHandler):
    """Answers whatever it is asked as a web server would, or waits for more."""

    answers = True

    def handle(self) -> None:
        self.request.recv(1000)
        if not self.answers:
            self.request.recv(1000)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("there", ["", "web", "silent"])
def test_hosts_that_do_not_meet_end_in_time_with_one_line(there: str, tmp_path: Path) -> None:
    """Nobody is at the address, or a web server, or what takes connections and says nothing."""
    begun, more = time.monotonic(), ["--node-rank", "1"] if there else []
    with ExitStack() as stack:
        web = stack.enter_context(
            ThreadingTCPServer(("127.0.0.1", 0), type("Here", (Web,), {"answers": there == "web"}))
        )
        web.daemon_threads = True
        Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        stack.callback(web.shutdown)
        endpoint = f"127.0.0.1:{web.server_address[1] if there else free_port()}"
        command = [sys.executable, "-m", "emailrl", "train", "--nnodes", "2", "--rdzv-endpoint", endpoint, *more]
        environ = os.environ | {"RANK_START_TIMEOUT": "3"}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"error: The hosts did not meet at {endpoint} (")
    assert "RANK_START_TIMEOUT" in line and time.monotonic() - begun < 300


STUCK = """#!/bin/sh
[ $RANK = 0 ] || trap "" TERM
touch $FOLDER/$RANK
for second in $(seq 60); do sleep 1; done
"""
LAUNCHED = """
import sys
from torch.distributed.elastic.rendezvous.utils import _PeriodicTimer
from emailrl.ranks import launch
_PeriodicTimer._stop_thread = staticmethod(lambda *of: print("heartbeat freed"))  # maybe by its own thread
sys.executable, launch.SECONDS_TO_FOLLOW = sys.argv[1], 1
sys.exit(launch.launch(launch.Launch(nproc=2), [], print))
"""


def test_a_stuck_rank_does_not_outlive_rank_0_for_long(tmp_path: Path) -> None:
    stuck = tmp_path / "stuck"
    stuck.write_text(STUCK)
    stuck.chmod(0o755)
    env = os.environ | {"FOLDER": str(tmp_path)}
    command = [sys.executable, "-c", LAUNCHED, str(stuck)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as launcher:
        try:
            while launcher.poll() is None and not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
                time.sleep(0.05)
            launcher.terminate()
            assert launcher.communicate(timeout=120) == (b"", None) and launcher.returncode == 130
        finally:
            launcher.kill()
