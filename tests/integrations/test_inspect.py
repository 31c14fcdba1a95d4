"""Inspect plays our task, and rewards as we do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from documents.pages import DOCS
from integrations.conftest import Played, foreign

INSPECT = ("inspect", "inspect-ai==0.3.285")
PLAY = """
import json, sys
from inspect_ai import eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model

calls = json.load(sys.stdin)

def reply(messages, tools, *more):
    assert [tool.name for tool in tools] == ["search_emails", "read_email", "return_final_answer"]
    assert "must all occur" in tools[0].parameters.properties["keywords"].description
    question = next(message.content for message in messages if message.role == "user")
    name, arguments = calls[question][sum(message.role == "assistant" for message in messages)]
    output = ModelOutput.for_tool_call("mockllm", name, json.loads(arguments))
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)  # else it is counted, with a download
    return output

model = get_model("mockllm/model", custom_outputs=reply)
[log] = eval("emailrl/mail_search", model=model, display="none", log_dir="logs")
assert log.status == "success", log.error.message
print(json.dumps({
    sample.input[1].content: (sample.scores["reward"].value["reward"], len(sample.messages)) for sample in log.samples
}))
"""


@pytest.mark.clients
def test_inspect_plays_the_task_and_rewards_alike(tmp_path: Path, played: Played) -> None:
    assert "inspect eval emailrl/mail_search" in (DOCS / "guides/clients.md").read_text()
    python = foreign(*INSPECT)
    settings = {"emailrl_db": str(played.db), "questions": str(played.db.parent / "chosen.jsonl"), "judge": "offline"}
    toml = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    (tmp_path / "emailrl.toml").write_text(toml)
    asked = json.dumps(played.calls)
    done = subprocess.run([python, "-c", PLAY], cwd=tmp_path, input=asked, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    # System and user message; a message and its result for each call but the last, which Inspect answers too.
    wanted = {question: [played.rewards[question], 2 + 2 * len(calls)] for question, calls in played.calls.items()}
    assert json.loads(done.stdout.splitlines()[-1]) == wanted
