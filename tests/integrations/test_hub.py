"""``export --push-to-hub``: what went up comes back, from a stand-in that speaks the hub's API."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_server import LocalServer, QuietHandler
from tiny import make_checkpoint, make_model

from emailrl.questions.load import questions_file, read_jsonl, read_questions, write_demo
from emailrl.settings import DataSettings, StoreSettings

Files = dict[str, bytes]
COMMIT = "c" * 40
PULL = """
import sys
from huggingface_hub import snapshot_download
snapshot_download(sys.argv[1], repo_type=sys.argv[2], local_dir=sys.argv[3])
"""
LOAD = """
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained("ann/merged"), AutoTokenizer.from_pretrained("ann/merged")
"""


class Hub(QuietHandler):
    """Repositories in memory; every file goes up in the commit itself, and the name ``ann/taken`` is somebody's."""

    repositories: dict[str, Files]
    private: dict[str, bool]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_secret":
            return self._reply(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            if wanted["name"] == "taken":
                return self._reply(403, {"error": "You don't have the rights to create it."})
            name = f"{wanted.get('type', 'model')}s/{wanted['organization']}/{wanted['name']}"
            url = f"http://{self.headers['Host']}/{name.removeprefix('models/')}"
            if name in self.repositories:
                return self._reply(409, {"error": "You already created this repo", "url": url})
            self.repositories[name] = {}
            self.private[name] = wanted.get("private") or wanted.get("visibility") == "private"
            return self._reply(200, {"url": url})
        if self.path.startswith("/api/validate-yaml"):
            return self._reply(200, {"errors": [], "warnings": []})
        name, _, action = re.fullmatch(r"/api/(\w+/\w+/[\w-]+)(/)(preupload|commit)/main", self.path).groups()
        if action == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            return self._reply(
                200, {"files": [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in names]}
            )
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del self.repositories[name][line["value"]["path"]]
        self._reply(200, {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/((?:datasets/)?\w+/[\w-]+)/resolve/\w+/(.+)", self.path):
            name = found[1] if found[1].startswith("datasets/") else f"models/{found[1]}"
            content = self.repositories.get(name, {}).get(found[2])
            return self._reply(404 if content is None else 200, content or b"")
        name = "/".join(self.path.split("?")[0].split("/")[2:5])
        if (files := self.repositories.get(name)) is None:
            return self._reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        if "/tree/" in self.path:
            rows = [{"type": "file", "path": each, "size": len(files[each]), "oid": "0"} for each in files]
            return self._reply(200, rows)
        siblings = [{"rfilename": each} for each in files]
        kind = name.split("/", 1)[1]
        self._reply(200, {"id": kind, "sha": COMMIT, "private": self.private[name], "siblings": siblings, "tags": []})

    def _reply(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        etag = hashlib.sha256(body).hexdigest()
        for name, value in {
            "Content-Length": str(len(body)),
            "ETag": f'"{etag}"',
            "X-Repo-Commit": COMMIT,
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[Hub]]:
    class Own(Hub):
        pass

    Own.repositories, Own.private = {}, {}
    server = LocalServer(Own)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    Own.environment = environment | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_secret",
        "HF_HUB_OFFLINE": "0",
    }
    yield Own
    server.close()


def run(hub: type[Hub], folder: Path, *command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    python = [sys.executable, *map(str, command)]
    return subprocess.run(python, cwd=folder, env=hub.environment | more, capture_output=True, text=True, timeout=120)


COMMANDS = """
import contextlib, json, os, sys
from pathlib import Path
from emailrl.cli.app import main

ended = []
for arguments, environment in json.load(sys.stdin):
    os.environ.update(environment)
    sys.argv = ["emailrl", *arguments]
    with contextlib.redirect_stdout(open("out.txt", "w")), contextlib.redirect_stderr(open("err.txt", "w")):
        try:
            main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush(), sys.stderr.flush()
    ended.append((code, Path("out.txt").read_text(), Path("err.txt").read_text()))
print(json.dumps(ended))
"""


def emailrl(hub: type[Hub], folder: Path, *commands: tuple[list[str], dict[str, str]], **more: str) -> list[Any]:
    """Exit code, output and errors of commands, each with changes of the environment, in one process: most of a
    command's time goes into imports."""
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS], cwd=folder, env=hub.environment | more, input=json.dumps(commands),
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and "hf_" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_questions_adapters_and_merged_models_come_back_as_they_went(hub: type[Hub], tmp_path: Path) -> None:
    write_demo(tmp_path / "mail.db", settings=StoreSettings(), seed=42)
    asked = questions_file(tmp_path / "mail.db")
    make_checkpoint(tmp_path / "outputs/grpo_masked/best_model", make_model(tmp_path / "model"))
    pushes = {"agent": (), "merged": ("--format", "merged"), "mail-questions": ("--questions", asked.name)}
    exports = [
        (name, ["export", *options, "--out", name, "--push-to-hub", f"ann/{name}", "--overwrite"])
        for name, options in pushes.items()
        for _ in range(2)  # the second replaces the first
    ]
    ended = emailrl(hub, tmp_path, *((command, {}) for _, command in exports))
    for (name, _), (code, out, err) in zip(exports, ended, strict=True):
        assert code == 0 and f"ann/{name}" in out, err
    assert set(hub.private) == {"models/ann/agent", "models/ann/merged", "datasets/ann/mail-questions"}
    assert all(hub.private.values())
    for name, files in hub.repositories.items():
        folder = tmp_path / name.rpartition("/")[2]
        assert files.keys() - {".gitattributes"} == {each.name for each in folder.iterdir()}
        back = tmp_path / "back" / folder.name
        done = run(hub, tmp_path, "-c", PULL, f"ann/{folder.name}", name.split("s/")[0], back)
        assert done.returncode == 0, done.stderr
        assert all((back / each.name).read_bytes() == each.read_bytes() for each in folder.iterdir())
    assert sorted(map(repr, read_questions(tmp_path / "back/mail-questions", DataSettings()).scenarios)) == sorted(
        map(repr, read_jsonl(asked))
    )
    done = run(hub, tmp_path, "-c", LOAD)
    assert done.returncode == 0, done.stderr


def test_what_the_hub_refuses_is_told_and_the_export_stays(hub: type[Hub], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "outputs/grpo_masked/best_model", make_model(tmp_path / "model"))
    token = {"HF_TOKEN": "hf_secret"}
    refused = [("ann/taken", {}), ("ann/agent", {"HF_TOKEN": "hf_wrong"}), ("a/b/c", token)]
    pushes = [
        (["export", "--out", "agent", "--overwrite", "--push-to-hub", name], more)
        for name, more in [*refused, ("ann/agent", token)]
    ]
    both = (["export", "--questions", "q.jsonl", "--checkpoint", "best"], {})
    *ended, (code, _, err) = emailrl(hub, tmp_path, *pushes[:-1], both)
    assert code == 2 and "exclude each other" in err
    ended += emailrl(hub, tmp_path, pushes[-1], HF_HUB_OFFLINE="1")  # read once in a process
    for (name, _), (code, _, err) in zip([*refused, ("ann/agent", token)], ended, strict=True):
        assert code == 1 and f"agent was not pushed to {name}: " in err and "Traceback" not in err
        assert "hf_" not in err and (tmp_path / "agent/README.md").is_file()
