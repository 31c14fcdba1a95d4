"""``emailrl convert``: others' readers open what it writes, ``sft`` reads it back, and private mail is redacted."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from integrations.conftest import Played, foreign
from tiny import ANN
from typer.testing import CliRunner

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.cli.app import app
from emailrl.records import write_trajectories
from emailrl.records.foreign import conversations_in
from emailrl.records.trajectory import Message, Scenario, TokenSample, ToolCall, Trajectory, Turn
from emailrl.sft.data import read_conversations
from emailrl.sft.examples import as_spoken


def convert(file: Path, to: str, *more: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["convert", str(file), "--to", to, "--json", *map(str, more)])
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversation on a private mailbox, of a policy that thinks."""
    monkeypatch.chdir(tmp_path)
    mail = '{"from_address":"karl.meier@acme.com","body":"From: Karl Meier\\nThe lease ends in May, says Meier."}'
    scenario = Scenario(
        "q1", "When does Karl Meier say the lease ends?", "In May", ["<m0@acme.com>"], ANN, "2002-01-01"
    )
    thought = "<think>\nMeier wrote it.\n</think>\n\n"
    call, answer = ToolCall("read_email", {"message_id": "<m0@acme.com>"}, "c7"), {"answer": "May", "sources": []}
    text = '<tool_call>\n{"name": "return_final_answer", "arguments": {"answer": "May", "sources": []}}\n</tool_call>'
    messages = [
        Message("system", "Search."),
        Message("user", scenario.question),
        Message("assistant", f"{thought}I read it.", [call]),
        Message("tool", mail, tool_call_id="c7", name="read_email"),
        Message("assistant", text, [ToolCall("return_final_answer", answer)]),
    ]
    turns = [
        Turn([5, 6], [-0.5, -0.25], "stop", "read_email", call.arguments, mail, prompt_tokens=9, completion_tokens=2),
        Turn([7], [-1.0], "stop", "return_final_answer", answer),
    ]
    trajectory = Trajectory(
        "t1",
        "g1",
        scenario,
        messages=messages,
        turns=turns,
        samples=[TokenSample([1, 5, 6, 7], [0, 1, 1, 1], [None] * 4)],
    )
    trajectory.reward, trajectory.reward_terms, trajectory.final_answer = 0.7, {"outcome": 0.7}, "May"
    trajectory.rubric = {"answer_correct": True, "prompt_tokens": 9, "completion_tokens": 3}
    trajectory.stop_reason = "answered"
    write_trajectories(tmp_path / "own.jsonl", [trajectory, replace(trajectory, id="t2")])
    return tmp_path / "own.jsonl"


def contents(path: Path) -> str:
    if path.suffix == ".eval":
        with zipfile.ZipFile(path) as archive:
            return "".join(name + archive.read(name).decode() for name in archive.namelist())
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return "".join(file.name + file.read_text() for file in files)


@pytest.mark.parametrize("to", ["inspect", "atif", "sts", "openai"])
def test_private_mail_is_redacted_unless_told_otherwise(to: str, private: Path) -> None:
    told = convert(private, to)
    assert told["redacted"] and told["num_trajectories"] == 2
    text = contents(Path(told["out"]))
    assert not re.search(r"karl|meier|ann@|acme|token_ids", text, re.IGNORECASE) and "The lease ends in May" in text
    assert "read_email" in text and "answered" in text and "Redacted" in text
    with pytest.raises(UsageError):
        convert(private, to)
    told = convert(private, to, "--no-redact", "--out", "all")
    text = contents(Path(told["out"])) if to != "inspect" else contents(Path("all").rename("all.eval"))
    assert not told["redacted"] and "karl.meier@acme.com" in text and "Redacted" not in text


def test_each_format_tells_the_conversation(private: Path) -> None:
    def written(to: str, name: str) -> str:
        convert(private, to, "--no-redact", "--out", to)
        return (private.parent / to / name).read_text() if name else (private.parent / to).read_text()

    line = json.loads(written("openai", "").splitlines()[0])
    arguments = '{"message_id": "<m0@acme.com>"}'
    call = {"id": "c7", "type": "function", "function": {"name": "read_email", "arguments": arguments}}
    said = {"role": "assistant", "content": "I read it.", "reasoning_content": "Meier wrote it.", "tool_calls": [call]}
    assert line["messages"][2] == said
    assert line["messages"][3]["tool_call_id"] == "c7" and line["messages"][4]["content"] == ""
    assert len(line["tools"]) == 3 and line["metadata"]["reward"] == 0.7

    lines = [json.loads(each) for each in written("sts", "000000.jsonl").splitlines()]
    assert (lines[0]["type"], lines[0]["harness"], lines[0]["id"], len(lines)) == ("session", "emailrl", "t1", 6)
    assert lines[3]["message"]["toolCalls"] == [call] and lines[3]["message"]["reasoningContent"] == "Meier wrote it."
    assert lines[4]["message"]["toolCallId"] == "c7"

    document = json.loads(written("atif", "000001.json"))
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    step = document["steps"][2]
    assert step["tool_calls"][0]["arguments"] == {"message_id": "<m0@acme.com>"}
    assert step["observation"]["results"][0]["source_call_id"] == step["tool_calls"][0]["tool_call_id"] == "c7"
    assert step["metrics"]["completion_token_ids"] == [5, 6] and step["metrics"]["logprobs"] == [-0.5, -0.25]
    assert document["extra"]["scenario"]["answer"] == "In May"


def test_names_of_the_mailbox_are_replaced_though_no_conversation_tells_them(private: Path) -> None:
    """And a conversation with ``read_thread`` keeps its tools."""
    (mail := private.parent / "mail.eml").write_text(f"From: Zora Quill <zq7@x.org>\nTo: {ANN}\nSubject: a\n\nb\n")
    CliRunner().invoke(app, ["gen-db", "--source", str(mail), "--db", "data/mail.db"])
    [one, _] = conversations_in(private)
    one.final_answer = one.messages[1].content = "Quill says: in May"
    one.messages[2].tool_calls[0].name = "read_thread"
    write_trajectories(private, [one])
    line = Path(convert(private, "openai")["out"]).read_text()
    assert "says: in May" in line and "Quill" not in line
    assert [each["function"]["name"] for each in json.loads(line)["tools"]][2] == "read_thread"


@pytest.mark.parametrize("to", ["atif", "openai"])
def test_sft_reads_back_what_was_written(to: str, played: Played, private: Path) -> None:
    """The same conversations in the same words, on the same inboxes, chosen by the same rewards."""
    for file, least in ((played.file, 0.0), (private, 0.7)):
        told = convert(file, to, "--no-redact", "--out", f"{to}-{file.stem}")
        ours, _ = read_conversations([file], min_reward=least)
        back, _ = read_conversations([Path(told["out"])], min_reward=least)
        assert len(back) == len(ours) and [(each.inbox, each.split) for each in back] == [
            (each.inbox, each.split) for each in ours
        ]
        for one, other in zip(ours, back, strict=True):
            pairs = zip(one.messages, other.messages, strict=True)
            assert all(
                (a.role, as_spoken(a).content, [(c.name, c.arguments) for c in a.tool_calls])
                == (b.role, as_spoken(b).content, [(c.name, c.arguments) for c in b.tool_calls])
                for a, b in pairs
            )
    assert not convert(played.file, to, "--out", "demo")["redacted"]


def test_files_of_other_programs_are_read_or_refused_by_line(tmp_path: Path) -> None:
    call = {"function": {"name": "search_emails", "arguments": {"keywords": ["a"]}}}
    asked = [{"type": "text", "text": "When?"}, {"type": "image_url", "image_url": {"url": "http://x"}}]
    chat = [{"role": "developer", "content": "Search."}, {"role": "user", "content": asked}]
    chat += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "[]"}]
    chat += [{"role": "assistant", "content": "No.", "reasoning_content": "Hm."}]
    lines = [{"messages": chat}, {"messages": [*chat, {"role": "user", "content": "And?"}]}, {"messages": chat[:2]}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [{"step_id": 1, "source": "user", "message": "Old?", "is_copied_context": True}]
    steps += [{"step_id": 2, "source": "user", "message": "Why?"}, {"step_id": 3, "source": "agent", "message": "So."}]
    document = {"schema_version": "ATIF-v1.6", "agent": {"name": "a", "version": "1"}, "steps": steps}
    (tmp_path / "run.json").write_text(json.dumps(document, indent=2))

    found = [*conversations_in(tmp_path)]
    assert [each.scenario.question for each in found] == ["When?", "When?", "When?", "Why?"]
    assert [message.role for message in found[0].messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[0].messages[2].tool_calls == [ToolCall("search_emails", {"keywords": ["a"]})]
    assert found[0].messages[4].content == "<think>\nHm.\n</think>\n\nNo."
    chosen, [told] = read_conversations([tmp_path])
    # One for each question; what follows the last reply is not imitated; the third has no reply.
    assert [len(each.messages) for each in chosen] == [5, 2] and "4 read" in told
    assert len({each.inbox for each in chosen}) == 2

    for wrong in (
        {"messages": [{"role": "robot", "content": ""}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}]},
        {"schema_version": "ATIF-v1.8", "steps": [{"source": "agent"}]},
        {"schema_version": "9", "steps": []},
    ):
        (tmp_path / "bad.jsonl").write_text("\n" + json.dumps(wrong) + "\n")
        with pytest.raises(EmailRLError, match=r"bad\.jsonl, line 2"):
            [*conversations_in(tmp_path / "bad.jsonl")]


READ_EVAL = """
import json, sys
from inspect_ai.log import read_eval_log, read_eval_log_sample, read_eval_log_sample_summaries
log = read_eval_log(sys.argv[1])
header = read_eval_log(sys.argv[1], header_only=True)
shown = read_eval_log_sample_summaries(sys.argv[1])
one = read_eval_log_sample(sys.argv[1], id=sys.argv[2], epoch=1)
message = next(message for message in one.messages if message.role == "assistant")
print(json.dumps({
    "rewards": {each.id: each.scores["reward"].value["reward"] for each in log.samples},
    "shown": [each.scores["reward"].value["accuracy"] for each in shown],
    "means": {each.name: each.metrics["mean"].value for each in header.results.scores},
    "call": [message.tool_calls[0].function, message.tool_calls[0].arguments],
    "roles": [message.role for message in one.messages],
}))
"""


@pytest.mark.clients
def test_inspects_own_reader_opens_the_log(played: Played, private: Path) -> None:
    python = foreign("inspect", "inspect-ai==0.3.285")
    told = convert(played.file, "inspect")
    first = played.trajectories[0]
    done = subprocess.run([python, "-c", READ_EVAL, told["out"], first.scenario.id], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert read["rewards"] == {each.scenario.id: each.reward for each in played.trajectories}
    assert read["means"]["reward"] == pytest.approx(sum(played.rewards.values()) / 3, abs=1e-12)
    assert read["means"]["accuracy"] == pytest.approx(sum(read["shown"]) / 3, abs=1e-12)
    assert read["call"] == [first.turns[0].tool_name, first.turns[0].tool_args]
    assert read["roles"] == [message.role for message in first.messages]
    thinking = convert(private, "inspect")["out"]  # two epochs of a question, with thoughts
    dumped = subprocess.run([python, "-m", "inspect_ai", "log", "dump", thinking], capture_output=True, text=True)
    assert dumped.returncode == 0, dumped.stderr[-2000:]
    assert [each["epoch"] for each in json.loads(dumped.stdout)["samples"]] == [1, 2]


@pytest.mark.clients
def test_atifs_own_models_take_the_documents(played: Played, private: Path) -> None:
    python = foreign("atif", "atif==1.8.0")
    script = "import sys; from atif import Trajectory\nfor file in sys.argv[1:]:\n"
    script += "    Trajectory.model_validate_json(open(file).read())\nprint(len(sys.argv) - 1)"
    files = [*Path(convert(played.file, "atif")["out"]).iterdir(), *Path(convert(private, "atif")["out"]).iterdir()]
    files += Path(convert(private, "atif", "--no-redact", "--out", "whole")["out"]).iterdir()
    done = subprocess.run([python, "-c", script, *files], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr[-2000:]
