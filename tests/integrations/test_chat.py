"""``emailrl serve-agent`` and the ``openai`` client."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from chromium import CHROMIUM, needs_chromium
from documents.pages import DOCS
from engines.chat_server import StubServer
from integrations.conftest import foreign
from openai import APIError, BadRequestError, OpenAI

QUESTION = {"role": "user", "content": "When does the lease end?"}


@pytest.fixture
def address(serve: Callable[..., str]) -> str:
    pytest.importorskip("starlette", reason="the extra mcp is not installed")
    return serve("serve-agent")


def test_a_chat_client_sees_the_steps_the_answer_and_its_sources(address: str, stub: StubServer) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0)
    assert [model.id for model in client.models.list()] == ["emailrl"]
    whole = client.chat.completions.create(
        model="emailrl", messages=[{"role": "system", "content": "Be kind."}, QUESTION]
    )
    message = whole.choices[0].message
    assert message.content.startswith("On 31 May 2002.\n\nSources:\n- [") and message.content.count("](http") == 1
    assert message.reasoning_content == "Search: lease\nRead: <m0@x>\n"
    assert whole.usage.completion_tokens == 60  # 20 for each of three turns
    assert "Be kind." not in str(stub.requests)

    link = re.search(r"\]\((.+)\)$", message.content)[1]
    mail = httpx.get(link)
    assert mail.headers["content-type"].startswith("text/plain") and "31 May 2002" in mail.text
    assert httpx.get(link[:-1] + ("0" if link[-1] != "0" else "1")).status_code == 403
    assert httpx.get(link.replace("m0%40x", "m1%40x")).status_code == 403  # a key opens one email

    told = [*client.chat.completions.create(model="emailrl", messages=[QUESTION], stream=True)]
    deltas = [chunk.choices[0].delta for chunk in told]
    assert [delta.model_extra["reasoning_content"] for delta in deltas if "reasoning_content" in delta.model_extra] == [
        "Search: lease\n",
        "Read: <m0@x>\n",
    ]
    assert "".join(delta.content or "" for delta in deltas).startswith("On 31 May 2002.")
    assert told[-1].choices[0].finish_reason == "stop" and told[-1].usage.total_tokens == whole.usage.total_tokens


def test_earlier_questions_of_a_conversation_stand_before_the_next(address: str, stub: StubServer) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0)
    said = {"role": "assistant", "content": "On 31 May 2002.\n\nSources:\n- [Lease, bob, 2001-01-01](http://x)"}
    parts = [{"type": "text", "text": "And the deposit?"}]
    client.chat.completions.create(model="m", messages=[QUESTION, said, {"role": "user", "content": parts}])
    asked = [(message["role"], message["content"]) for message in stub.requests[0]["messages"]]
    assert asked[1:] == [("user", QUESTION["content"]), ("assistant", "On 31 May 2002."), ("user", "And the deposit?")]


def test_errors_come_in_the_form_that_clients_read(address: str) -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0)
    for messages in ([], [QUESTION, {"role": "assistant", "content": "Yes."}], [{"role": "user", "content": " "}]):
        with pytest.raises(BadRequestError, match="question of the user"):
            client.chat.completions.create(model="emailrl", messages=messages)
    failing = [{"role": "user", "content": "fail"}]
    for stream in (False, True):
        with pytest.raises(APIError) as caught:
            [*client.chat.completions.create(model="emailrl", messages=failing, stream=stream)]
        assert "refused" in str(caught.value) and "\x1b" not in str(caught.value)
    assert httpx.post(f"{address}/v1/chat/completions", content=b"{").status_code == 400
    assert httpx.get(f"{address}/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403


def test_the_guides_client_prints_the_answer(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = re.findall(r"```python\n(.+?)```", (DOCS / "guides/clients.md").read_text(), re.DOTALL)
    assert "http://127.0.0.1:8767" in block
    exec(block.replace("http://127.0.0.1:8767", address), {})
    assert capsys.readouterr().out.startswith("On 31 May 2002.")


CHAT_INTERFACE = """
import sys
import gradio
from playwright.sync_api import sync_playwright

page = gradio.load_chat(sys.argv[1], "emailrl", token="-", file_types=None, streaming=True)
_, address, _ = page.launch(prevent_thread_lock=True, quiet=True, show_error=True)
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=sys.argv[2], args=["--no-sandbox"])
    shown = browser.new_page()
    shown.goto(address)
    for number, question in enumerate(["When does the lease end?", "And the deposit?"]):
        shown.get_by_test_id("textbox").fill(question)
        shown.get_by_test_id("textbox").press("Enter")
        answer = shown.get_by_test_id("bot").nth(number)
        answer.get_by_text("Sources:").wait_for()
        print(answer.inner_html())
    browser.close()
page.close()
"""


@needs_chromium
@pytest.mark.clients
def test_a_chat_interface_shows_answers_and_their_sources(address: str, stub: StubServer, tmp_path: Path) -> None:
    python = foreign("gradio_page", "gradio==6.31.0", "playwright")
    own = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": str(tmp_path)}
    command = [python, "-c", CHAT_INTERFACE, f"{address}/v1", CHROMIUM]
    done = subprocess.run(command, env=own, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("On 31 May 2002.") == 2 and done.stdout.count(f'href="{address}/emails/') == 2
    asked = [message["content"] for message in stub.requests[3]["messages"]]
    assert asked[1:] == ["When does the lease end?", "On 31 May 2002.", "And the deposit?"]
