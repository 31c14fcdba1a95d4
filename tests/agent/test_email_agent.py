"""EmailAgent: the training loop's own rollout behind one call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tiny import ANN, make_checkpoint, make_database, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from emailrl import EmailAgent, engines
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines.renderer import ChatRenderer
from emailrl.measure.export import export_checkpoint
from emailrl.model.policy import Policy
from emailrl.records.trajectory import StopReason


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("agent")
    return make_model(folder / "model"), make_database(folder / "mail.db")


Play = Callable[..., EmailAgent]


@pytest.fixture
def play(parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, scripted: Callable[..., Any]) -> Play:
    """Make an agent whose model says these texts."""
    model, db = parts

    def make(*texts: str, **config: Any) -> EmailAgent:
        def engine(_: object, policy: Policy) -> Any:
            return scripted(texts, renderer=ChatRenderer(policy.tokenizer))

        monkeypatch.setattr(engines, "build_engine", engine)
        return EmailAgent(str(model), config={"db": db, **config})

    return make


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_it_answers_with_sources(play: Play) -> None:
    agent = play(
        call("search_emails", '{"keywords": ["lease"]}'),
        call("read_email", '{"message_id": "<m0@x>"}'),
        call("return_final_answer", '{"answer": "31 May 2002", "sources": ["m0@x", "<m0@x>", "<none@x>", "\\ud800"]}'),
        max_turns=3,
    )
    answer = agent.answer("When does the lease end?", inbox="Ann@Example.com")
    assert (answer.answer, answer.stop_reason) == ("31 May 2002", StopReason.ANSWERED)
    assert answer.sources == ["<m0@x>", "<none@x>", "\ud800"]
    assert [email.message_id for email in answer.emails] == ["<m0@x>"]
    assert str(answer) == "31 May 2002"
    assert str(play(call("search_emails", '{"keywords": ["lease"]}'), max_turns=1).answer("?", ANN)).startswith(
        "no answer ("
    )
    results = [message.content for message in answer.trajectory.messages if message.role == "tool"]
    assert "<m0@x>" in results[0] and "The lease ends on 31 May 2002." in results[1]


def test_a_packaged_policy_is_asked_each_question_alone(play: Play, parts: tuple[Path, Path], tmp_path: Path) -> None:
    config = {"db": parts[1], "max_tokens": 4, "max_turns": 1}
    checkpoint = make_checkpoint(tmp_path / "run" / "best_model", Path("nano"))
    export_checkpoint(checkpoint, tmp_path / "merged", format="merged")
    agents = [EmailAgent(place, config=config) for place in ("nano", checkpoint.path, tmp_path / "merged")]
    agents.append(play("x", max_turns=1))
    told = [("When?", "In May.")]
    shown = [agent.answer("And then?", ANN, earlier=told).trajectory.messages[1:-1] for agent in agents]
    whole = ["When?", "In May.", "And then?"]
    assert [[message.content for message in each] for each in shown] == [whole[2:]] * 3 + [whole]


def test_model_objects_play_as_they_are_adapter_included(parts: tuple[Path, Path], tmp_path: Path) -> None:
    model, db = parts
    config = {"db": db, "max_tokens": 12, "max_turns": 1, "eval_temperature": 1.0}
    checkpoint = make_checkpoint(tmp_path / "run" / "best_model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)

    def sampled(policy: torch.nn.Module | str) -> list[int]:
        agent = EmailAgent(policy, tokenizer, config)
        return agent.answer("When does the lease end?", ANN).trajectory.turns[0].completion_ids

    base = AutoModelForCausalLM.from_pretrained(model)
    bare = sampled(base)
    assert bare == sampled(str(model))
    adapted = sampled(PeftModel.from_pretrained(base, str(checkpoint.path)))
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(checkpoint.path))
    assert adapted == sampled(merged.merge_and_unload()) != bare
    assert adapted == sampled(str(checkpoint.path))  # a folder with an adapter plays on the base it names


def test_what_it_needs_is_said(parts: tuple[Path, Path], tmp_path: Path) -> None:
    model, db = parts
    with pytest.raises(UsageError, match="tokenizer"):
        EmailAgent(AutoModelForCausalLM.from_pretrained(model))
    with pytest.raises(EmailRLError, match=r"none\.db"):
        EmailAgent(str(model), config={"db": tmp_path / "none.db"}).answer("When?", ANN)
    agent = EmailAgent(str(model), config={"db": db, "max_turns": 1})
    with pytest.raises(UsageError, match=r"No email is from or to nobody@elsewhere\.org") as raised:
        agent.answer("When?", "nobody@elsewhere.org")
    assert raised.value.hint.startswith("Its largest mailboxes: ") and ANN in raised.value.hint
    with pytest.raises(UsageError, match=r"is from or to an@example\.com\. Did you mean ann@example\.com\?"):
        agent.answer("When?", "an@example.com")


@pytest.mark.parametrize(("own", "seen"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_torch_finds_threads_told_to_wait_without_spinning(own: str | None, seen: str) -> None:
    program = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            sys.exit()
import emailrl
assert "torch" not in sys.modules
sys.meta_path.insert(0, Watch())
emailrl.EmailAgent("nano")
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": own} if own else {}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.stdout.strip() == seen, ended.stderr
