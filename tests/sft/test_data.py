"""Which conversations train and which validate, the best of recorded ones, and the order of the batches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sft.talk import settings_for, trajectory, write
from tiny import make_database, make_questions

from emailrl.agent.tools import tool_schemas
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail.build import build_database
from emailrl.mail.demo import demo_emails
from emailrl.model.policy import load_policy
from emailrl.questions.load import write_scenarios
from emailrl.questions.template import generate
from emailrl.records.trajectory import Message, StopReason, ToolCall
from emailrl.settings import Settings, load_settings
from emailrl.sft.data import batches_of, examples, gather, read_conversations, source_of, split
from emailrl.sft.examples import Conversation, Example, as_spoken


def talk(name: str, inbox: str, of: str | None = None) -> Conversation:
    return Conversation(name, inbox, of, [])


def test_inboxes_are_held_out_whole() -> None:
    all_of = [talk("1", "a"), talk("2", "b", "val"), talk("3", "b", "train"), talk("4", "c", "train")]
    train, val = split(all_of, 10, seed=1)
    assert [c.id for c in train] == ["1", "4"] and sorted(c.id for c in val) == ["2", "3"]
    train, val = split(all_of, 10, seed=1, shared=True)
    assert [c.id for c in train] == ["1", "3", "4"] and [c.id for c in val] == ["2"]
    all_of = [talk(str(n), f"i{n % 20}") for n in range(100)]  # without a split a tenth is
    train, val = split(all_of, 1000, seed=1)
    assert len(val) == 10 and len(train) == 90
    assert not {c.inbox for c in train} & {c.inbox for c in val}
    assert split(all_of, 3, seed=1)[1] == val[:3]
    assert split(all_of, 1000, seed=2)[1] != val
    train, val = split([talk("1", "a"), talk("2", "a")], 10, seed=1)
    assert len(train) == 2 and val == []  # one inbox alone validates nothing


def test_batches_go_round_and_are_the_same_from_any_start() -> None:
    nothing = np.array([])
    groups = [[Example(str(n), "", nothing, nothing)] for n in range(5)]

    def names(start: int, count: int) -> list[str]:
        batches = itertools.islice(batches_of(itertools.repeat(groups), 5, 2, 1, start), count)
        return ["".join(e.conversation for e in batch) for batch in batches]

    whole = names(0, 10)
    said = "".join(whole)
    assert [sorted(said[i : i + 5]) for i in range(0, 20, 5)] == [list("01234")] * 4
    assert len({said[i : i + 5] for i in range(0, 20, 5)}) > 1
    assert all(names(start, 10 - start) == whole[start:] for start in range(10))


def test_where_experts_play(tmp_path: Path) -> None:
    def source(**given: object) -> str:
        return source_of(load_settings(given, environ={}, cwd=tmp_path))

    both = {"trajectories": ["t.jsonl"], "questions": "q.jsonl"}
    assert source() == source(questions="q.jsonl", from_scratch=True) == "demo"
    assert source(questions="q.jsonl") == source(**both) == "questions"
    assert source(trajectories=["t.jsonl"]) == source(**both, experts="none") == "none"


@pytest.fixture
def tiny(tmp_path: Path, model: Path) -> tuple[Settings, ChatRenderer]:
    settings = settings_for(tmp_path, model)
    return settings, ChatRenderer(load_policy(settings).tokenizer)


def test_what_is_longer_than_the_window_is_left_out(tiny: tuple[Settings, ChatRenderer]) -> None:
    settings, renderer = tiny
    train, val, _ = gather(settings)
    assert len(train) == 20 and len(val) == 4
    long = trajectory("long", inbox="i0@x", says="word " * 300)
    train.append(Conversation("long", "i0@x", None, long.messages))
    data = examples(train, val, settings, renderer, longest=400, workers=1)
    assert any("1 conversation dropped: longer than the context window of 400 tokens" in note for note in data.notes)
    batch = next(data.batches(0))
    assert len(batch) == 4 and all(not example.spoken[0] and example.spoken.any() for example in batch)
    with pytest.raises(UsageError, match="No conversation is left"):
        examples(train[-1:], [], settings, renderer, longest=400, workers=1)


def test_questions_that_the_experts_fail_are_counted(tmp_path: Path) -> None:
    lease, other, val = make_questions(3)
    questions = [
        replace(lease, split="train"),
        replace(other, split="train", message_ids=["<not-in-the-mailbox@x>"]),
        replace(val, split="val", message_ids=["<not-in-the-mailbox@x>"], inbox_address="bob@example.com"),
    ]
    write_scenarios(tmp_path / "q.jsonl", questions)
    given = {"db": make_database(tmp_path / "mail.db"), "questions": tmp_path / "q.jsonl"}
    train, held_out, notes = gather(load_settings(given, environ={}, cwd=tmp_path))
    assert [each.id for each in train] == ["train-q0"] and not held_out
    assert "experts answered 1 of 3 questions correctly; the others are left out" in notes[0]


def test_validation_on_the_trained_inbox_is_not_told_as_another(tiny: tuple[Settings, ChatRenderer]) -> None:
    settings, renderer = tiny
    said = [Conversation(str(n), f"i{n % 2}@x", None, trajectory(str(n), inbox="i0@x").messages) for n in range(4)]

    def described(train: list[Conversation], val: list[Conversation]) -> str:
        return examples(train, val, settings, renderer, longest=400, workers=1).val_described

    even, odd = said[::2], said[1::2]
    assert described(even, odd) == "2 conversations from 1 inbox not in the training data"
    assert described(even[:1], even[1:] + odd) == "3 conversations from 2 inboxes, 1 of them also in the training data"
    assert described(even, []) == "none"


def test_experts_that_join_trajectories_are_named(tmp_path: Path) -> None:
    lease, val = make_questions(2)
    write_scenarios(tmp_path / "q.jsonl", [replace(lease, split="train"), replace(val, split="val")])
    given = {"db": make_database(tmp_path / "mail.db"), "questions": tmp_path / "q.jsonl", "allow_shared_inbox": True}
    marked = [replace(lease, split="train", shares_inbox=True), replace(val, split="val", shares_inbox=True)]
    write_scenarios(tmp_path / "marked.jsonl", marked)
    unflagged = {"db": given["db"], "questions": tmp_path / "marked.jsonl"}
    assert [len(side) for side in gather(load_settings(unflagged, environ={}, cwd=tmp_path))[:2]] == [1, 1]
    joined = "scripted experts answer the training questions as well (--experts none: trajectories only)"
    assert joined not in gather(load_settings(given, environ={}, cwd=tmp_path))[2]
    one = write(tmp_path / "one.jsonl", [trajectory("a", inbox="i@x")])
    assert joined in gather(load_settings(given | {"trajectories": [one]}, environ={}, cwd=tmp_path))[2]
    notes = gather(load_settings({"trajectories": [one]}, environ={}, cwd=tmp_path))[2]
    assert any("there is no validation loss" in note for note in notes)
    with pytest.raises(UsageError, match="select trajectories"):
        gather(load_settings({"best_of": 2}, environ={}, cwd=tmp_path))


def test_a_pass_plays_the_same_questions_anew_and_a_resumed_run_sees_the_same(model: Path, tmp_path: Path) -> None:
    build_database(demo_emails(42), tmp_path / "mail.db")
    write_scenarios(tmp_path / "q.jsonl", generate(tmp_path / "mail.db", limit=60))
    given = {
        "model_name": str(model), "db": tmp_path / "mail.db", "max_source_mails": 9,
        "questions": tmp_path / "q.jsonl", "train_dataset_size": 12, "sft_batch_size": 4, "sft_steps": 8,
    }  # fmt: skip
    settings = load_settings(given, environ={}, cwd=tmp_path)
    renderer = ChatRenderer(load_policy(settings).tokenizer, tool_schemas())
    train, val, notes = gather(settings)
    count = len(train)
    assert 8 <= count <= 12 and notes[0].startswith(f"experts answered {count + len(val)} of ")
    data = examples(train, val, settings, renderer, longest=100_000, workers=1)

    def played(start: int) -> list[Example]:
        return [one for batch in itertools.islice(data.batches(start), 8 - start) for one in batch]

    whole = played(0)
    passes = [{one.conversation: one.token_ids.tobytes() for one in whole[at : at + count]} for at in (0, count)]
    assert passes[0].keys() == passes[1].keys() == {one.id for one in train}
    assert sum(passes[0][name] != passes[1][name] for name in passes[0]) > count // 2
    again = [(one.conversation, one.token_ids.tobytes()) for one in played(5)]
    assert again == [(one.conversation, one.token_ids.tobytes()) for one in whole[5 * 4 :]]


def test_the_best_of_each_question_is_taken_and_of_equals_the_first(tmp_path: Path) -> None:
    rewards = [("a", 0.5), ("b", -1.0), ("a", 2.0), ("a", 2.0), ("b", -0.5)]
    file = write(tmp_path / "t.jsonl", [trajectory(q, inbox="i@x", reward=r) for q, r in rewards])

    def chosen(*files: Path, best_of: int | None = None, min_reward: float | None = None) -> list[str]:
        return [one.id for one in read_conversations(files, best_of=best_of, min_reward=min_reward)[0]]

    assert chosen(file) == chosen(file, best_of=2) == ["a-i@x-2.0", "b-i@x--0.5"]
    assert chosen(file, best_of=1) == ["a-i@x-0.5", "b-i@x--1.0"]
    assert chosen(file, min_reward=0.5) == ["a-i@x-2.0"]
    assert chosen(file, best_of=1, min_reward=0.5) == ["a-i@x-0.5"]
    with pytest.raises(UsageError, match=r"No trajectory is left .*5 below --min-reward"):
        chosen(file, min_reward=3.0)
    elsewhere = write(tmp_path / "j.jsonl", [trajectory("a", inbox="j@x")])  # the same id, but another question
    assert chosen(file, elsewhere) == ["a-i@x-2.0", "b-i@x--0.5", "a-j@x-1.0"]


def test_what_is_no_whole_conversation_is_never_taken_and_counted(tmp_path: Path) -> None:
    cut = trajectory("a", inbox="i@x", reward=9.0, stop_reason=StopReason.TRUNCATED)
    raised = trajectory("a", inbox="i@x", reward=8.0, exception="OSError: gone")
    broken = []
    short = [Message("user", "When?")], [Message("assistant", "May.")]
    for messages in ([], *short, [Message("user", "?"), Message("assistant", "\ud800")]):
        broken.append(trajectory("a", inbox="i@x", reward=9.0))
        broken[-1].messages = messages
    good = trajectory("a", inbox="i@x", reward=0.1)
    good.messages.append(Message("tool", "an error"))
    [conversation], notes = read_conversations([write(tmp_path / "t.jsonl", [cut, raised, *broken, good])])
    assert conversation.id == "a-i@x-0.1"
    assert conversation.messages[-1].role == "assistant" and len(conversation.messages) == 5  # no later message
    assert notes == ["1 conversation from trajectories (7 read, 2 cut off or raised, 4 no conversation)"]
    _, notes = read_conversations([write(tmp_path / "test.jsonl", [trajectory("a", inbox="i@x", split="test")])])
    assert "no longer held out" in notes[1]
    with pytest.raises(UsageError, match=r"No trajectory is left to train on \(none read\)"):
        read_conversations([write(tmp_path / "empty.jsonl", [])])
    with pytest.raises(UsageError, match="No such trajectory file"):
        read_conversations([tmp_path / "gone.jsonl"])
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(EmailRLError, match=r"bad\.jsonl, line 1: not a trajectory"):
        read_conversations([tmp_path / "bad.jsonl"])


def test_a_chat_servers_calls_are_written_out_as_a_policy_says_them() -> None:
    call = ToolCall("read_email", {"message_id": "<é@x>"}, id="call_1")
    said = as_spoken(Message("assistant", "", [call]))
    assert said.content == ('<tool_call>\n{"name": "read_email", "arguments": {"message_id": "<é@x>"}}\n</tool_call>')
    assert as_spoken(Message("assistant", "I look.", [call])).content == f"I look.\n{said.content}"
    assert as_spoken(said) is said
