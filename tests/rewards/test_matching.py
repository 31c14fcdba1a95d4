"""The offline matcher against pairs labeled by a language model, and what it is told of a question's kind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hang import must_end
from hypothesis import given
from hypothesis import strategies as st

from emailrl.questions.template import KINDS
from emailrl.rewards.matching import match
from emailrl.rewards.matching.agreement import KIND_OF, LONGEST, alternatives, with_names, without_framing

HERE = Path(__file__).parent


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / f"pairs_{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def pairs(name: str) -> Iterator[tuple[str, str, str, bool]]:
    """(question, reference, answer, label); the rules were written with the development pairs alone."""
    for group in rows(name):
        for label in ("right", "wrong"):
            for answer in group.get(label, ()):
                yield group["question"], group["reference"], answer, label == "right"


RULES = rows("rules")


@pytest.mark.parametrize("rule", dict.fromkeys(row["rule"] for row in RULES))
def test_a_rule_of_the_check(rule: str) -> None:
    """Pairs of answers that differ in what the rule is about."""
    found = {
        (row["question"], row["reference"], answer, label): match(
            row["question"], row["reference"], answer, kind=row.get("kind")
        )
        for row in RULES
        if row["rule"] == rule
        for label in ("right", "wrong")
        for answer in row.get(label, ())
    }
    assert [case for case, verdict in found.items() if verdict is not (case[3] == "right")] == []


@pytest.mark.parametrize(("half", "wrong_accepted", "right_refused"), [("development", 9, 8), ("later", 7, 4)])
def test_no_more_hedged_answers_pay_than_did(half: str, wrong_accepted: int, right_refused: int) -> None:
    """The later half was written after the rules and changed none of them."""
    groups = [row for row in rows("hedging") if row["half"] == half]

    def accepted(label: str) -> list[bool]:
        return [match(row["question"], row["reference"], answer) for row in groups for answer in row[label]]

    assert accepted("wrong").count(True) <= wrong_accepted
    assert accepted("right").count(False) <= right_refused
    assert len(accepted("wrong")) > 40


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


def test_every_template_kind_is_known() -> None:
    assert {kind.name for kind in KINDS} <= KIND_OF.keys()


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("Emily Bronte/Ellis Bell", ["Emily Bronte", "Ellis Bell"]),
        ("the pump | the valve", ["the pump", "the valve"]),
        ("Federal Power Commission (FPC)", ["Federal Power Commission", "FPC"]),
        ("a b c d e f g h / one", ["a b c d e f g h", "one"]),
        ("a b c d e f g h i / one", ["a b c d e f g h i / one"]),  # nine words are a sentence
        ("one / a b c d e f g h i", ["one / a b c d e f g h i"]),
        ("one / ", ["one /"]),
        ("http://x.org/a", ["http://x.org/a"]),
        ("5 barrels/day", ["5 barrels/day"]),
        ("$5/hour", ["$5/hour"]),
        ("$5/bbl", ["$5/bbl"]),
        ("7/seven", ["7", "seven"]),
    ],
)
def test_a_reference_with_a_stroke_has_two_answers(reference: str, parts: list[str]) -> None:
    assert alternatives(reference.strip()) == parts


@pytest.mark.parametrize(
    ("answer", "keep", "question", "rest"),
    [
        ("Sure! The red shed. Let me know if you need more.", "", "", "The red shed."),
        ("The red shed. Thanks red shed.", "red shed", "", "The red shed. Thanks red shed."),
        ("The red shed. Thanks shed.", "shed", "", "The red shed. Thanks shed."),  # four letters are kept
        ("The red shed. Thanks red.", "red", "", "The red shed."),  # three are not
        ("Where are they now? In it.", "", "Where are they now?", "In it."),
        ("Where now? In it.", "", "Where now?", "In it."),
        ("Who is it In it.", "", "Who is it", "In it."),
        ("Which? In it.", "", "Which?", "Which? In it."),  # too short to be the question again
        ("Where is In it.", "", "Where is", "Where is In it."),  # eight signs, too
    ],
)
def test_framing_is_cut_but_what_is_expected_is_kept(answer: str, keep: str, question: str, rest: str) -> None:
    assert " ".join(without_framing(answer, keep, question).split()) == rest


@pytest.mark.parametrize(
    ("answer", "reference", "named"),
    [
        ("from ada.moss@x.org", "Ada Moss", "from Ada Moss"),
        ("from ADA.MOSS@X.ORG and bo.hale@x.org", "Ada Moss", "from Ada Moss and Bo Hale"),
        ("from am7@x.org", "Ada Moss", "from am7@x.org"),  # spells no name
        ("from ada.moss@x.org", "bo@x.org", "from ada.moss@x.org"),  # an address is asked for
    ],
)
def test_an_address_stands_for_the_name_it_spells(answer: str, reference: str, named: str) -> None:
    assert with_names(answer, reference) == named


def test_an_answer_has_a_longest_length() -> None:
    assert match("When is the drill?", "May 3", "May 3" + " " * (LONGEST - 5))
    assert not match("When is the drill?", "May 3", "May 3" + " " * (LONGEST - 4))


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
