"""``emailrl publish-env``: the packages install and run in the programs that they are for, and reward as we do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines.chat_server import StubServer, said
from integrations.conftest import Played, foreign
from typer.testing import CliRunner

from emailrl.agent.play import Stage
from emailrl.agent.task import load_task
from emailrl.agent.tools import tools_of
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.cli.app import app
from emailrl.integrations.mail_search import Conversation, MailSearch, prompt
from emailrl.questions.load import questions_file
from emailrl.records.trajectory import Message, ToolCall
from emailrl.settings import load_settings

VERIFIERS = ("verifiers", "verifiers==0.4.0", "uv")
OPENENV = ("openenv", "openenv==0.10.0")


def publish(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["publish-env", *map(str, arguments)])


def install(python: Path, package: Path) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", package]
    subprocess.run(command, check=True, capture_output=True)


def test_a_package_holds_mailbox_questions_and_settings_and_its_card_says_whose(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "emailrl.toml").write_text('max_turns = 6\nquestion_template = "Q: {}"\nreward = "simple"\n')
    done = publish("verifiers", "--out", "demo", "--json")
    assert done.exit_code == 0, done.output
    card = (tmp_path / "demo/README.md").read_text()
    assert "people who do not exist" in card and "every answer is exact" in card and "300 test" in card
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["num_questions"], told["is_demo"]) == (950, True)
    kept = (tmp_path / "demo/mail_search/data/emailrl.toml").read_text()
    assert kept == 'reward = "simple"\nquestion_template = "Q: {}"\nmax_turns = 6\n'

    private = tmp_path / "private.db"
    shutil.copy(played.db, private)
    with sqlite3.connect(private) as connection:  # no longer a demo's message id
        connection.execute("UPDATE emails SET message_id = '<a@b>' WHERE id = (SELECT min(id) FROM emails)")
    connection.close()
    shutil.copy(questions_file(played.db), questions_file(private))
    done = publish("openenv", "--db", private, "--out", "own")
    assert done.exit_code == 0 and "publish it only where" in " ".join(done.output.split())
    assert "a real one" in (tmp_path / "own/README.md").read_text()

    assert isinstance(publish("openenv", "--out", "own").exception, UsageError)
    assert isinstance(publish("openenv", "--out", "new", "--db", "none.db").exception, EmailRLError)
    monkeypatch.setenv("EMAILRL_REWARD", "ruler")
    assert isinstance(publish("openenv", "--out", "new").exception, UsageError)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["demo", "own"]


def test_recorded_calls_are_played_and_rewarded_as_in_a_rollout(played: Played) -> None:
    package = played.db.parent / "package"
    assert publish("verifiers", "--out", package).exit_code == 0
    folder = package / "mail_search/data"
    for trajectory in played.trajectories:
        turns = [[call] for call in played.calls[trajectory.scenario.question]]
        with Conversation(trajectory.scenario, folder) as conversation:
            again = conversation.replay(turns).scored()
        assert again.reward == trajectory.reward == sum(again.reward_terms.values())
        assert again.reward_terms == trajectory.reward_terms and again.stop_reason == trajectory.stop_reason
        assert [turn.tool_result for turn in again.turns] == [turn.tool_result for turn in trajectory.turns]
    ends = {'{"keywords": ["a"]': "cant_parse_tool_call", "[]": "cant_parse_tool_call", "{}": "bad_tool_call_args"}
    for arguments, reason in ends.items():
        with Conversation(trajectory.scenario, folder) as conversation:
            conversation.play("search_emails", arguments)
            assert conversation.is_over and "over" in conversation.play("read_email", {"message_id": "<1>"})
            assert conversation.scored().rubric[reason] is True
    with Conversation(trajectory.scenario, folder) as conversation:
        assert conversation.replay([[("forward", "{}")]]).scored().stop_reason == "bad_tool_call_name"
    with Conversation(trajectory.scenario, folder) as conversation:
        assert not conversation.replay([[("read_email", '{"message_id": "<1>"}')]]).is_over
        assert conversation.replay([[]]).is_over


def test_conversations_are_shown_what_a_rollout_shows(played: Played, tmp_path: Path) -> None:
    shown = {"show_names": "true", "short_message_ids": "true", "count_matches": "true", "read_threads": "true"}
    (tmp_path / "emailrl.toml").write_text("".join(f"{name} = {value}\n" for name, value in shown.items()))
    shutil.copy(played.db, tmp_path / "mail.db")
    settings = load_settings({"db": played.db}, cwd=tmp_path, environ={})
    assert {*tools_of(settings.agent)} == {name for name in dir(MailSearch(tmp_path)) if name[0] != "_"} - {
        "reset",
        "get_reward",
    }
    calls = [("search_emails", {"keywords": [], "sent_after": "2001-01-01"}), ("read_thread", {"message_id": "m1"})]
    for trajectory in played.trajectories:
        stage = Stage(settings.agent, played.db, load_task("mail", settings).make, None)
        with ExitStack() as opened, Conversation(trajectory.scenario, tmp_path) as conversation:
            environment = stage.open_environment(trajectory.scenario, opened)
            assert conversation._mailbox.names is environment.mailbox.names is True
            first = [{"role": message.role, "content": message.content} for message in environment.start()]
            assert first == prompt(trajectory.scenario, tmp_path)
            for name, arguments in calls:
                result = environment.step(Message("assistant", "", [ToolCall(name, arguments)]))
                assert conversation.play(name, arguments) == result.messages[0].content


def streamed(reply: dict[str, Any]) -> bytes:
    """A chat completion as the one chunk of a stream."""
    [choice] = reply["choices"]
    calls = [{"index": number} | call for number, call in enumerate(choice["message"]["tool_calls"])]
    choice = {"index": 0, "delta": choice["message"] | {"tool_calls": calls}, "finish_reason": "stop"}
    chunk = reply | {"object": "chat.completion.chunk", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()


@pytest.fixture
def model(played: Played) -> Iterator[StubServer]:
    """A model that repeats what was played."""

    def reply(body: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        question = next(message["content"] for message in body["messages"] if message["role"] == "user")
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        stream = streamed(said(None, played.calls[question][turn]))
        return 200, stream, {"Content-Type": "text/event-stream"}

    server = StubServer(reply)
    yield server
    server.close()


@pytest.mark.clients
def test_verifiers_runs_the_package_and_rewards_alike(tmp_path: Path, played: Played, model: StubServer) -> None:
    python = foreign(*VERIFIERS)
    # The questions that were played alone, on their mailbox.
    shutil.copy(played.db, tmp_path / "mail.db")
    shutil.copy(played.db.parent / "chosen.jsonl", tmp_path / "mail_questions.jsonl")
    assert publish("verifiers", "--db", tmp_path / "mail.db", "--out", tmp_path / "package").exit_code == 0
    install(python, tmp_path / "package")
    [line] = [line for line in (tmp_path / "package/README.md").read_text().splitlines() if line.startswith("vf-eval")]
    line = line.replace("-n 5", "-n 3").replace("http://127.0.0.1:8000/v1", model.url)
    own = os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "MODEL_KEY": "-"}
    done = subprocess.run(line.split(), cwd=tmp_path, env=own, capture_output=True, text=True, timeout=500)
    [file] = tmp_path.glob("outputs/*/traces.jsonl")
    found = {}
    for record in map(json.loads, file.read_text().splitlines()):
        for trace in record.get("traces", [record]):
            terms = {name: given["score"] * given["weight"] for name, given in trace["rewards"].items()}
            found[trace["task"]["data"]["prompt"]] = (sum(terms.values()), trace["stop_condition"])
    assert found == {question: (reward, "over") for question, reward in played.rewards.items()}, done.stdout[-3000:]


OPENENV_CLIENT = """
import json, sys
from mail_search import MailSearchEnv
from openenv.core.env_server.mcp_types import CallToolAction

rewards = {}
with MailSearchEnv(base_url=sys.argv[1]).sync() as env:
    tools = [tool.name for tool in env.list_tools()]
    for question, turns in json.load(sys.stdin).items():
        begun = env.reset(split="test", question_id=turns.pop(0))
        assert begun.observation.metadata["messages"][1]["content"] == question and begun.reward is None
        for name, arguments in turns:
            result = env.step(CallToolAction(tool_name=name, arguments=json.loads(arguments)))
        assert result.done
        rewards[question] = result.reward
print(json.dumps([tools, rewards]))
"""


@pytest.mark.clients
def test_openenv_serves_the_package_and_rewards_alike(tmp_path: Path, played: Played) -> None:
    python = foreign(*OPENENV)
    assert publish("openenv", "--out", tmp_path / "package").exit_code == 0
    install(python, tmp_path / "package")
    openenv = python.with_name("openenv")
    valid = subprocess.run([openenv, "validate", tmp_path / "package", "--level", "static"], capture_output=True)
    assert valid.returncode == 0, valid.stdout
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    server = subprocess.Popen([python.with_name("server"), "--host", "127.0.0.1", "--port", port], cwd=tmp_path)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(60):
            running = subprocess.run([openenv, "validate", "--url", address], capture_output=True, text=True)
            if server.poll() is not None or running.returncode == 0:
                break
        assert running.returncode == 0, running.stdout
        asked = {
            each.scenario.question: [each.scenario.id, *played.calls[each.scenario.question]]
            for each in played.trajectories
        }
        command = [python, "-c", OPENENV_CLIENT, address]
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        tools, rewards = json.loads(done.stdout.splitlines()[-1])
        assert tools == ["search_emails", "read_email", "return_final_answer"] and rewards == played.rewards
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)
