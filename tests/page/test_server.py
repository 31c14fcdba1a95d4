"""The server of the page: what it answers, to whom, and that it follows a run that is being written."""

from __future__ import annotations

import html
import http.client
import json
import os
import re
import shlex
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from chromium import needs_chromium, shown
from tiny import make_metadata

from emailrl.base.errors import UsageError
from emailrl.checkpoints import write_checkpoint
from emailrl.page.place import place_of, run_record
from emailrl.page.server import PageServer, Served
from emailrl.records import TrajectoryWriter, write_records, write_trajectories
from emailrl.records.trajectory import Trajectory


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
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {"Host": f"127.0.0.1:{server.server_port}"} | given
    if "token=" not in path:
        path += f"{'&' if '?' in path else '?'}token={server.token}"
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
    counts = [(file["name"], file["count"]) for file in run["files"]]
    assert counts == [("step-000001.jsonl", 3), ("step-000002.jsonl", 2)]
    assert run["total"] == 5 and run["steps"] == [{"step": 1, "loss": 0.5}]
    rows = answer(server, "/data/trajectories?from=1&to=4")
    assert [row["id"] for row in rows] == ["step-000001-1", "step-000001-2", "step-000002-0"]
    assert (rows[0]["reward"], rows[0]["verdict"], rows[0]["source"]) == (1.38, "correct", "step")
    assert answer(server, "/data/trajectories?from=4&to=99")[0]["id"] == "step-000002-1"
    assert answer(server, "/data/trajectories?from=5&to=99") == []
    texts = answer(server, "/data/texts?from=1&to=4")
    assert [(each["file"], each["offset"]) for each in texts] == [(row["file"], row["offset"]) for row in rows]
    assert [item["text"] for item in texts[2]["conversation"]][1] == "Who paid?"
    whole = answer(server, f"/data/trajectory?file=step-000002.jsonl&offset={rows[2]['offset']}")
    assert whole["id"] == "step-000002-0" and whole["evidence"]["gold"][0]["id"] == "<m1@x>"


def test_what_is_written_meanwhile_is_served(server: PageServer, run_dir: Path, trajectory: Trajectory) -> None:
    assert answer(server, "/data/run.json")["total"] == 5
    file = run_dir / "trajectories" / "step-000002.jsonl"
    with closing(TrajectoryWriter(file)) as writer:
        writer.append(replace(trajectory, id="late", step=2))
    with file.open("ab") as stream:
        stream.write(b'{"id": "torn')
    write_trajectories(run_dir / "trajectories" / "step-000003.jsonl", [replace(trajectory, id="later", step=3)])
    run = answer(server, "/data/run.json")
    assert [file["count"] for file in run["files"]] == [3, 3, 1]
    assert run["files"][1]["bytes"] == file.stat().st_size
    assert [row["id"] for row in answer(server, "/data/trajectories?from=5&to=7")] == ["late", "later"]


@needs_chromium
def test_a_run_that_ended_early_says_how_it_itself_is_continued(run_dir: Path, tmp_path: Path) -> None:
    moved = run_dir.rename(tmp_path / "ann's run")

    def save(name: str, **metadata: Any) -> None:
        def fill(folder: Path) -> None:
            (folder / "trainer_state.pt").write_bytes(b"state")

        write_checkpoint(moved / name, make_metadata(**metadata), fill)

    def told(state: str) -> list[str]:
        (moved / "status.json").write_text(json.dumps({"state": state, "step": 3, "steps": 9, "at": 0.0}))
        with PageServer(Served(moved, model_name="nano")) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
            markup = shown(server.address, tmp_path / "profile")
            server.shutdown()
        return [html.unescape(each) for each in re.findall(r"To continue (.*?)</code>", markup)]

    assert told("interrupted") == []  # nothing was saved
    save("best_model", kind="best", step=0)
    save("checkpoint-2", kind="checkpoint", step=2)
    write_checkpoint(moved / "final", make_metadata(kind="final", step=3), lambda _: None)  # without state
    [said] = told("running")  # nobody holds it: killed
    assert said.startswith("after step 2: ") and said.endswith(f">emailrl train --resume {shlex.quote(str(moved))}")
    assert told("finished") == []
    assert "folder" not in run_record(place_of(moved), [])  # a report names no local path


def test_bad_lines_are_passed_over_and_said(run_dir: Path) -> None:
    """Whichever line of whichever file is bad, the others are served."""
    first, second = sorted((run_dir / "trajectories").glob("*.jsonl"))
    lines = first.read_text().splitlines()
    first.write_text("\n".join(['{"id": 7}', lines[0], "[", *lines[1:]]) + "\n")
    second.write_text("not JSON\n")
    write_records(run_dir / "training" / first.name, [{"id": "step-000001-1", "advantage": 0.5}, {"id": 3}])
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n[]\n{"step": 2}\n{"st')
    served = Served(run_dir, model_name="nano")
    run = served.run()
    assert [(file["name"], file["count"]) for file in run["files"]] == [(first.name, 3), (second.name, 0)]
    assert [step["step"] for step in run["steps"]] == [1, 2]
    assert [each.partition(": ")[0] for each in run["left_out"]] == ["metrics.jsonl, line 2", first.name, second.name]
    assert "2 of 5 lines could not be read: line 1: not a trajectory (id must be" in run["left_out"][1]
    rows = served.listed("rows", 0, 9)
    assert [(row["id"][-1], row["advantage"]) for row in rows] == [("0", None), ("1", 0.5), ("2", None)]
    assert [row["id"] for row in served.listed("rows", 1, 2)] == ["step-000001-1"]
    whole = served.trajectory(first.name, rows[1]["offset"])
    assert whole is not None and (whole["id"], whole["advantage"]) == ("step-000001-1", 0.5)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_only_a_browser_with_the_address_is_answered(server: PageServer, headers: dict[str, str], status: int) -> None:
    for path in ("/", "/data/run.json"):
        response = ask(server, path, **headers)
        assert response.status == status
        assert (b"grpo_masked" in response.read()) is (status == 200)


def test_a_browser_without_the_token_is_told_what_to_open(server: PageServer) -> None:
    response = ask(server, "/?token=%3Cb%3E", Accept="text/html,*/*;q=0.8")
    assert response.status == 403 and response.headers["Content-Type"].startswith("text/html")
    said = response.read().decode()
    assert "the whole address that emailrl view printed" in said and server.token not in said
    lost = ask(server, f"/%3Cb%3E?token={server.token}&run=%3Cb%3E", Accept="text/html")
    assert lost.status == 404 and "No run &lt;b&gt; here." in lost.read().decode()


def test_only_the_address_carries_the_token(server: PageServer) -> None:
    """Not a cookie: browsers send one to every port of a host, so to servers of other users of the machine."""
    host = f"http://127.0.0.1:{server.server_port}"
    assert server.address == f"{host}/?token={server.token}" and len(server.token) >= 22
    response = ask(server, server.address.removeprefix(host), Origin=host)
    assert response.status == 200 and response.headers["Set-Cookie"] is None
    assert response.headers["Referrer-Policy"] == "no-referrer"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and policy.removesuffix("; frame-ancestors 'none'") in response.read().decode()
    for wrong in ("", "wrong", "%C3%A9", f"{server.token}&token=wrong"):
        assert ask(server, f"/?token={wrong}").status == 403


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


def raw(server: PageServer, *lines: str) -> bytes:
    """What the server answers to the lines of a request, the token in place of TOKEN, and whether it then hangs up."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=300) as connection:
        text = "\r\n".join([*lines, "Connection: close", "", ""])
        text = text.replace("OWN", f"127.0.0.1:{server.server_port}").replace("TOKEN", server.token)
        connection.sendall(text.encode("latin-1"))
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /data/run.json?token=TOKEN HTTP/1.1", "Host: OWN"], 200),
        (["GET http://[ HTTP/1.1", "Host: OWN"], 400),
        (["GET http://OWN/data/run.json?token=TOKEN HTTP/1.1", "Host: OWN"], 400),
        (["GET * HTTP/1.1", "Host: OWN"], 400),
        (["GET //[?token=TOKEN HTTP/1.1", "Host: OWN"], 404),
        (["GET /data/run.json?token=TOKEN HTTP/1.1", "Host: OWN", "Host: OWN"], 400),
        (["GET /data/run.json?token=TOKEN HTTP/1.1", "Host: OWN", "Host: evil.example"], 400),
        (["GET /data/run.json?token=TOKEN HTTP/1.1", "Host: OWN", "Origin: http://OWN", "Origin: http://evil"], 400),
        (["GET / HTTP/1.1", "Host: OWN", "Sec-Fetch-Site: none", "Sec-Fetch-Site: cross-site"], 400),
        (["GET /data/run.json?token=TOKEN HTTP/1.1", "Host: OWN, evil.example"], 421),
        (["BREW /<b>?token=TOKEN HTTP/1.1", "Host: OWN"], 501),
        (["GET /" + "a" * 70_000 + " HTTP/1.1", "Host: OWN"], 414),
    ],
)
def test_malformed_and_ambiguous_requests_are_refused(server: PageServer, lines: list[str], status: int, capfd) -> None:
    head, _, body = raw(server, *lines).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"default-src 'none'" in head and b"nosniff" in head
    assert (set(json.loads(body)) == {"error"}) is (status != 200) and b"<b>" not in body
    assert capfd.readouterr() == ("", "")


def reverse(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[::-1]))
    other.replace(file)


def gone(file: Path) -> Path:
    file.unlink()
    return file


CHANGES: dict[str, tuple[Callable[[Path], object], int]] = {
    "removed": (gone, 2),
    "shortened": (lambda file: file.write_bytes(file.read_bytes()[:100]), 2),
    "emptied": (lambda file: file.write_bytes(b""), 2),
    "reversed": (reverse, 5),
    "a link to nothing": (lambda file: gone(file).symlink_to("/nowhere"), 2),
    "a pipe": (lambda file: os.mkfifo(gone(file)), 2),
    "a folder": (lambda file: gone(file).mkdir(), 2),
}
"""What happens to a file, and how many trajectories are then left."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_served_leaves_the_others(
    server: PageServer, run_dir: Path, change: str, capfd
) -> None:
    file = run_dir / "trajectories" / "step-000001.jsonl"
    answer(server, "/data/run.json")
    before = answer(server, "/data/trajectories?from=0&to=9")
    make, left = CHANGES[change]
    make(file)
    for path in ("/data/trajectories?from=0&to=9", f"/data/trajectory?file={file.name}&offset={before[1]['offset']}"):
        assert ask(server, path).status in (200, 404)  # between two looks at the run
    assert answer(server, "/data/run.json")["total"] == left
    rows = answer(server, "/data/trajectories?from=0&to=9")
    assert [row["id"] for row in rows][-2:] == ["step-000002-0", "step-000002-1"] and len(rows) == left
    for row in rows:
        assert answer(server, f"/data/trajectory?file={row['file']}&offset={row['offset']}")["id"] == row["id"]
    assert capfd.readouterr() == ("", "")


def test_only_get_is_allowed_a_port_is_served_once_and_a_removed_run_is_said(server: PageServer, run_dir: Path) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        response = ask(server, "/data/run.json", method)
        assert (response.status, response.headers["Allow"]) == (405, "GET")
    with pytest.raises(UsageError, match=f"Port {server.server_port}: Address already in use"):
        PageServer(Served(run_dir, model_name="nano"), server.server_port)
    answer(server, "/data/run.json")
    shutil.rmtree(run_dir)
    response = ask(server, "/data/trajectory?file=step-000001.jsonl&offset=0")
    assert response.status == 404 and json.loads(response.read()) == {"error": "No such trajectory."}
    assert ask(server, "/data/run.json").status == 404


@needs_chromium
def test_a_folder_of_several_runs_is_served_as_their_comparison(run_dir: Path, tmp_path: Path) -> None:
    folder = run_dir.parent
    write_records(folder / "second" / "metrics.jsonl", [{"step": 1, "loss": 0.25}])
    served = Served(folder, model_name="nano")
    write_records(folder / "second" / "metrics.jsonl", [{"step": step, "loss": 0.25} for step in (1, 2)])
    run = served.run()
    assert [(each["title"], len(each["steps"])) for each in run["runs"]] == [(run_dir.name, 1), ("second", 2)]
    assert (run["kind"], run["total"], served.listed("rows", 0, 9), served.listed("texts", 0, 9)) == ("runs", 0, [], [])
    server = PageServer(served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    markup = shown(server.address, tmp_path / "profile")
    alone = shown(f"{server.address}&run={run_dir.name}", tmp_path / "profile", "#view=list")
    assert answer(server, f"/data/run.json?run={run_dir.name}")["total"] == 5
    for name in ("third", "..", f"../outputs/{run_dir.name}", str(run_dir), "second/."):
        assert ask(server, f"/data/run.json?run={quote(name, safe='')}").status == 404
    server.shutdown()
    server.server_close()
    assert ">5 trajectories<" in alone and f'href="?token={server.token}">← All runs</a>' in alone
    assert f"{run_dir.name} from 0.500 at step 1 to 0.500 at step 1; second from 0.250 at step 1" in markup
    links = re.findall(r'<a href="(\?token=[^"]*)"', markup)
    assert links == [f"?token={server.token}&amp;run={name}" for name in (run_dir.name, "second")]
    assert Served(run_dir, model_name="nano").run()["kind"] == "run"


@needs_chromium
def test_a_browser_shows_the_served_page(server: PageServer, tmp_path: Path) -> None:
    markup = shown(server.address, tmp_path / "profile", "#view=list&q=ann%20paid")  # which only a mail says
    assert "Who paid?" in markup and ">5 trajectories<" in markup and "not connected" not in markup
