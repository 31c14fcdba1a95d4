"""Splits share no inbox, and a sample keeps the mix of its set."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from questions.questions import scenario

from emailrl.base.errors import UsageError
from emailrl.questions.splits import (
    SPLITS,
    assign_inboxes,
    assign_subjects,
    check_disjoint,
    cut_val,
    mixed_order,
    split_notes,
)
from emailrl.records.trajectory import Scenario


def questions(counts: dict[str, int], split: str | None = "train") -> list[Scenario]:
    inboxes = [inbox for inbox, count in counts.items() for _ in range(count)]
    return [scenario(number, inbox, split) for number, inbox in enumerate(inboxes)]


def test_inboxes_in_two_splits_are_an_error_that_names_the_first() -> None:
    mixed = [scenario(1, "a@x", "train"), scenario(2, "b@x", "test"), scenario(3, "b@x", "train")]
    assert check_disjoint(mixed[:2], "q.jsonl", allow_shared=False) is None
    mixed += [scenario(4, "a@x", "val")]
    with pytest.raises(UsageError, match="inboxes a@x and 1 more are in the splits train and val"):
        check_disjoint(mixed, "q.jsonl", allow_shared=False)
    assert "share inboxes (a@x and 1 more)" in str(check_disjoint(mixed, "q.jsonl", allow_shared=True))


def test_val_is_cut_by_whole_inboxes_and_leaves_one_to_train() -> None:
    train = questions({"a@x": 10, "b@x": 10, "c@x": 10, "d@x": 10})
    val, note = cut_val(train, 10, "q", allow_shared=False)
    inboxes = {s.inbox_address for s in train if s.id in val}
    assert note is None and len(inboxes) == 1 and len(val) == 10  # min(10, a fifth of 40) takes one inbox
    shuffled, _ = cut_val(train[::-1], 10, "q", allow_shared=False)
    assert shuffled == val

    val, _ = cut_val(questions({"a@x": 1, "b@x": 1}), 100, "q", allow_shared=False)
    assert len(val) == 1


def test_a_small_inbox_is_cut_before_one_that_holds_most_questions() -> None:
    for large in ("a@x", "b@x", "c@x"):
        counts = {"a@x": 5, "b@x": 5, "c@x": 5} | {large: 100}
        train = questions(counts)
        val, _ = cut_val(train, 100, "q", allow_shared=False)
        assert large not in {s.inbox_address for s in train if s.id in val}


def test_a_single_inbox_is_cut_by_question_only_when_allowed() -> None:
    train = questions({"a@x": 10})
    with pytest.raises(UsageError, match=r"only one inbox \(a@x\).*--allow-shared-inbox"):
        cut_val(train, 100, "q", allow_shared=False)
    val, note = cut_val(train, 100, "q", allow_shared=True)
    assert len(val) == 2 and note is not None and "a@x" in note  # a fifth of ten
    with pytest.raises(UsageError, match="one training question cannot be split"):
        cut_val(train[:1], 100, "q", allow_shared=True)


def test_inboxes_are_assigned_whatever_their_order() -> None:
    inboxes = [f"p{n}@x" for n in range(20)]
    splits = assign_inboxes(dict.fromkeys(inboxes, 30))
    assert Counter(splits.values()) == {"train": 12, "test": 5, "val": 3}
    assert assign_inboxes(dict.fromkeys(inboxes[::-1], 30)) == splits
    assert assign_inboxes({inbox: n for n, inbox in enumerate(inboxes)}) == splits  # size is nothing among many
    assert sorted(assign_inboxes({"a": 1, "b": 1, "c": 1}).values()) == ["test", "train", "val"]
    assert assign_inboxes({"a": 1}) == {"a": "test"}


def test_the_largest_of_few_inboxes_is_trained_on() -> None:
    for large, middle, small in permutations(("a@x", "b@x", "c@x")):
        splits = assign_inboxes({small: 40, large: 900, middle: 60})
        assert splits == {large: "train", middle: "test", small: "val"}
        assert assign_inboxes({small: 40, large: 900}) == {large: "train", small: "test"}
    for large in "abcdef":  # over a third, whatever its hash
        assert assign_inboxes(dict.fromkeys("abcdef", 20) | {large: 51})[large] == "train"
        assert assign_inboxes(dict.fromkeys("abcdef", 20) | {large: 50}) == assign_inboxes(dict.fromkeys("abcdef", 20))
    many = [f"p{n}" for n in range(10)]
    assert all(assign_inboxes(dict.fromkeys(many, 1) | {p: 99}) == assign_inboxes(dict.fromkeys(many, 1)) for p in many)


def test_the_subjects_of_a_shared_inbox_are_split_by_the_shares_of_their_questions() -> None:
    many = assign_subjects({f"thread {n}": 1 for n in range(100)})
    assert Counter(many.values()) == {"train": 60, "test": 25, "val": 15}
    sizes = {f"thread {n}": 1 + n % 7 for n in range(70)}  # 280 questions, the groups in the order of their hash
    splits = assign_subjects(sizes)
    counts = Counter({split: sum(n for subject, n in sizes.items() if splits[subject] == split) for split in SPLITS})
    assert abs(counts["test"] - 70) <= 3 and abs(counts["val"] - 42) <= 6 and counts.total() == 280
    assert assign_subjects(dict(reversed(sizes.items()))) == splits
    for large in "abcdef":  # over a third, whatever its hash
        assert assign_subjects(dict.fromkeys("abcdef", 20) | {large: 51})[large] == "train"
    assert assign_subjects({"never asked about": 0}) == {"never asked about": "test"}


EVERYTHING = {"train": 10, "val": 10, "test": 10}
NONE_FOUND = "No questions for {}: no question was found in the {} of that split. "
BY_SUBJECT = {"allow_shared": True}


@pytest.mark.parametrize(
    ("counts", "num_inboxes", "how", "notes"),
    [
        (EVERYTHING, 3, {}, []),
        ({"test": 10}, 1, {}, ["One mailbox: all questions are for testing. "]),
        ({"train": 10, "test": 10}, 2, {}, ["Two mailboxes: one for training, one for testing. "]),
        (EVERYTHING, 1, BY_SUBJECT, ["Split by subject: every split has the same mailboxes"]),
        ({"train": 30}, 40, {"is_limited": True}, ["No questions for validation and testing: 30 questions did not "]),
        ({"train": 10, "test": 10}, 3, {}, [NONE_FOUND.format("validation", "mailboxes") + "Add mailboxes"]),
        ({"train": 49}, 2, {}, [NONE_FOUND.format("validation and testing", "mailboxes") + "Add mailboxes"]),
        ({"train": 46, "val": 2, "test": 1}, 9, {}, ["Few questions: 2 for validation and 1 for testing. "]),
        (
            {"train": 46, "val": 9},
            1,
            BY_SUBJECT,
            ["Split by", NONE_FOUND.format("testing", "subjects") + "Index more mail", "Few questions: 9 for val"],
        ),
    ],
)
def test_empty_and_small_splits_are_explained(
    counts: dict[str, int], num_inboxes: int, how: dict[str, bool], notes: list[str]
) -> None:
    splits = [split for split, count in counts.items() for _ in range(count)]
    made = split_notes([scenario(n, f"{split}@x", split) for n, split in enumerate(splits)], num_inboxes, **how)
    assert len(made) == len(notes) and all(note.startswith(start) for note, start in zip(made, notes, strict=True)), (
        made
    )


def test_every_prefix_of_a_mixed_order_keeps_the_mix() -> None:
    whole = [scenario(n, f"i{n % 5}@x", kind="common" if n % 4 else "rare") for n in range(400)]
    order = mixed_order(whole, seed=1)
    assert sorted(s.id for s in order) == sorted(s.id for s in whole)
    for size in (40, 100, 200):
        kinds = Counter(s.kind for s in order[:size])
        assert abs(kinds["rare"] - size / 4) <= 1
        assert all(abs(n - size / 5) <= 2 for n in Counter(s.inbox_address for s in order[:size]).values())
    assert mixed_order(whole, seed=1) == order
    assert mixed_order(whole, seed=2) != order
