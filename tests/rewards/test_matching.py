"""The offline matcher against pairs labeled by a language model, and what it is told of a question's kind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hang import must_end
from hypothesis import given
from hypothesis import strategies as st

from emailrl.questions.template import KINDS
from emailrl.rewards import match
from emailrl.rewards.matching.kinds import KIND_OF


def pairs(name: str) -> Iterator[tuple[str, str, str, bool]]:
    """(question, reference, answer, label); the rules were written with the development pairs alone."""
    for line in (Path(__file__).parent / f"pairs_{name}.jsonl").read_text(encoding="utf-8").splitlines():
        group = json.loads(line)
        for label in ("right", "wrong"):
            for answer in group[label]:
                yield group["question"], group["reference"], answer, label == "right"


KNOWN = {
    ("Did Omar agree to extend the trial?", "Omar refused to extend the trial, so no."),
    ("What laptop was ordered for me?", "A Falcon T40"),
    ("What are the two options for the lease?", "Either renewing for three years or moving to Polk Street"),
    ("Who is covering for Irene next week?", "Someone from Paul Adeyemi's team, Greg Tan"),
    ("What time does the ferry depart?", "17.05"),
    ("What is the agenda of the Thursday session?", "Budget review (9), hiring plans (10:30), lunch with auditors"),
    ("What is the agenda of the Thursday session?", "Budget review at 10:30 and hiring plans at 9"),
    ("What is the address of the new office?", "1200 Harbor Dr. Suite 310"),
    ("Which vendor was chosen for the network upgrade?", "Brightline Systems and Arcturus were considered"),
    ("Which vendor was chosen for the network upgrade?", "Arcturus was chosen over Brightline Systems."),
    ("What does the Weekly Lantern contain?", "A market summary, a sports column and the outage calendar"),
    ("What is Julian's job now?", "Senior risk analyst"),
    ("Which printer should we use for the posters?", "Calder 9500"),
    ("What is the new date of the kickoff?", "June 4 or 11"),
    ("When is the proposal due?", "April 1"),
    (
        "What did the survey say about the cafeteria?",
        "Longer opening hours and more vegetarian dishes are wanted by most employees.",
    ),
    ("What number should I call for the conference bridge?", "1-888-555-0162, code 4471"),
    (
        "What were the conclusions of the heat study?",
        "The boiler should be insulated before winter because it loses heat through the north wall.",
    ),
}
"""Pairs on which the check disagrees with their labels: it may learn these, and unlearn no other."""


@pytest.mark.parametrize(("name", "least"), [("development", 600), ("held_out", 340)])
def test_agreement_with_labels(name: str, least: int) -> None:
    table = list(pairs(name))
    assert len(table) >= least
    assert 0.35 < sum(label for *_, label in table) / len(table) < 0.65, "neither verdict may be had by guessing"
    disagreed = [row for row in table if match(*row[:3]) is not row[3]]
    assert len(disagreed) <= 0.03 * len(table), disagreed
    assert {(question, answer) for question, _, answer, _ in disagreed} <= KNOWN


@pytest.mark.parametrize(
    "answer", ["", "  ", ".", "I don't know", "I don\u2019t know.", "I could not find it.", "\x00\x1b[31m"]
)
def test_no_answer_is_wrong(answer: str) -> None:
    assert not match("When is the drill?", "May 3", answer)


@given(st.text(max_size=60))
def test_any_text_gets_a_verdict_twice_the_same(text: str) -> None:
    first = match("Who pays?", "Ada Moss", text)
    assert first is match("Who pays?", "Ada Moss", text)


@pytest.mark.parametrize("piece", ["1-", "1,", "1 and ", "A-", "x1", "(", "one ", "a@b.", "not ", "monday ", "2/3 "])
def test_no_text_makes_it_slow(piece: str) -> None:
    reference = "Ada Moss paid $30 to EB-1450, (713) 555-0199, on May 3"
    # Measured: below 0.4 s; a quadratic pattern takes minutes.
    with must_end():
        match("Who is it?", reference, piece * 20_000)
        match("Who is it?", (piece * 20_000)[:20_000], reference)


def test_the_whole_mail_is_no_answer() -> None:
    mail = " ".join(f"The {noun}{i} works." for i in range(60) for noun in ("pump", "valve")) + " It is in Galveston."
    assert not match("Where is the plant?", "Galveston", mail)


@pytest.mark.parametrize("word", ["thus", "Mons", "Weds", "Suns", "Sats", "Fris", "Thus we meet on Friday"])
def test_no_word_raises(word: str) -> None:
    assert match("When is the drill?", "Friday", word) is ("Friday" in word)


@pytest.mark.parametrize(
    ("kind", "reference", "right", "wrong"),
    [
        (
            "date_received",
            "May 3, 2001",
            ["5/3/2001", "On Thursday, May 3"],
            ["May 4, 2001", "May 3 or May 4", "In May"],
        ),
        ("time", "4:30 PM", ["16:30", "It is at 4:30 p.m."], ["4:30 AM", "4:30 PM, or 5 PM"]),
        ("amount", "$8,300", ["8.3k dollars"], ["$8,000", "$8,300, $9,000"]),
        ("count_in_month", "5", ["five", "She sent 5 mails: 3 on Monday and 2 on Friday."], ["4", "4 or 5"]),
        ("sender", "Lynn Blair", ["lynn.blair@x.org", "It was Lynn Blair."], ["Lynn Moss", "Lynn Blair and Ola Moss"]),
        ("copied", "lblair@x.org", ["lblair@x.org"], ["lmoss@x.org", "Lynn Blair"]),
        ("phone", "(713) 555-0142", ["713.555.0142", "Call 713-555-0142"], ["713-555-0143"]),
        ("subject", "Pier works", ['The subject was "Pier works".'], ["Pier", "Works on the pier", "Roof works"]),
        ("url", "http://x.org/a", ["http://x.org/a"], ["http://x.org/b"]),
        ("deal_number", "678029.1", ["Deal 678029.1"], ["678029.2"]),
    ],
)
def test_a_question_s_kind_is_compared_alone(kind: str, reference: str, right: list[str], wrong: list[str]) -> None:
    for answer in right:
        assert match("What does the note say?", reference, answer, kind=kind), answer
    for answer in wrong:
        assert not match("What does the note say?", reference, answer, kind=kind), answer


def test_every_template_kind_is_known() -> None:
    assert {kind.name for kind in KINDS} <= KIND_OF.keys()


def test_an_unknown_kind_tells_nothing() -> None:
    assert match("When is it?", "May 3", "On May 3.", kind="llm") is match("When is it?", "May 3", "On May 3.") is True


@pytest.mark.parametrize(
    ("question", "reference", "answer", "right"),
    [
        ("Was the tour held?", "No", "It was cancelled.", True),
        ("Was the tour cancelled?", "Yes", "It was called off.", True),
        ("What share is ours?", "50 %", "half", True),
        ("What share is ours?", "50 %", "a third", False),
        ("Who owns it?", "Federal Power Commission", "The Federal Power Commission (FPC)", True),
        ("Who owns it?", "Ada Moss", "ADA MOSS BEN HALE CY ROE OLA LIND IDA FAX UMA KAY", False),
        ("Who replaced Ada Moss?", "Ben Hale", "Ada Moss replaced Ben Hale.", False),
        ("Who replaced Ada Moss?", "Ben Hale", "Ada Moss was replaced by Ben Hale.", True),
        ("Who approved it?", "Ben Hale", "Ben Hale's plan was approved by Cy Roe.", False),
        ("When is it due?", "May 3", "Before May 3", False),
        ("When must it be in?", "before May 3", "before May 3", True),
        ("How many may come at most?", "four", "at least four", False),
        ("How should they be sorted?", "By vendor, then by date", "By date, then by vendor", False),
        ("What did she order?", "lemon cake with raspberry filling", "raspberry cake with lemon filling", False),
        ("How is it split?", "60% to us, 40% to them at Corvane", "40% to us, 60% to them at Corvane", False),
        ("Who sings Never Say Goodbye?", "Ada Moss", '"Never Say Goodbye" is sung by Ada Moss.', True),
        ("When did she join?", "1997", "On 3 February 1997", True),
        ("When did she join?", "3 February 1997", "1997", False),
        ("Where is the plant?", "Landover", "Landover, Maryland", True),
        ("How many keys are there?", "88", "88: 52 white and 36 black", True),
        ("How many keys are there?", "88", "88, 52 or 36", False),
        ("Was the trial cancelled?", "Yes", "The trial was cancelled? Ask Bo.", False),
        ("Was the trial cancelled?", "Yes", "The trial was cancelled. Ask Bo.", True),
        ("What is the code?", "662910", "662901", False),
        ("Who chaired it?", "Ada R. Moss of Corvane", "Ada Ruth Moss of Corvane", True),
        ("Who chaired it?", "Ada Moss", "Ada Moss's deputy chaired it.", False),
        ("Who chaired it?", "Ada Moss", "Ada Moss's deputy, Bo Hale, or Ada Moss", False),
        ("Who had the idea?", "Ada Moss", "It was Ada Moss's idea.", True),
        ("Who owns it?", "Corvane (60%) and Delmar (40%)", "Corvane (40%) and Delmar (60%)", False),
        ("Who owns it?", "Corvane (60%) and Delmar (40%)", "Delmar (40%) and Corvane (60%)", True),
        ("Who won it?", "Dieter from the mail room won it.", "Dieter", True),
        ("Who wrote it?", "Ada Moss/A. R. Moss", "It was written by Ada Moss in Rome.", True),
        ("How far is it from here?", "2.5 miles", "Less than 2.5 miles", False),
        (
            "What did they do?",
            "They cancelled the plan for the north pump.",
            "They approved the plan for the north pump.",
            False,
        ),
        (
            "What did Ola say?",
            "That HD-40917 is closed and the lamp fixed",
            "That hd 40917 is closed and the lamp mended",
            True,
        ),
        ("Does it pay?", "Only if it rises above nine feet.", "Only if it rises over 9 feet", True),
    ],
)
def test_what_is_read(question: str, reference: str, answer: str, right: bool) -> None:
    assert match(question, reference, answer) is right


def test_the_answer_check_alone_imports_no_library() -> None:
    script = """
import sys
before = set(sys.modules)
from emailrl.rewards import match
assert match("Who sent it?", "Ann Lee", "ann.lee@x.org", kind="sender")
print(*{name.split(".")[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["emailrl"]
