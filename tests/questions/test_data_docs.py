"""The commands of docs/guides/data.md do what it says, on a small mbox."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents.scratch import write_mbox
from questions.llm.chat_stub import ChatStub, mails_of

from emailrl.questions import read_jsonl

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


def test_questions_by_a_model_estimated_without_a_key_and_then_asked_of_a_local_server(home: Path) -> None:
    run(blocks()[0].splitlines()[0], home)
    estimate, local = (block.splitlines()[0] for block in blocks() if "--generator llm" in block)
    told = run(estimate.replace("data/mail.db", "data/mine.db"), home).stdout
    assert "to send to openai/gpt-4.1 at https://openrouter.ai/api/v1" in told

    def answer(body: dict[str, Any], number: int) -> tuple[int, str]:
        return 200, json.dumps(
            [
                {
                    "question": f"What does it cost to mend the {mail['subject'].removeprefix('Survey of ')[:9]}?",
                    "answer": re.findall(r"\$[\d,]+", mail["body"])[0],
                    "message_ids": [mail["message_id"]],
                    "how_realistic": 0.9,
                }
                for mail in mails_of(body)[:10]
            ]
        )

    stub = ChatStub(answer)
    try:
        done = run(f"{local.replace('http://localhost:8000/v1', stub.url)} --db data/mine.db --json", home)
    finally:
        stub.close()
    result = json.loads(done.stdout)
    assert (result["kinds"]["llm"], result["dropped"], result["cost"]) == (result["questions"], {}, 0.0)
    assert len(list(read_jsonl(home / "data" / "mine_questions.jsonl"))) == result["questions"] == 20
    assert {request["model"] for request in stub.requests} == {"Qwen/Qwen3-14B"}
