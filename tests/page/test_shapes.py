"""What the page's script reads of a trajectory: its evidence, failure class, conversation and tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emailrl.page.shapes import TokenTexts, detail, evidence, failure, rows
from emailrl.records import Entry, TrainingNote, TrajectoryIndex, write_trajectories
from emailrl.records.trajectory import Message, SampleNote, Trajectory, Turn


def played(trajectory: Trajectory, *turns: tuple[str, object], answer: str | None, sources: list[str]) -> Trajectory:
    """The same question with other turns: the tool of each, and what it returned."""
    made = [Turn([], [], "stop", name, {}, json.dumps(result)) for name, result in turns]
    rubric = {"answer_correct": False, "attempted_answer": answer is not None}
    return replace(trajectory, turns=made, final_answer=answer, final_sources=sources, rubric=rubric)


HIT = ("search_emails", [{"message_id": "<other@x>", "snippet": ""}, {"message_id": "<m1@x>", "snippet": ""}])
MISS = ("search_emails", [])
READ = ("read_email", {"message_id": "<m1@x>", "body": "Ann paid."})
REFUSED = ("read_email", {"error": "Email not found"})


def test_the_evidence_names_the_turns_and_the_other_citations(trajectory: Trajectory) -> None:
    seen = played(trajectory, MISS, HIT, REFUSED, READ, HIT, answer="Bob", sources=["<z@x>", "<m1@x>", "<z@x>"])
    assert evidence(seen) == {"gold": [{"id": "<m1@x>", "found": 2, "read": 4, "cited": True}], "others": ["<z@x>"]}
    unseen = played(trajectory, MISS, answer="Bob", sources=[])
    assert evidence(unseen) == {"gold": [{"id": "<m1@x>", "found": None, "read": None, "cited": False}], "others": []}


def entry(**changes: Any) -> Entry:
    return Entry(1, 0, 1, 0, id="t-7", stop_reason="answered")._replace(**changes)


@pytest.mark.parametrize(
    ("found", "read", "attempted", "named"),
    [
        (False, False, True, "wrong, gold email not found"),
        (True, False, True, "wrong, gold email found, not read"),
        (True, True, True, "wrong, gold email read"),
        (True, True, False, "no answer, gold email read"),
    ],
)
def test_a_failure_says_how_far_the_search_came(found: bool, read: bool, attempted: bool, named: str) -> None:
    rubric = {"answer_correct": False, "attempted_answer": attempted}
    reached = {"ever_found_right_email": found, "ever_read_right_email": read}
    assert failure(entry(rubric=rubric | reached)) == named
    failed = entry(rubric={"answer_correct": False}, stop_reason="cant_parse_tool_call")
    assert failure(failed) == "tool call not readable"
    assert failure(failed._replace(stop_reason="exception", exception="OSError: disk")) == "crashed"
    assert failure(entry(rubric={"answer_correct": True})) == ""


def test_a_row_sums_up_the_trajectory_and_what_training_noted(trajectory: Trajectory, tmp_path: Path) -> None:
    failed = played(trajectory, HIT, answer="Bob" + "b" * 300, sources=[])
    failed.id = "t-8"
    failed.rubric |= {"ever_found_right_email": True, "ever_read_right_email": False, "sources_correct": False}
    failed.samples = []  # of an engine that returns text only, whose server counted tokens
    failed.rubric |= {"prompt_tokens": 700, "completion_tokens": 80}
    file = tmp_path / "step-000003.jsonl"
    write_trajectories(file, [trajectory, failed])
    notes = {"t-8": TrainingNote(id="t-8", advantage=-0.123456789)}
    whole, other = rows(file, TrajectoryIndex(file), notes)
    assert (whole["file"], whole["offset"], whole["source"], whole["step"]) == (file.name, 0, "step", 3)
    assert (whole["tokens"], whole["trained"], whole["turns"], whole["advantage"]) == (8, 4, 2, None)
    assert (whole["verdict"], whole["failure"], whole["found"]) == ("correct", "", False)
    assert (other["tokens"], other["trained"], other["offset"]) == (780, 0, TrajectoryIndex(file)[1].offset)
    assert (other["answer"], other["gold"], other["advantage"]) == ("Bob" + "b" * 196 + "…", "Ann", -0.123457)
    assert (other["found"], other["read"], other["cited"]) == (True, False, False)
    assert other["failure"] == "wrong, gold email found, not read"


def test_a_question_without_a_gold_email_has_none_to_find(trajectory: Trajectory, tmp_path: Path) -> None:
    failed = played(trajectory, MISS, answer="Bob", sources=[])
    failed.rubric |= {"ever_found_right_email": False, "ever_read_right_email": False, "sources_correct": False}
    failed.scenario = replace(trajectory.scenario, message_ids=[], answerable=False)
    write_trajectories(tmp_path / "step-000003.jsonl", [failed])
    [row] = rows(tmp_path / "step-000003.jsonl", TrajectoryIndex(tmp_path / "step-000003.jsonl"), {})
    assert (row["found"], row["read"], row["cited"], row["failure"]) == (None, None, None, "wrong")


def test_the_conversation_keeps_every_call_and_result_once(trajectory: Trajectory) -> None:
    roles = [(item["role"], item.get("turn"), item["text"][:8]) for item in detail(trajectory)["conversation"]]
    assert roles == [
        ("system", None, "You sear"), ("user", None, "Who paid"), ("assistant", 1, "<call>"),
        ("tool", None, '[{"messa'), ("assistant", 2, "Ann"),
    ]  # fmt: skip
    refused = replace(trajectory, messages=[*trajectory.messages[:2], Message("assistant", "gibberish")])
    refused.turns = [Turn([], [], "stop", None, None, '{"error": "no"}')]
    assert [item["text"] for item in detail(refused)["conversation"]][2:] == ["gibberish", '{"error": "no"}']
    chatless = replace(trajectory, messages=[])
    items = detail(chatless)["conversation"]
    assert [item["role"] for item in items] == ["assistant", "tool", "assistant"]
    assert items[0]["calls"] == [{"name": "search_emails", "arguments": {"keywords": ["paid"]}}]


def test_tokens_carry_what_training_computed(trajectory: Trajectory) -> None:
    [bare] = detail(trajectory)["samples"]
    assert bare["mask"] == [0, 0, 1, 1, 0, 0, 1, 1] and bare["pieces"] is None and "ratio" not in bare
    mask = [0, 0, 0, 1, 0, 0, 1, 1]
    numbers = [None, None, None, 1.0, None, None, 1.23456789, 0.5]
    note = TrainingNote(id="t-7", advantage=-0.5)
    note.samples = [SampleNote(loss_mask=mask, old_logprobs=numbers, ratio=numbers)]
    [sample] = detail(trajectory, note=note)["samples"]
    assert sample["mask"] == mask and sample["ratio"] == [None, None, None, 1.0, None, None, 1.23457, 0.5]
    assert sample["advantages"] == [None, None, None, -0.5, None, None, -0.5, -0.5]
    short = TrainingNote(id="t-7", samples=[SampleNote(loss_mask=[1], old_logprobs=[0.0], ratio=[1.0])])
    assert "ratio" not in detail(trajectory, note=short)["samples"][0]  # of other tokens: shown as if not recorded


def test_a_character_stands_at_its_last_id_and_a_tokenizer_fits_only_its_own_trajectories(
    trajectory: Trajectory, tokenizer_folder: Path
) -> None:
    tokens = TokenTexts(tokenizer_folder)
    assert tokens.pieces([4, 7, 8, 9, 2]) == ["Ann", "", "", "€", " paid"]
    assert tokens.pieces([4, 7, 8]) == ["Ann", "", "⟨7⟩⟨8⟩"]
    assert tokens.fits(trajectory)
    trajectory.turns[0].completion_ids = [2, 0]
    assert not tokens.fits(trajectory)
