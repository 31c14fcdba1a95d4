"""Which conversations train and which validate, the best of recorded ones, and the order of the batches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sft.talk import settings_for, trajectory, write
from tiny import make_database, make_model, make_questions

from emailrl.agent.tools import tool_schemas
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail.build import build_database
from emailrl.mail.demo import demo_emails
from emailrl.model.load import load_policy
from emailrl.questions.load import write_scenarios
from emailrl.questions.template import generate
from emailrl.records.trajectory import Message, StopReason, ToolCall
from emailrl.settings import load_settings
from emailrl.sft.data import Conversations, batches_of, examples, gather, read_conversations, source_of, split
from emailrl.sft.examples import Conversation, Example


def talk(name: str, inbox: str, of: str | None = None) -> Conversation:
    return Conversation(name, inbox, of, [])


def test_inboxes_of_the_split_val_are_held_out_whole() -> None:
    all_of = [talk("1", "a"), talk("2", "b", "val"), talk("3", "b", "train"), talk("4", "c", "train")]
    train, val = split(all_of, 10, seed=1)
    assert [c.id for c in train] == ["1", "4"] and sorted(c.id for c in val) == ["2", "3"]
    train, val = split(all_of, 10, seed=1, shared=True)
    assert [c.id for c in train] == ["1", "3", "4"] and [c.id for c in val] == ["2"]


def test_without_a_split_a_tenth_is_held_out_by_inbox() -> None:
    all_of = [talk(str(n), f"i{n % 20}") for n in range(100)]
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
    asked: list[int] = []

    def pass_of(number: int) -> list[list[Example]]:
        asked.append(number)
        return groups

    def names(start: int, count: int) -> list[str]:
        return [
            "".join(e.conversation for e in batch)
            for batch in itertools.islice(batches_of(pass_of, 5, 2, 1, start), count)
        ]

    whole = names(0, 10)
    said = "".join(whole)
    assert [sorted(said[i : i + 5]) for i in range(0, 20, 5)] == [list("01234")] * 4
    assert len({said[i : i + 5] for i in range(0, 20, 5)}) > 1
    assert asked == [0, 1, 2, 3]
    assert all(names(start, 10 - start) == whole[start:] for start in range(10))


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({}, "demo"),
        ({"questions": "q.jsonl"}, "questions"),
        ({"trajectories": ["t.jsonl"]}, "none"),
        ({"trajectories": ["t.jsonl"], "questions": "q.jsonl"}, "questions"),
        ({"trajectories": ["t.jsonl"], "questions": "q.jsonl", "experts": "none"}, "none"),
        ({"questions": "q.jsonl", "from_scratch": True}, "demo"),
    ],
)
def test_where_experts_play(given: dict[str, object], source: str, tmp_path: Path) -> None:
    assert source_of(load_settings(given, environ={}, cwd=tmp_path)) == source


def test_what_is_longer_than_the_window_is_left_out(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    settings = settings_for(tmp_path, model)
    renderer = ChatRenderer(load_policy(settings).tokenizer)
    found = gather(settings)
    assert len(found.train) == 20 and len(found.val) == 4
    long = trajectory("long", inbox="i0@x", says="word " * 300)
    found.train.append(Conversation("long", "i0@x", None, long.messages))
    data = examples(found, settings, renderer, longest=400, workers=1)
    assert any("1 conversation dropped: longer than the context window of 400 tokens" in note for note in data.notes)
    batch = next(data.batches(0))
    assert len(batch) == 4 and all(not example.spoken[0] and example.spoken.any() for example in batch)
    with pytest.raises(UsageError, match="No conversation is left"):
        examples(Conversations(found.train[-1:], [], []), settings, renderer, longest=400, workers=1)


def test_questions_that_the_experts_fail_are_counted(tmp_path: Path) -> None:
    lease, other, val = make_questions(3)
    questions = [
        replace(lease, split="train"),
        replace(other, split="train", message_ids=["<not-in-the-mailbox@x>"]),
        replace(val, split="val", message_ids=["<not-in-the-mailbox@x>"], inbox_address="bob@example.com"),
    ]
    write_scenarios(tmp_path / "q.jsonl", questions)
    given = {"db": make_database(tmp_path / "mail.db"), "questions": tmp_path / "q.jsonl"}
    found = gather(load_settings(given, environ={}, cwd=tmp_path))
    assert [each.id for each in found.train] == ["train-q0"] and not found.val
    assert found.notes[0] == (
        "experts answered 1 of 3 questions correctly; the others are left out (raising MAX_TURNS from 10 may help)"
    )


def test_choosing_among_no_trajectories_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="select trajectories"):
        gather(load_settings({"best_of": 2}, environ={}, cwd=tmp_path))
    one = write(tmp_path / "one.jsonl", [trajectory("a", inbox="i@x"), trajectory("b", inbox="i@x")])
    found = gather(load_settings({"trajectories": [one]}, environ={}, cwd=tmp_path))
    assert any("there is no validation loss" in note for note in found.notes)


def test_validation_on_the_trained_inbox_is_not_told_as_another(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, make_model(tmp_path / "model"))
    renderer = ChatRenderer(load_policy(settings).tokenizer)
    said = [Conversation(str(n), f"i{n % 2}@x", None, trajectory(str(n), inbox="i0@x").messages) for n in range(4)]

    def described(train: list[Conversation], val: list[Conversation]) -> str:
        return examples(Conversations(train, val, []), settings, renderer, longest=400, workers=1).val_described

    even, odd = said[::2], said[1::2]
    assert described(even, odd) == "2 conversations from 1 inbox not in the training data"
    assert described(even[:1], even[1:]) == "1 conversation from 1 inbox, which is also in the training data"
    assert described(even[:1], even[1:] + odd) == (
        "3 conversations from 2 inboxes, 1 of them also in the training data"
    )
    assert described(said[:2], said[2:]) == "2 conversations from 2 inboxes, all of them also in the training data"
    assert described(even, []) == "none"
    data = examples(Conversations(even, [], []), settings, renderer, longest=400, workers=1)
    assert data.described.startswith("2 conversations from 1 inbox, ")


def test_experts_that_join_trajectories_are_named(tmp_path: Path) -> None:
    lease, val = make_questions(2)
    write_scenarios(tmp_path / "q.jsonl", [replace(lease, split="train"), replace(val, split="val")])
    given = {"db": make_database(tmp_path / "mail.db"), "questions": tmp_path / "q.jsonl", "allow_shared_inbox": True}
    marked = [replace(lease, split="train", shares_inbox=True), replace(val, split="val", shares_inbox=True)]
    write_scenarios(tmp_path / "marked.jsonl", marked)
    unflagged = {"db": given["db"], "questions": tmp_path / "marked.jsonl"}
    played = gather(load_settings(unflagged, environ={}, cwd=tmp_path))
    assert (len(played.train), len(played.val)) == (1, 1)
    joined = "scripted experts answer the training questions as well (--experts none: trajectories only)"
    assert joined not in gather(load_settings(given, environ={}, cwd=tmp_path)).notes
    one = write(tmp_path / "one.jsonl", [trajectory("a", inbox="i@x")])
    assert joined in gather(load_settings(given | {"trajectories": [one]}, environ={}, cwd=tmp_path)).notes


def test_a_pass_plays_the_same_questions_anew_and_a_resumed_run_sees_the_same(tmp_path: Path) -> None:
    build_database(demo_emails(42), tmp_path / "mail.db")
    write_scenarios(tmp_path / "q.jsonl", generate(tmp_path / "mail.db", limit=60))
    given = {
        "model_name": str(make_model(tmp_path / "model")), "db": tmp_path / "mail.db", "max_source_mails": 9,
        "questions": tmp_path / "q.jsonl", "train_dataset_size": 12, "sft_batch_size": 4, "sft_steps": 8,
    }  # fmt: skip
    settings = load_settings(given, environ={}, cwd=tmp_path)
    renderer = ChatRenderer(load_policy(settings).tokenizer, tool_schemas())
    found = gather(settings)
    count = len(found.train)
    assert 8 <= count <= 12
    assert found.notes[0].startswith(f"experts answered {count + len(found.val)} of ")
    data = examples(found, settings, renderer, longest=100_000, workers=None)

    def played(start: int) -> list[Example]:
        return [one for batch in itertools.islice(data.batches(start), 8 - start) for one in batch]

    whole = played(0)
    passes = [{one.conversation: one.token_ids.tobytes() for one in whole[at : at + count]} for at in (0, count)]
    assert passes[0].keys() == passes[1].keys() == {one.id for one in found.train}
    assert sum(passes[0][name] != passes[1][name] for name in passes[0]) > count // 2
    again = [(one.conversation, one.token_ids.tobytes()) for one in played(5)]
    assert again == [(one.conversation, one.token_ids.tobytes()) for one in whole[5 * 4 :]]


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


def test_what_is_no_whole_conversation_is_never_taken_and_counted(tmp_path: Path) -> None:
    cut = trajectory("a", inbox="i@x", reward=9.0, stop_reason=StopReason.TRUNCATED)
    raised = trajectory("a", inbox="i@x", reward=8.0, exception="OSError: gone")
    broken = []
    for messages in (
        [],
        [Message("user", "When?")],
        [Message("assistant", "May.")],
        [Message("user", "?"), Message("assistant", "\ud800")],
    ):
        broken.append(trajectory("a", inbox="i@x", reward=9.0))
        broken[-1].messages = messages
    good = trajectory("a", inbox="i@x", reward=0.1)
    good.messages.append(Message("tool", "an error"))
    [conversation], notes = read_conversations([write(tmp_path / "t.jsonl", [cut, raised, *broken, good])])
    assert conversation.id == "a-i@x-0.1"
    assert conversation.messages[-1].role == "assistant" and len(conversation.messages) == 5  # no later message
    assert notes == ["1 conversation from trajectories (7 read, 2 cut off or raised, 4 no conversation)"]
    with pytest.raises(UsageError, match=r"No trajectory is left to train on \(none read\)"):
        read_conversations([write(tmp_path / "empty.jsonl", [])])
    _, notes = read_conversations([write(tmp_path / "test.jsonl", [trajectory("a", inbox="i@x", split="test")])])
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
