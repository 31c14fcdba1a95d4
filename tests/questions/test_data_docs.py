"""The commands of docs/guides/data.md do what it says, on a small mbox."""

from __future__ import annotations

import json
from pathlib import Path

from documents.pages import blocks
from documents.scratch import make_home, run

from emailrl.questions.load import read_jsonl


def test_own_mail_in_three_commands(tmp_path: Path) -> None:
    home = make_home(tmp_path)
    (home / "emailrl.toml").unlink()  # which is about the demo
    script = next(block.text for block in blocks("docs/guides/data.md") if block.language == "bash")
    assert len(script.strip().splitlines()) == 3
    done = run(script.replace("emailrl benchmark", "emailrl benchmark --json"), home)
    assert done.returncode == 0, done.stderr
    questions = list(read_jsonl(home / "data" / "mine_questions.jsonl"))
    assert len(questions) >= 30
    assert {question.inbox_address for question in questions} == {"me@example.org"}
    assert {"amount", "sender", "sent_to"} <= {question.kind for question in questions}
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["num_questions"], result["exceptions"]) == (4, 0)
