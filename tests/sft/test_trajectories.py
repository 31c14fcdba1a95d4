"""Which recorded trajectories are imitated: one of each question, by its reward."""

from __future__ import annotations

from pathlib import Path

import pytest
from sft.talk import trajectory, write

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.records.trajectory import Message, StopReason, ToolCall
from emailrl.sft.data import read_conversations


def chosen(file: Path, **choice: float) -> list[str]:
    return [conversation.id for conversation in read_conversations([file], **choice)[0]]  # type: ignore[arg-type]


def test_the_best_of_each_question_is_taken_and_of_equals_the_first(tmp_path: Path) -> None:
    rewards = [("a", 0.5), ("b", -1.0), ("a", 2.0), ("a", 2.0), ("b", -0.5)]
    file = write(tmp_path / "t.jsonl", [trajectory(q, inbox="i@x", reward=r) for q, r in rewards])
    assert chosen(file) == ["a-i@x-2.0", "b-i@x--0.5"]
    assert chosen(file, best_of=1) == ["a-i@x-0.5", "b-i@x--1.0"]
    assert chosen(file, best_of=2) == ["a-i@x-2.0", "b-i@x--0.5"]
    assert chosen(file, min_reward=0.5) == ["a-i@x-2.0"]
    assert chosen(file, best_of=1, min_reward=0.5) == ["a-i@x-0.5"]
    with pytest.raises(UsageError, match=r"No trajectory is left .*5 below --min-reward"):
        read_conversations([file], min_reward=3.0)


def test_the_same_id_in_another_inbox_is_another_question(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{inbox}.jsonl", [trajectory("1", inbox=inbox)]) for inbox in ("i@x", "j@x")]
    conversations, _ = read_conversations(files)
    assert [conversation.inbox for conversation in conversations] == ["i@x", "j@x"]


def test_what_was_cut_off_or_raised_is_never_taken(tmp_path: Path) -> None:
    cut = trajectory("a", inbox="i@x", reward=9.0, stop_reason=StopReason.TRUNCATED)
    raised = trajectory("a", inbox="i@x", reward=8.0, exception="OSError: gone")
    file = write(tmp_path / "t.jsonl", [cut, raised, trajectory("a", inbox="i@x", reward=0.1)])
    assert chosen(file) == ["a-i@x-0.1"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [Message("user", "When?")],
        [Message("assistant", "May.")],
        [Message("user", "?"), Message("assistant", "\ud800")],
    ],
    ids=["nothing", "no reply", "no question", "no text"],
)
def test_what_is_no_conversation_is_left_out_and_counted(tmp_path: Path, messages: list[Message]) -> None:
    played = trajectory("a", inbox="i@x", reward=9.0)
    played.messages = messages
    file = write(tmp_path / "t.jsonl", [played, trajectory("a", inbox="i@x", reward=0.1)])
    [conversation], notes = read_conversations([file])
    assert conversation.id == "a-i@x-0.1"
    assert notes == ["1 conversation from trajectories (2 read, 1 no conversation)"]


def test_an_empty_file_says_that_nothing_was_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No trajectory is left to train on \(none read\)"):
        read_conversations([write(tmp_path / "t.jsonl", [])])


def test_what_follows_the_last_assistant_turn_is_left_out(tmp_path: Path) -> None:
    played = trajectory("a", inbox="i@x")
    played.messages.append(Message("tool", "an error"))
    [conversation], notes = read_conversations([write(tmp_path / "t.jsonl", [played])])
    assert conversation.messages[-1].role == "assistant" and len(conversation.messages) == 5
    assert notes == ["1 conversation from trajectories (1 read)"]


def test_answers_to_test_questions_are_told_of(tmp_path: Path) -> None:
    _, notes = read_conversations([write(tmp_path / "t.jsonl", [trajectory("a", inbox="i@x", split="test")])])
    assert "no longer held out" in notes[1]


def test_a_file_that_is_missing_or_no_trajectories_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such trajectory file"):
        read_conversations([tmp_path / "gone.jsonl"])
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(EmailRLError, match=r"bad\.jsonl, line 1: not a trajectory"):
        read_conversations([tmp_path / "bad.jsonl"])


def test_a_chat_servers_calls_are_written_out_as_a_policy_says_them() -> None:
    from emailrl.sft.examples import as_spoken

    call = ToolCall("read_email", {"message_id": "<é@x>"}, id="call_1")
    said = as_spoken(Message("assistant", "", [call]))
    assert said.content == ('<tool_call>\n{"name": "read_email", "arguments": {"message_id": "<é@x>"}}\n</tool_call>')
    assert as_spoken(Message("assistant", "I look.", [call])).content == f"I look.\n{said.content}"
    assert as_spoken(said) is said
