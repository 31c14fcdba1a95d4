"""The commands of docs/data.md do what it says, on a small mbox."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path

import pytest

from emailrl.scenarios import read_jsonl

DOC = Path(__file__).resolve().parents[2] / "docs" / "data.md"
PEOPLE = ["bo.lind@example.net", "cy.marsh@example.net"]


def blocks() -> list[str]:
    """The shell blocks of the page, in order."""
    return re.findall(r"```sh\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with ``mail.mbox``: sixty mails between its owner and two others; and ``emailrl`` on the path."""
    lines = []
    for number in range(60):
        mail = EmailMessage()
        other = PEOPLE[number % 2]
        mail["From"], mail["To"] = (other, "Me <me@example.org>") if number % 3 else ("me@example.org", other)
        mail["Subject"] = f"Survey of jetty {chr(97 + number // 26)}{chr(97 + number % 26)}x by the crew"
        sent_at = datetime(2024, 3, 1, 9, tzinfo=UTC) + timedelta(hours=17 * number)
        mail["Date"], mail["Message-ID"] = format_datetime(sent_at), f"<{number}@example.net>"
        mail.set_content(f"The repair costs ${number + 11},000.\nFrom now on we go on.\n" + "We saw all of it.\n" * 12)
        lines.append(f"From {other} {sent_at:%a %b %d %H:%M:%S %Y}\n{mail.as_string(unixfrom=False)}\n")
    (tmp_path / "mail.mbox").write_text("".join(lines))
    program = tmp_path / "bin" / "emailrl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m emailrl "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HOME": str(home), "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=home, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_own_mail_in_three_commands(home: Path) -> None:
    script = blocks()[0]
    assert len(script.strip().splitlines()) == 3
    told = run(script.rstrip() + " --json", home).stdout.splitlines()[-1]
    questions = list(read_jsonl(home / "data" / "mine_questions.jsonl"))
    assert len(questions) >= 30
    assert {question.inbox_address for question in questions} == {"me@example.org"}
    assert {"amount", "sender", "sent_to"} <= {question.kind for question in questions}
    result = json.loads(told)
    assert result["num_questions"] == min(len(questions), 100)
    assert result["exceptions"] == 0


def test_the_estimate_of_a_model_s_questions_needs_no_key_and_no_network(home: Path) -> None:
    run("\n".join(blocks()[0].splitlines()[:1]), home)
    [script] = [block for block in blocks() if "--dry-run" in block]
    assert (
        "to send to openai/gpt-4.1" in run(script.splitlines()[0].replace("data/mail.db", "data/mine.db"), home).stderr
    )
