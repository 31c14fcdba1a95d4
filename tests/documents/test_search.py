"""The site's search in a browser: what people ask in words of their own finds the page that answers it."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from chromium import needs_chromium, shown
from documents.pages import DOCS, ROOT
from documents.test_site import zensical
from generate import example_page, find_settings

pytestmark = [needs_chromium, pytest.mark.skipif(zensical() is None, reason="Zensical is not installed")]

ANSWERS = {
    "multiple GPUs": "guides/scaling.html",
    "gmail takeout": "guides/data.html#sources-of-mail",
    "export to huggingface": "reference/cli.html#emailrl-export",
    "stop training early": "guides/troubleshooting.html#stop-training-early",
    "out of memory": "guides/troubleshooting.html#out-of-memory",
    "resume": "guides/troubleshooting.html#resume-training-after-ctrl-c-or-a-crash",
    "How long does it take?": "guides/troubleshooting.html#how-long-things-take",
    "windows wsl": "guides/troubleshooting.html#platforms-linux-macos-windows-no-gpu",
    "how do I use my own emails": "guides/data.html#your-own-mail-in-three-commands",
    "compare runs": "guides/troubleshooting.html#comparing-runs",
    "compare two checkpoints": "guides/benchmark.html#compare-two-checkpoints",
    "killed": "guides/troubleshooting.html#the-run-was-killed",
    "MAX_STEPS": "reference/settings.html#training",
    "learning rate zzzz": "guides/learning_rate.html",
}
MARK = '<script type="application/json"></script>'  # behind which ``shown`` cuts
ASK = """
const pass = () => new Promise((resolve) => setTimeout(resolve, 200));
// A request takes real time, which the search needs: the browser's own clock runs ahead of it.
const wait = async () => {
  await pass();
  await fetch("wait");
  await pass();
};
addEventListener("load", async () => {
  await wait();
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "/", bubbles: true }));
  await wait();
  const roots = [...document.querySelectorAll("body > div")].map((each) => each.shadowRoot);
  const search = roots.find((root) => root?.querySelector("input"));
  const found = {};
  for (const question of QUESTIONS) {
    const input = search.querySelector("input");
    input.value = question;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    await wait();
    found[question] = [...search.querySelectorAll("ol a")].map((link) => link.href);
  }
  const output = Object.assign(document.createElement("output"), { id: "found", textContent: JSON.stringify(found) });
  document.body.append(output);
});
"""


class _Pages(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/wait":
            time.sleep(0.3)
        super().do_GET()

    def log_message(self, *_: object) -> None:
        """Say nothing of requests."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of the built site, whose ``ask.html`` asks each question and writes down what was found."""
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs/images/example.html").write_text(example_page(DOCS), encoding="utf-8")
    subprocess.run([str(zensical()), "build"], cwd=tmp_path, capture_output=True, check=True)
    find_settings(tmp_path / "site")
    script = f"<script>{ASK.replace('QUESTIONS', json.dumps([*ANSWERS]))}</script></body>"
    index = (tmp_path / "site/index.html").read_text(encoding="utf-8")
    (tmp_path / "site/ask.html").write_text(index.replace("</body>", MARK + script), encoding="utf-8")
    handler = functools.partial(_Pages, directory=str(tmp_path / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_questions_in_peoples_own_words_find_their_pages(site: str, tmp_path: Path) -> None:
    markup = shown(f"{site}ask.html", tmp_path / "profile")
    [text] = re.findall(r'id="found">(.*?)</output>', markup)
    found = {
        question: [re.sub(r"\?[^#]*", "", link.removeprefix(site)) for link in links]
        for question, links in json.loads(html.unescape(text)).items()
    }
    assert {question: answer for question, answer in ANSWERS.items() if answer not in found[question][:3]} == {}, found
