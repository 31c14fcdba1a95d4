"""What the page's script reads of a trajectory: its evidence, failure class, conversation and tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from two_turns import tokenizer_folder, trajectory

from emailrl.inspection.page import detail, entry_row, row
from emailrl.inspection.page.evidence import evidence, failure
from emailrl.records import TrajectoryIndex, write_trajectories
from emailrl.records.trajectory import Message, StopReason, Trajectory, Turn

__all__ = ["tokenizer_folder", "trajectory"]


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


@pytest.mark.parametrize(
    ("turns", "answer", "named"),
    [
        ((MISS,), "Bob", "wrong, gold email not found"),
        ((HIT,), "Bob", "wrong, gold email found, not read"),
        ((HIT, READ), "Bob", "wrong, gold email read"),
        ((HIT, READ), None, "no answer, gold email read"),
    ],
)
def test_a_failure_says_how_far_the_search_came(
    trajectory: Trajectory, turns: tuple[tuple[str, object], ...], answer: str | None, named: str
) -> None:
    failed = played(trajectory, *turns, answer=answer, sources=[])
    assert row(failed, file="f", offset=0, source="step")["failure"] == named


def test_other_failures_are_named_by_how_they_ended(trajectory: Trajectory) -> None:
    failed = played(trajectory, HIT, answer=None, sources=[])
    failed.stop_reason = StopReason.CANT_PARSE_TOOL_CALL
    assert failure(failed, found=True, read=False) == "tool call not readable"
    failed.stop_reason, failed.exception = StopReason.EXCEPTION, "OSError: disk"
    assert failure(failed, found=True, read=False) == "crashed"
    assert failure(trajectory, found=True, read=True) == ""


def test_a_row_of_the_index_agrees_with_the_whole_trajectory(trajectory: Trajectory, tmp_path: Path) -> None:
    failed = played(trajectory, HIT, answer="Bob" + "b" * 300, sources=[])
    failed.rubric |= {"ever_found_right_email": True, "ever_read_right_email": False, "sources_correct": False}
    file = tmp_path / "step-000003.jsonl"
    failed.samples = []  # of an engine that returns text only, whose server counted tokens
    failed.rubric |= {"prompt_tokens": 700, "completion_tokens": 80}
    write_trajectories(file, [trajectory, failed])
    entry = TrajectoryIndex(file)[1]
    assert entry.tokens == 780
    note = {"advantage": -0.123456789, "dropped": None, "samples": []}
    whole = row(failed, file=file.name, offset=entry.offset, source="step", note=note)
    assert entry_row(entry, file=file.name, source="step", note=note) == whole
    assert (whole["answer"], whole["gold"], whole["advantage"]) == ("Bob" + "b" * 196 + "…", "Ann", -0.123457)


def test_a_row_sums_up_the_trajectory_and_what_training_noted(trajectory: Trajectory) -> None:
    note = {"advantage": 0.123456789, "dropped": None, "samples": []}
    found = row(trajectory, file="step-000003.jsonl", offset=17, source="step", note=note)
    assert (found["file"], found["offset"], found["source"], found["step"]) == ("step-000003.jsonl", 17, "step", 3)
    assert (found["tokens"], found["trained"], found["turns"]) == (8, 4, 2)
    assert (found["verdict"], found["failure"], found["advantage"]) == ("correct", "", 0.123457)
    assert (found["found"], found["read"], found["cited"]) == (False, False, True)  # its search result is no JSON
    long = row(replace(trajectory, final_answer="x" * 500), file="f", offset=0, source="step")
    assert len(long["answer"]) == 200 and long["advantage"] is None


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
    note = {"advantage": -0.5, "samples": [{"loss_mask": mask, "old_logprobs": numbers, "ratio": numbers}]}
    [sample] = detail(trajectory, note=note)["samples"]
    assert sample["mask"] == mask and sample["ratio"] == [None, None, None, 1.0, None, None, 1.23457, 0.5]
    assert sample["advantages"] == [None, None, None, -0.5, None, None, -0.5, -0.5]
    short = {"advantage": 1.0, "samples": [{"loss_mask": [1], "old_logprobs": [0.0], "ratio": [1.0]}]}
    assert "ratio" not in detail(trajectory, note=short)["samples"][0]  # of other tokens: shown as if not recorded
