"""The commands of docs/guides/data.md do what it says, on a small mbox."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents.scratch import write_mbox

from emailrl.questions.load import read_jsonl

DOC = Path(__file__).resolve().parents[2] / "docs" / "guides/data.md"


def blocks() -> list[str]:
    """The shell blocks of the page, in order."""
    return re.findall(r"```bash\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with ``mail.mbox``: sixty mails between its owner and two others; and ``emailrl`` on the path."""
    write_mbox(tmp_path / "mail.mbox")
    program = tmp_path / "bin" / "emailrl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m emailrl "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"HOME": str(home), "PATH": path, "TEST_SET_SIZE": "12"}  # a short benchmark
    done = subprocess.run(
        ["bash", "-euc", script], cwd=home, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_own_mail_in_three_commands(home: Path) -> None:
    script = blocks()[0]
    assert len(script.strip().splitlines()) == 3
    told = run(script.replace("--model smol ", "--json --model nano "), home).stdout.splitlines()[-1]
    questions = list(read_jsonl(home / "data" / "mine_questions.jsonl"))
    assert len(questions) >= 30
    assert {question.inbox_address for question in questions} == {"me@example.org"}
    assert {"amount", "sender", "sent_to"} <= {question.kind for question in questions}
    result = json.loads(told)
    assert result["num_questions"] == 12
    assert result["exceptions"] == 0
