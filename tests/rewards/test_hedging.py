"""Answers that hedge: two candidates, a candidate taken back for another, alternatives, both yes and no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emailrl.rewards.matching import match

ROWS = (Path(__file__).parent / "pairs_hedging.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("half", "wrong_accepted", "right_refused"), [("development", 9, 8), ("later", 7, 4)])
def test_no_more_hedged_answers_pay_than_did(half: str, wrong_accepted: int, right_refused: int) -> None:
    """The later half was written after the rules and changed none of them."""
    groups = [row for row in map(json.loads, ROWS) if row["half"] == half]

    def accepted(label: str) -> list[bool]:
        return [match(row["question"], row["reference"], answer) for row in groups for answer in row[label]]

    assert accepted("wrong").count(True) <= wrong_accepted
    assert accepted("right").count(False) <= right_refused
    assert len(accepted("wrong")) > 40


SIGNED, CHAIR, TOWN = "Was the quay lease signed?", "Who chairs the audit?", "Which town has the depot?"


@pytest.mark.parametrize(
    ("question", "reference", "answer"),
    [
        (SIGNED, "Yes", "Yes | No"),
        (SIGNED, "Yes", "Yes was withdrawn; the answer is No"),
        (SIGNED, "No", "No\nYes\nYes"),
        (CHAIR, "Ada Moss", "\u00acAda Moss"),
        (CHAIR, "Ada Moss", "Bo Hale <!-- Ada Moss -->"),
        (CHAIR, "Ada Moss", "Ada Moss was replaced by Bo Hale."),
        (CHAIR, "Ada Moss", "Ada Moss was the original choice, now Bo Hale"),
        (CHAIR, "Ada Moss", "Ada Moss 55%, Bo Hale 45%"),
        (CHAIR, "Ada Moss", "Shortlist: Ada Moss; Bo Hale"),
        (CHAIR, "Ada Moss", "A) Ada Moss B) Bo Hale"),
        (CHAIR, "Ada Moss", "Ada Moss to Bo Hale"),
        ("Which firm won the hotel tender?", "Corvane", "Corvane, Selwick"),
        (TOWN, "Ostend", "Bruges, Ostend"),
        (TOWN, "Ostend", "Ostend, Bruges"),
        (TOWN, "Ostend", "Ostend\nBruges"),
        ("Which state has the yard?", "Texas", "Texas, Ohio"),
        ("Which country has the yard?", "Belgium", "Belgium, France"),
        ("When is the survey?", "May 14", "May 14 is the old date; now May 17"),
        ("How many cranes came?", "38", "In one message 38 and in another 41"),
        ("What is the permit?", "QX-4471-B", "QX-4471-B in one mail, QX-4471-C in another"),
        (
            "Why did it stop?",
            "The main seal had leaked near the pump.",
            "Fuses blew. [The main seal had leaked near the pump.]",
        ),
        (
            "Why did it stop?",
            "The main seal had leaked near the pump.",
            "The main seal had leaked near the pump. Alternatively, fuses blew.",
        ),
    ],
)
def test_a_hedged_answer_is_wrong(question: str, reference: str, answer: str) -> None:
    assert match(question, reference, reference)
    assert not match(question, reference, answer)


@pytest.mark.parametrize(
    ("question", "reference", "answer"),
    [
        (SIGNED, "Yes", "Yes, no changes were made"),
        (SIGNED, "No", "No, though Bo said yes."),
        (SIGNED, "Yes", "Yes (see lease No. 5)"),
        (CHAIR, "Ada Moss", "~~Bo Hale~~ Ada Moss"),
        (CHAIR, "Ada Moss", "Bo Hale was replaced by Ada Moss."),
        (CHAIR, "Ada Moss", "It used to be Bo Hale; now it is Ada Moss"),
        (CHAIR, "Ada Moss", "Ada Moss; another email confirms it"),
        (TOWN, "Ostend", "Ostend (Belgium)"),
        (TOWN, "Ostend", "Ostend, Belgium"),
        (TOWN, "Ostend", "Ostend, chosen over Bruges"),
        ("When is the survey?", "May 14", "Now May 14, previously May 17"),
    ],
)
def test_details_and_former_values_are_no_hedge(question: str, reference: str, answer: str) -> None:
    assert match(question, reference, answer)


@pytest.mark.parametrize(
    ("question", "reference", "answer"),
    [
        ("What was replaced by the new pump?", "the old winch", "The old winch was replaced by the new pump."),
        ("What was the old plan?", "a ferry", "A ferry was the old plan."),
        ("What is the subject of the mail?", "!!!Urgent: crane != lift", "!!!Urgent: crane != lift"),
        ("Which state has the yard?", "Texas", "Texas, USA"),
        ("How is the cost split?", "Ada 60%, Bo 40%", "Ada pays 60% and Bo 40%"),
        ("What should the crew do with the memo?", "Ignore it", "Ignore it"),
        ("Is the answer yes or no?", "Yes and no", "Yes and no"),
    ],
)
def test_what_question_or_reference_says_is_no_hedge(question: str, reference: str, answer: str) -> None:
    assert match(question, reference, answer)
