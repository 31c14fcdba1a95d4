"""A tool call that ends with the sequence, its ``</tool_call>`` never sampled, is played; what is trained is what was
sampled."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from emailrl.agent.mail_env import MailEnvironment
from emailrl.agent.play import audit
from emailrl.agent.runner import run
from emailrl.agent.tools import tool_schemas
from emailrl.engines.base import SamplingParams
from emailrl.engines.renderer import ChatRenderer, stop_ids
from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.sources import RawEmail
from emailrl.records.trajectory import Scenario, StopReason, TrajectoryGroup
from emailrl.training.batch import make_samples


@pytest.fixture
def qwen(shared_data: Path) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer"), tool_schemas())


@pytest.fixture
def environment(tmp_path: Path) -> MailEnvironment:
    day, body = datetime(2029, 5, 1, tzinfo=UTC), "It is due on May 20."
    mail = RawEmail("<1@x>", "Pump order", "ann@x.org", ["me@x.org"], [], [], day, body)
    db = build_database([mail], tmp_path / "m.db").db
    scenario = Scenario("1", "When is the pump order due?", "May 20", ["<1@x>"], "me@x.org", "2030-01-01")
    return MailEnvironment(scenario, open_mailbox(db, "me@x.org"), max_turns=5)


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("search_emails", {"keywords": ["pump"]}),
    ("read_email", {"message_id": "<1@x>"}),
    ("return_final_answer", {"answer": "May 20", "sources": ["<1@x>"]}),
]


@pytest.mark.parametrize(("end", "num_samples"), [("<|im_end|>", 1), ("<|endoftext|>", 3)])
def test_it_is_played_and_trained_as_it_was_sampled(
    qwen: ChatRenderer, environment: MailEnvironment, scripted: Callable[..., Any], end: str, num_samples: int
) -> None:
    said = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n" for name, given in CALLS]
    qwen.tokenizer.eos_token = end
    qwen.stop_ids = stop_ids(qwen.tokenizer)
    sampled = [[*qwen.tokenize(text), *qwen.tokenize(end)] for text in said]
    [trajectory] = run([environment], scripted(said, renderer=qwen), qwen, SamplingParams(100), seeds=[1])
    assert trajectory.exception is None
    assert (trajectory.stop_reason, trajectory.final_answer) == (StopReason.ANSWERED, "May 20")
    assert [turn.tool_name for turn in trajectory.turns] == [name for name, _ in CALLS]
    assert [turn.completion_ids for turn in trajectory.turns] == sampled
    # A base model's own end of text is not the template's: each new prompt then begins a sample.
    assert len(trajectory.samples) == num_samples
    trained = [token for ids in sampled for token in ids]
    assert audit(trajectory) == len(trained)
    samples, left_out = make_samples([TrajectoryGroup("g", environment.scenario, [trajectory])], "sampled")
    assert not any(left_out.values())
    learnt = [t for sample in samples for t, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert learnt == trained
