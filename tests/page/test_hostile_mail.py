"""Nothing that a mail or a model wrote runs in the page, loads anything, or hides in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import needs_chromium, shown
from local_server import LocalServer, QuietHandler
from page.conftest import written

from emailrl.records import write_trajectories
from emailrl.records.trajectory import Message, Trajectory


@pytest.fixture
def asked() -> Iterator[tuple[int, list[str]]]:
    """A server on this machine: its port, and the paths that were asked of it."""
    paths: list[str] = []

    class Noting(QuietHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(204)
            self.end_headers()

    with closing(LocalServer(Noting)) as server:
        yield server.port, paths


def payloads(port: int) -> list[str]:
    run = "document.title='ran';fetch(`http://127.0.0.1:" + str(port) + "/ran`)"
    return [
        f"<script>{run}</script>",
        f"</script><script>{run}</script>",
        f'<img src="http://127.0.0.1:{port}/image" onerror="{run}">',
        f'<svg onload="{run}"><use href="data:image/svg+xml,<svg/>"/></svg>',
        f'<iframe srcdoc="<script>{run}</script>"></iframe>',
        f'<a href="javascript:{run}">here</a> <a href="data:text/html,<script>{run}</script>">there</a>',
        f'<link rel="stylesheet" href="http://127.0.0.1:{port}/style"><style>@import "http://127.0.0.1:{port}/x"</style>',
        f'"><meta http-equiv="refresh" content="0;url=http://127.0.0.1:{port}/moved">',
        "{{script}} {{data}} ]]> --> ${document.title='ran'}",
        "\x1b[2J\x1b]0;ran\x07 left \u202e right \u2066 \ud800 zero\u200bwidth",
    ]


def hostile(trajectory: Trajectory, text: str) -> Trajectory:
    """The trajectory with the text wherever a mail, a question or a model may put one."""
    hits = json.dumps([{"message_id": text, "snippet": f"<b>{text}</b>"}])
    mail = {"message_id": text, "subject": text, "from_address": text, "to_addresses": [text], "body": text}
    messages = [
        Message("system", text), Message("user", text), Message("assistant", text, parse_error=text),
        Message("tool", hits, name=text), Message("tool", json.dumps(mail), name=text),
        Message("tool", text, name=text),
    ]  # fmt: skip
    scenario = replace(trajectory.scenario, question=text, answer=text, message_ids=[text], inbox_address=text)
    call = replace(trajectory.messages[2].tool_calls[0], name=text, arguments={text: text})
    messages.append(Message("assistant", "", [call, trajectory.messages[4].tool_calls[0]]))
    return replace(
        trajectory, id=f"t{text}", scenario=scenario, messages=messages, final_answer=text, final_sources=[text],
        exception=text, run_id=text, policy_version=text, reward_terms={text: 1.0}, rubric={text: text},
    )  # fmt: skip


@needs_chromium
def test_nothing_in_a_mail_runs_or_loads(trajectory: Trajectory, tmp_path: Path, asked: tuple[int, list[str]]) -> None:
    port, paths = asked
    file = tmp_path / "mail.jsonl"
    texts = payloads(port)
    write_trajectories(file, [hostile(trajectory, text) for text in ("\n".join(texts), *texts)])
    target = written(file)
    whole = "#view=list&t=mail.jsonl%400"
    for fragment in ("#view=overview", whole, f"{whole}&side=group", "#view=about"):
        markup = shown(target, tmp_path / "profile", fragment)
        assert 'data-ready="true"' in markup and "<title>ran" not in markup
        body = markup[markup.index("<body") :]
        assert not any(f"<{name}" in body for name in ("img", "iframe", "link", "style", "meta", "use", "object"))
        assert all(address.startswith("#") for address in re.findall(r'<a [^>]*?href="([^"]*)"', body))
        assert not set("\x1b\u202e\u2066\u200b") & set(markup)
    assert paths == []


@needs_chromium
def test_even_markup_that_got_in_would_not_run(
    trajectory: Trajectory, tmp_path: Path, asked: tuple[int, list[str]]
) -> None:
    """The policy of the page is the second lock; without it the same markup does run, so the test can fail."""
    port, paths = asked
    file = tmp_path / "mail.jsonl"
    write_trajectories(file, [trajectory])
    target = written(file)
    markup = f'<body><script>document.body.dataset.ran = "yes"</script><img src="http://127.0.0.1:{port}/image">'
    broken = target.read_text(encoding="utf-8").replace("<body>", markup)
    target.write_text(broken, encoding="utf-8")
    assert "data-ran=" not in shown(target, tmp_path / "profile") and paths == []
    target.write_text(broken.replace("Content-Security-Policy", "X-Nothing"), encoding="utf-8")
    assert "data-ran=" in shown(target, tmp_path / "profile") and paths == ["/image"]
