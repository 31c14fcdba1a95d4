"""Experts on one's own questions: they find the mail by the question's words, read it and give the answer to teach."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny import make_database, make_model, make_questions

from emailrl.engines.renderer import parse_tool_calls
from emailrl.errors import UsageError
from emailrl.policy.load import load_policy
from emailrl.settings import Settings, load_settings
from emailrl.sft.own_expert import find_keywords, own_conversations, own_examples
from emailrl.sft.warm_start import warm_start
from emailrl.store import open_mailbox
from emailrl.trajectory import Message


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Two training questions about the lease, one of which no word of the mail helps with."""
    make_model(tmp_path / "model")
    make_database(tmp_path / "mail.db")
    rows = [
        {"id": "1", "question": "When does the lease end?", "output": "It ends on 31 May 2002."},
        {"id": "2", "question": "Which day is it over?", "output": "?"},
    ]
    whole = make_questions(1)[0]
    shared = {"message_ids": whole.message_ids, "inbox_address": whole.inbox_address, "query_date": whole.query_date}
    lines = [row | shared | {"answer": "31 May 2002", "how_realistic": 1, "split": "train"} for row in rows]
    val = lines[0] | {"id": "3", "split": "val", "inbox_address": "zoe@example.com"}
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, [*lines, val])))
    given = {"db": tmp_path / "mail.db", "questions": tmp_path / "q.jsonl", "model_name": str(tmp_path / "model")}
    return load_settings(given | {"output_field": "output", "lora_rank": 4}, environ={}, cwd=tmp_path)


def calls(messages: list[Message]) -> list[tuple[str, dict[str, Any]]]:
    said = [parse_tool_calls(message.content) for message in messages if message.role == "assistant"]
    return [(call.name, call.arguments) for [call] in said]


def test_it_searches_reads_and_answers_with_the_text_to_teach(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        [messages] = own_conversations(settings)
    assert calls(messages) == [
        ("search_emails", {"keywords": ["lease"]}),
        ("read_email", {"message_id": "<m0@x>"}),
        ("return_final_answer", {"answer": "It ends on 31 May 2002.", "sources": ["<m0@x>"]}),
    ]
    assert "The lease ends on 31 May 2002." in messages[5].content  # the mail itself, from the real mailbox
    assert "experts play 1 of 2 questions" in caplog.text


def test_without_an_output_field_the_reference_answer_is_taught(settings: Settings) -> None:
    data = settings.data.model_copy(update={"output_field": None})
    [messages] = own_conversations(settings.model_copy(update={"data": data}))
    assert calls(messages)[-1][1]["answer"] == "31 May 2002"


def test_keywords_stand_in_the_question_and_find_the_mail(settings: Settings) -> None:
    [question] = make_questions(1)
    with open_mailbox(settings.store.db, question.inbox_address, until="2001-06-01") as mailbox:
        assert find_keywords(question, mailbox) == ["lease"]
        question.question = "How many dollars is the deposit?"  # words of another mail
        assert find_keywords(question, mailbox) is None
        question.message_ids = ["<m1@x>"]
        assert find_keywords(question, mailbox) == ["deposit", "dollars"]
        question.message_ids = ["<gone@x>"]
        assert find_keywords(question, mailbox) is None


def test_what_cannot_be_taught(settings: Settings, tmp_path: Path) -> None:
    short = settings.model_copy(update={"agent": settings.agent.model_copy(update={"max_turns": 2})})
    with pytest.raises(UsageError, match="can be taught"):
        own_conversations(short)
    with pytest.raises(UsageError, match="made from nothing learns from demo mail"):
        warm_start(settings, tmp_path / "out", from_scratch=True, own_questions=True, steps=1, batch_size=1)


def test_examples_come_round_and_only_the_experts_words_are_marked(settings: Settings, tmp_path: Path) -> None:
    policy = load_policy(settings)
    first, second = itertools.islice(own_examples(settings, tmp_path / "model"), 2)
    assert first[0].tolist() == second[0].tolist()
    said = policy.tokenizer.decode([i for i, m in zip(*first, strict=True) if m])
    assert "It ends on 31 May 2002." in said and "You are an email search agent" not in said


def test_an_adapter_learns_to_say_it(settings: Settings, tmp_path: Path) -> None:
    losses: list[float] = []
    warm_start(
        settings,
        tmp_path / "out",
        from_scratch=False,
        own_questions=True,
        steps=12,
        batch_size=1,
        learning_rate=2e-2,
        report=lambda step, loss: losses.append(loss),
    )
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.1
