"""Experts on one's own questions: they find the mail by the question's words, read it and give the answer to teach."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny import make_database, make_model, make_questions

from emailrl.engines.renderer import parse_tool_calls
from emailrl.settings import Settings, load_settings
from emailrl.sft.own_expert import conversations, find_keywords
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
        [(_, messages)] = conversations(settings, split="train", seed=1)
    assert calls(messages) == [
        ("search_emails", {"keywords": ["lease"]}),
        ("read_email", {"message_id": "<m0@x>"}),
        ("return_final_answer", {"answer": "It ends on 31 May 2002.", "sources": ["<m0@x>"]}),
    ]
    assert "The lease ends on 31 May 2002." in messages[5].content  # the mail itself, from the real mailbox
    assert "experts play 1 of 2 questions" in caplog.text


def test_without_an_output_field_the_reference_answer_is_taught(settings: Settings) -> None:
    data = settings.data.model_copy(update={"output_field": None})
    [(_, messages)] = conversations(settings.model_copy(update={"data": data}), split="train", seed=1)
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


def test_what_cannot_be_taught(settings: Settings) -> None:
    short = settings.model_copy(update={"agent": settings.agent.model_copy(update={"max_turns": 2})})
    assert list(conversations(short, split="train", seed=1)) == []
