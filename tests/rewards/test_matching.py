"""The offline matcher against labeled pairs and cases, and its parts by themselves, at their borders.

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

from emailrl.facts.reading import read
from emailrl.questions.template import KINDS
from emailrl.rewards.matching import match
from emailrl.rewards.matching.agreement import (
    KIND_OF,
    LONGEST,
    alternatives,
    enough,
    is_zero,
    most,
    side,
    with_names,
    without_framing,
)
from emailrl.rewards.matching.hedging import hedges_between, segments
from emailrl.rewards.matching.question import Case, clauses, read_reference
from emailrl.rewards.matching.vetoes import gives_up, says_too_much


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
        ("pairs_development", None, 5, 7),
        ("pairs_held_out", None, 7, 4),
        ("pairs_hedging", "development", 8, 10),
        ("pairs_hedging", "later", 10, 5),
        ("cases_development", "mail", 24, 28),
        ("cases_development", "qa", 4, 14),
        ("cases_adversarial_development", "mixed", 53, 13),
        ("cases_adversarial_held_out", "mixed", 47, 17),
        ("cases_held_out", "mail", 37, 46),
        ("cases_held_out", "qa", 8, 25),
    ],
)
def test_no_more_verdicts_are_wrong_than_were(
    name: str, part: str | None, wrong_accepted: int, right_refused: int
) -> None:
    """By language models that knew none of the rules, or few (adversarial): the errors that there are are bounded."""
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


NEW = [
    f"{start}{end}"
    for start in ["bar", "dun", "fel", "gom", "hib", "jal", "kes", "lor", "mip"]
    for end in ["kin", "dle", "wix", "gam", "ves", "poz", "tur"]
]
PARIS = ("Where is it?", "Paris")
BARGE = ("Where does the old survey barge moor?", "Paris")
PUMP = ("Why was it late?", "The pump on the big barge leaked black oil")


def case_of(question: str, reference: str, answer: str) -> Case:
    asked, expected = read_reference(question, reference, reference, None)
    given = read(answer, temporal=asked.temporal)
    return Case(asked, expected, given, clauses(given, expected.said, expected.lasting))


def filled(template: str, *counts: int) -> str:
    """Each ``{}`` becomes so many words of which neither question nor reference speaks, none of them twice."""
    parts, used = [], 0
    for count in counts:
        parts.append(" ".join(NEW[used : used + count]))
        used += count
    return template.format(*parts)


@pytest.mark.parametrize(
    ("asked", "template", "most_new", "why"),
    [
        (PARIS, "Paris {}", (12,), "a sentence round a short answer"),
        (PARIS, "paris {}", (6,), "without capitals"),
        (PARIS, "Paris {}. {}.", (12, 12), "a second sentence"),
        (PARIS, "Paris is my {}", (8,), "where it turns personal"),
        (BARGE, "The survey barge moors in Paris {}", (28,), "a sentence that repeats the question"),
        (BARGE, "The barge moors in Paris {}", (28,), "two words of it do"),
        (BARGE, "The barge is in Paris {}", (12,), "one does not"),
        (PUMP, "The pump on the big barge leaked black oil {}", (7,), "beside a sentence"),
        (PUMP, "The pump on the big barge leaked black oil, my {}", (4,), "personal, beside a sentence"),
        (PUMP, "The pump on the big barge leaked black oil. {}.", (3,), "a sentence on something else"),
        (PUMP, "The pump on the big barge leaked black oil. It was {}.", (7,), "one that goes on"),
    ],
)
def test_how_much_an_answer_may_add(asked: tuple[str, str], template: str, most_new: tuple[int, ...], why: str) -> None:
    assert not says_too_much(case_of(*asked, filled(template, *most_new))), why
    one_more = (*most_new[:-1], most_new[-1] + 1)
    assert says_too_much(case_of(*asked, filled(template, *one_more))), why


@pytest.mark.parametrize(
    ("asked", "beginning", "most_strange"),
    [
        (PARIS, "Paris.", 1),
        (BARGE, "The survey barge moors in Paris.", 1),
        (PUMP, "The pump on the big barge leaked black oil.", 1),
    ],
)
def test_how_many_sentences_may_be_on_something_else(asked: tuple[str, str], beginning: str, most_strange: int) -> None:
    for count in (most_strange, most_strange + 1):
        answer = " ".join([beginning, *(f"{word}." for word in NEW[:count])])
        assert says_too_much(case_of(*asked, answer)) is (count > most_strange)


@pytest.mark.parametrize(
    ("asked", "answer", "is_hedge"),
    [
        (PARIS, "Paris; Rome", True),
        (PARIS, "Rome (Paris)", True),
        (PARIS, "Answer A: Paris. Answer B: Rome.", True),
        (PARIS, "Paris, in France", False),
        (PARIS, "Paris, France", False),  # a larger place
        (BARGE, "The survey barge moors in Paris or Rome.", True),
        (BARGE, "The survey barge moors in Paris, and the crew lives in Rome.", False),  # a detail in a sentence
        (BARGE, "The survey barge moors in Paris. The old one moors in Rome.", True),  # in the same place
        (BARGE, "The survey barge moors in Paris, Oslo, Rome.", True),  # a tail without a sentence
        (PUMP, "The pump leaked black oil or the crew slept", True),
        (PUMP, "The crew slept; the pump leaked black oil", True),
        (("How many keys are there?", "88"), "88: 52 white and 36 black", False),  # they add up
        (("How many keys are there?", "88"), "88: 52 white and 30 black", True),
        (("When is it?", "June 29"), "June 59 (June 29)", True),  # but for its digits
        (("When is it?", "June 29"), "June 29, 3 pm", False),
    ],
)
def test_two_candidates_are_a_hedge(asked: tuple[str, str], answer: str, is_hedge: bool) -> None:
    assert hedges_between(case_of(*asked, answer)) is is_hedge


def test_an_answer_is_cut_at_its_joints_but_not_within_what_the_reference_says() -> None:
    case = case_of("Who came?", "Ada Moss and Bo Hale", "Ada Moss and Bo Hale, of Rome or Carl (the cook)")
    parts, fluent = segments(case, about=False)
    assert [(part.joint, part.text.strip(), bool(part.held)) for part in parts] == [
        ("stop", "Ada Moss and Bo Hale", True),
        ("list", "of Rome", False),
        ("choice", "Carl", False),
        ("bracket", "the cook", False),
    ]
    assert not fluent


@pytest.mark.parametrize(
    ("right", "wrong", "is_most"),
    [(0, 0, True), (1, 0, True), (3, 1, False), (4, 0, True), (4, 1, True), (3, 2, False), (8, 2, True), (7, 3, False)],
)
def test_all_of_up_to_four_and_four_fifths_of_more(right: int, wrong: int, is_most: bool) -> None:
    assert most([True] * right + [False] * wrong) is is_most


@pytest.mark.parametrize(
    ("total", "others", "bare", "least"),
    [
        (1, True, True, 0),  # a name alone gives it
        (1, True, False, 1),
        (2, True, True, 1),
        (3, True, False, 2),
        (0, False, False, 1),
        (1, False, False, 1),
        (2, False, False, 2),
        (3, False, False, 1.98),  # 0.66 of three to six
        (6, False, False, 3.96),
        (7, False, False, 3.5),  # half of more
    ],
)
def test_how_many_words_must_be_there(total: int, others: bool, bare: bool, least: float) -> None:
    assert enough(total, others, bare) == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize(
    ("reference", "gives"), [("It is not stated how deep the well is", False), ("It is forty feet deep", True)]
)
def test_giving_up_is_an_answer_where_the_reference_does(reference: str, gives: bool) -> None:
    case = case_of("How deep is the well?", reference, "How deep the well is, is not stated.")
    assert gives_up(case) is gives


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        ("Yes.", True),
        ("No, it was not.", False),
        ("It was not.", False),
        ("The boiler was repaired.", True),
        ("The boiler was never repaired.", False),
        ("The boiler was repaired? Ask Bo.", None),  # left open
        ("Ask Bo.", None),
        ("Perhaps, yes.", None),
    ],
)
def test_the_side_taken_on_a_yes_or_no_question(answer: str, taken: bool | None) -> None:
    assert side(case_of("Was the boiler repaired?", "Yes", answer)) is taken


@pytest.mark.parametrize(
    ("text", "zero"),
    [("0", True), ("0 or 0", True), ("0 and 3", False), ("3", False), ("None came.", True), ("Some", False)],
)
def test_none_is_zero_and_so_is_nothing_else(text: str, zero: bool) -> None:
    assert is_zero(read(text)) is zero
