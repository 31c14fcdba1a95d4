"""The server of the page: what it answers, to whom, and that it follows a run that is being written."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chromium import needs_chromium, shown
from two_turns import tokenizer_folder, trajectory

from emailrl.errors import UsageError
from emailrl.inspection.served import Served
from emailrl.inspection.server import PageServer
from emailrl.recording import TrajectoryWriter, write_records, write_trajectories
from emailrl.trajectory import Trajectory

__all__ = ["tokenizer_folder", "trajectory"]


@pytest.fixture
def run_dir(tmp_path: Path, trajectory: Trajectory) -> Path:
    folder = tmp_path / "outputs" / "grpo_masked"
    for name, count in (("step-000002", 2), ("step-000001", 3)):
        made = [replace(trajectory, id=f"{name}-{number}", step=int(name[5:])) for number in range(count)]
        write_trajectories(folder / "trajectories" / f"{name}.jsonl", made)
    write_records(folder / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    (tmp_path / "outputs" / "secret.jsonl").write_text("{}\n")
    return folder


@pytest.fixture
def server(run_dir: Path) -> Iterator[PageServer]:
    with PageServer(Served(run_dir, model_name="nano")) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    """Ask as the page does; a header given as "" is left out."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    cookie = f"other=1; {server.cookie}={server.token}"
    sent = {"Host": f"127.0.0.1:{server.server_port}", "Cookie": cookie} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


def answer(server: PageServer, path: str) -> Any:
    response = ask(server, path)
    assert response.status == 200, response.read()
    return json.loads(response.read())


def test_the_page_asks_for_the_run_its_rows_and_the_whole_of_one(server: PageServer) -> None:
    run = answer(server, "/data/run.json")
    assert [(file["name"], file["count"]) for file in run["files"]] == [
        ("step-000001.jsonl", 3), ("step-000002.jsonl", 2)
    ]  # fmt: skip
    assert run["total"] == 5 and run["steps"] == [{"step": 1, "loss": 0.5}]
    rows = answer(server, "/data/trajectories?from=1&to=4")
    assert [row["id"] for row in rows] == ["step-000001-1", "step-000001-2", "step-000002-0"]
    assert (rows[0]["reward"], rows[0]["verdict"], rows[0]["source"]) == (1.38, "correct", "step")
    assert answer(server, "/data/trajectories?from=4&to=99")[0]["id"] == "step-000002-1"
    assert answer(server, "/data/trajectories?from=5&to=99") == []
    whole = answer(server, f"/data/trajectory?file=step-000002.jsonl&offset={rows[2]['offset']}")
    assert whole["id"] == "step-000002-0" and whole["evidence"]["gold"][0]["id"] == "<m1@x>"


def test_what_is_written_meanwhile_is_served(server: PageServer, run_dir: Path, trajectory: Trajectory) -> None:
    assert answer(server, "/data/run.json")["total"] == 5
    file = run_dir / "trajectories" / "step-000002.jsonl"
    with TrajectoryWriter(file) as writer:
        writer.append(replace(trajectory, id="late", step=2))
    with file.open("ab") as stream:
        stream.write(b'{"id": "torn')
    write_trajectories(run_dir / "trajectories" / "step-000003.jsonl", [replace(trajectory, id="later", step=3)])
    run = answer(server, "/data/run.json")
    assert [file["count"] for file in run["files"]] == [3, 3, 1]
    assert run["files"][1]["bytes"] == file.stat().st_size
    assert [row["id"] for row in answer(server, "/data/trajectories?from=5&to=7")] == ["late", "later"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Cookie": ""}, 403),
        ({"Cookie": "emailrl_1=x"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_only_a_browser_that_was_given_the_address_is_answered(
    server: PageServer, headers: dict[str, str], status: int
) -> None:
    for path in ("/", "/data/run.json"):
        response = ask(server, path, **headers)
        assert response.status == status
        assert (b"grpo_masked" in response.read()) is (status == 200)


def test_the_address_carries_the_token_and_the_page_keeps_it_as_a_cookie(server: PageServer) -> None:
    host = f"http://127.0.0.1:{server.server_port}"
    assert server.address == f"{host}/?token={server.token}" and len(server.token) >= 22
    response = ask(server, server.address.removeprefix(host), Cookie="", Origin=host)
    assert response.status == 200
    assert response.headers["Set-Cookie"] == f"{server.cookie}={server.token}; Path=/; HttpOnly; SameSite=Strict"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and policy.removesuffix("; frame-ancestors 'none'") in response.read().decode()
    assert ask(server, "/?token=wrong", Cookie="").status == 403


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/data/trajectory?file=../../secret.jsonl&offset=0", 404),
        ("/data/trajectory?file=..%2Fmetrics.jsonl&offset=0", 404),
        ("/data/trajectory?file=/etc/passwd&offset=0", 404),
        ("/data/trajectory?file=step-000001.jsonl&offset=1", 404),
        ("/data/trajectory?file=step-000001.jsonl&offset=-1", 400),
        ("/data/trajectories?from=0&to=" + "9" * 30, 400),
        ("/data/trajectories", 400),
        ("/../../../etc/passwd", 404),
        ("/metrics.jsonl", 404),
    ],
)
def test_nothing_else_can_be_asked_for(server: PageServer, path: str, status: int) -> None:
    answer(server, "/data/run.json")
    response = ask(server, path)
    assert response.status == status and set(json.loads(response.read())) == {"error"}
    assert response.headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"


def test_a_run_that_is_removed_is_said(server: PageServer, run_dir: Path) -> None:
    answer(server, "/data/run.json")
    shutil.rmtree(run_dir)
    response = ask(server, "/data/trajectory?file=step-000001.jsonl&offset=0")
    assert response.status == 404 and json.loads(response.read()) == {"error": "The run was moved or removed."}
    assert ask(server, "/data/run.json").status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get_is_allowed(server: PageServer, method: str) -> None:
    response = ask(server, "/data/run.json", method)
    assert (response.status, response.headers["Allow"]) == (405, "GET")


def test_a_port_that_is_taken_is_an_error(server: PageServer, run_dir: Path) -> None:
    with pytest.raises(UsageError, match=f"Port {server.server_port}: Address already in use"):
        PageServer(Served(run_dir, model_name="nano"), server.server_port)


@needs_chromium
def test_a_browser_shows_the_served_page(server: PageServer, tmp_path: Path) -> None:
    markup = shown(server.address, tmp_path / "profile", "#view=list")
    assert "Who paid?" in markup and "not connected" not in markup
