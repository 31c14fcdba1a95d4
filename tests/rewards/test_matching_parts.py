"""The parts of the answer check by themselves, at their borders."""

from __future__ import annotations

import re

import pytest

from emailrl.facts.reading import read
from emailrl.rewards.matching.agreement import enough, is_zero, most, side
from emailrl.rewards.matching.question import Case, clauses, read_reference
from emailrl.rewards.matching.rivals import Item, is_bare, is_choice
from emailrl.rewards.matching.vetoes import gives_up, says_too_much

NEW = re.findall(
    r"\w+",
    """barrow candle dragon ember falcon garden hammer island jungle kettle ladder magnet needle orchid
pepper quiver rocket saddle temple urchin velvet walnut yellow zipper anchor button copper donkey
engine feather goblet hollow insect jacket kernel lantern marble nickel ostrich pencil quarry ribbon
silver ticket umpire violin wagon basket cactus dinner easel forest gravel helmet icicle jersey
kitten lemon mirror napkin oyster parrot rabbit""",
)
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
        (PARIS, "Paris {}. {}. {}.", (12, 12, 6), "in all"),
        (PARIS, "{}. Paris", (8,), "where the answer comes late"),
        (PARIS, "Paris is my {}", (8,), "where it turns personal"),
        (BARGE, "The survey barge moors in Paris {}", (28,), "a sentence that repeats the question"),
        (BARGE, "The barge moors in Paris {}", (28,), "two words of it do"),
        (BARGE, "The barge is in Paris {}", (12,), "one does not"),
        (BARGE, "The survey barge moors in Paris {}. {}. {}.", (28, 28, 4), "in all, then"),
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
        (PARIS, "Paris.", 2),
        (BARGE, "The survey barge moors in Paris.", 3),
        (PUMP, "The pump on the big barge leaked black oil.", 1),
    ],
)
def test_how_many_sentences_may_be_on_something_else(asked: tuple[str, str], beginning: str, most_strange: int) -> None:
    for count in (most_strange, most_strange + 1):
        answer = " ".join([beginning, *(f"{word}." for word in NEW[:count])])
        assert says_too_much(case_of(*asked, answer)) is (count > most_strange)


@pytest.mark.parametrize(
    ("asked", "left", "right", "is_one"),
    [
        (PUMP, "red paint", "the pump on the barge leaked oil", True),  # something new on one side
        (PUMP, "the pump on the barge leaked oil", "red paint", True),
        (PUMP, "red paint spilled onto wooden deck planks", "late on the barge the pump leaked oil", True),
        (PARIS, "Paris", "Rome", True),
        (PARIS, "Rome", "Oslo", False),  # no part of the reference
    ],
)
def test_an_or_is_a_choice_where_it_joins_the_answer_to_something_else(
    asked: tuple[str, str], left: str, right: str, is_one: bool
) -> None:
    case = case_of(*asked, f"{left} or {right}")
    split = len(left)
    before = Item("", left, tuple(unit for unit in case.given.units if unit.start < split))
    behind = Item(" or ", right, tuple(unit for unit in case.given.units if unit.start >= split))
    assert is_choice(case, [before], behind) is is_one


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
    ("text", "bare"),
    [
        ("Ada Moss", True),
        ("one of the pumps", True),
        ("one of all the pumps", False),  # five words
        ("red steel pump", True),
        ("big red steel pump", False),  # four things
        ("Ada is in", False),
    ],
)
def test_a_candidate_and_nothing_else(text: str, bare: bool) -> None:
    assert is_bare(Item("", text, read(text).units)) is bare


@pytest.mark.parametrize(
    ("reference", "gives"),
    [("It is not stated how deep the well is", False), ("It is forty feet deep", True)],
)
def test_giving_up_is_an_answer_where_the_reference_does(reference: str, gives: bool) -> None:
    case = case_of("How deep is the well?", reference, "How deep the well is, is not stated.")
    assert gives_up(case) is gives


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        ("Yes.", True),
        ("No, it was not.", False),
        ("It was.", True),
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
