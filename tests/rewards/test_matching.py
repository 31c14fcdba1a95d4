"""The offline matcher against labeled pairs and cases, and what it is told of a question's kind.

The rules were written with the development halves alone; the held-out and later ones were not read: keep it so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hang import must_end
from hypothesis import given
from hypothesis import strategies as st

from emailrl.questions.template import KINDS
from emailrl.rewards.matching import match
from emailrl.rewards.matching.agreement import KIND_OF, LONGEST, alternatives, with_names, without_framing


def rows(name: str) -> list[dict[str, Any]]:
    path = Path(__file__).with_name(f"{name}.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def labelled(row: dict[str, Any]) -> list[tuple[bool, str]]:
    """A row holds one answer with its label, or lists of right and of wrong ones."""
    if "answer" in row:
        return [(row["right"], row["answer"])]
    return [(label == "right", answer) for label in ("right", "wrong") for answer in row.get(label, ())]


RULES = rows("pairs_rules")


@pytest.mark.parametrize("rule", dict.fromkeys(row["rule"] for row in RULES))
def test_a_rule_of_the_check(rule: str) -> None:
    """Pairs of answers that differ in what the rule is about."""
    mistaken = [
        (row["question"], row["reference"], answer, label)
        for row in RULES
        if row["rule"] == rule
        for label, answer in labelled(row)
        if match(row["question"], row["reference"], answer, kind=row.get("kind")) is not label
    ]
    assert mistaken == []


@pytest.mark.parametrize(
    ("name", "part", "wrong_accepted", "right_refused"),
    [
        ("pairs_development", None, 1, 6),
        ("pairs_held_out", None, 5, 4),
        ("pairs_hedging", "development", 9, 8),
        ("pairs_hedging", "later", 7, 4),
        ("cases_development", "mail", 15, 27),
        ("cases_development", "qa", 3, 5),
        ("cases_adversarial_development", "mixed", 50, 10),
        ("cases_adversarial_held_out", "mixed", 37, 20),
        ("cases_held_out", "mail", 35, 39),
        ("cases_held_out", "qa", 9, 16),
    ],
)
def test_no_more_verdicts_are_wrong_than_were(
    name: str, part: str | None, wrong_accepted: int, right_refused: int
) -> None:
    """By language models that knew none of the rules, or few (adversarial): the check may only improve."""
    verdicts = [
        (label, match(row["question"], row["reference"], answer))
        for row in rows(name)
        if part in (None, row.get("part"), row.get("half"))
        for label, answer in labelled(row)
    ]
    assert len(verdicts) > 80
    assert verdicts.count((False, True)) <= wrong_accepted
    assert verdicts.count((True, False)) <= right_refused


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
