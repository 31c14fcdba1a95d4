"""A text as facts and words in order."""

from __future__ import annotations

import pytest

from emailrl.facts.dates import Date, Time
from emailrl.facts.literals import Literal
from emailrl.facts.names import find_names, same_token, word_before
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import MASK, Fact, agree, contradict, read, same_kind

FIVE = Quantity(5)
CODE = Literal("code", "inv20448")


def test_facts_and_words_stand_in_order_and_are_read_once() -> None:
    reading = read("The pump failed on May 3 at 4 pm in EB1450, 2 hours late.")
    assert [unit.fact or unit.stem for unit in reading.units] == [
        "pump",
        "fail",
        Date(month=5, day=3),
        Time(frozenset({960})),
        Literal("code", "eb1450"),
        Quantity(2, "minute", 60),
        "late",
    ]
    assert reading.masked == "The pump failed on " + MASK * 5 + " at " + MASK * 4 + " in " + MASK * 6 + ", " + (
        MASK * 7 + " late."
    )


def test_a_full_stop_behind_a_fact_ends_its_sentence() -> None:
    assert read("It is at 1 p.m. Bring it.").masked == f"It is at {MASK * 5}. Bring it."
    assert read("It is at 1 p.m. sharp").masked == f"It is at {MASK * 6} sharp"


def test_when_is_asked_a_share_is_a_day_and_a_number_a_year() -> None:
    assert read("1/4").facts == [Quantity(25, "percent")]
    assert read("1/3", temporal=True).facts == [Date(month=1, day=3)]
    assert read("1998", temporal=True).facts == [Date(year=1998)]
    assert read("1998").facts == [Quantity(1998, weak=True)]


def names(text: str) -> list[tuple[str, ...]]:
    return [name.tokens for name in find_names(read(text))]


def test_names_are_runs_of_capitals() -> None:
    assert names("The mail is from Ada Moss and Hye-jin Park of Corvane.") == [
        ("ada", "moss"),
        ("hye", "jin", "park"),
        ("corvane",),
    ]
    assert names("Delay it.") == [] and names("Ada will.") == [("ada",)] and names("Employees want it") == []
    assert names("Vice President Ludwig van der Meer") == [("ludwig", "meer")]
    assert names("ASK ADA MOSS") == []


def test_words_of_names_may_be_short_forms() -> None:
    assert same_token("bob", "robert") and same_token("a", "ada") and same_token("ste", "suite")
    assert same_token("marseille", "marseilles")
    assert not same_token("i", "ii") and not same_token("paul", "paula") and not same_token("ada", "ida")


def test_the_word_before() -> None:
    assert (
        word_before("sent to Ada", 8) == "to" and word_before("Ada", 0) == "" and word_before("From: Ada", 6) == "from"
    )


@pytest.mark.parametrize(
    ("text", "facts", "stems"),
    [
        ("the seals", [], ["seal"]),
        ("It is 5 pumps", [FIVE], ["pump"]),
        ("pumps: INV-20448", [CODE], ["pump"]),
        ("a 40-page report", [Quantity(40)], ["page", "report"]),
        ("1/4 of it", [Quantity(25, "percent")], []),
        ("1/3/2001", [Date(2001, 1, 3)], []),
        ("1/9", [Date(None, 1, 9)], []),
        ("17th and 18th of May", [Date(None, 5, 17), Date(None, 5, 18)], []),
        ("at 9 am on May 3", [Time(frozenset({540})), Date(None, 5, 3)], []),
        ("in 1998", [Quantity(1998, weak=True)], []),
        ("5 , 6", [FIVE, Quantity(6)], []),
        ("half past twenty", [Quantity(50, "percent"), Quantity(20)], ["past"]),
    ],
)
def test_facts_and_words(text: str, facts: list[Fact], stems: list[str]) -> None:
    reading = read(text)
    assert reading.facts == facts
    assert reading.stems == stems


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("1/3", [Date(None, 1, 3)]),
        ("2 1/4", [Quantity(2.25)]),
        ("in 1998", [Date(year=1998)]),
        ("in 998", [Quantity(998)]),
    ],
)
def test_where_a_time_is_asked_for(text: str, facts: list[Fact]) -> None:
    assert read(text, temporal=True).facts == facts


def test_units_stand_in_order_and_where_they_are_written() -> None:
    reading = read("seals 5 pumps")
    assert [(unit.start, unit.end, unit.text) for unit in reading.units] == [
        (0, 5, "seals"),
        (6, 7, "5"),
        (8, 13, "pumps"),
    ]
    assert reading.text == "seals 5 pumps"
    assert reading.masked == f"seals {MASK} pumps"
    assert read("5 pumps, 6 seals").masked == f"{MASK} pumps, {MASK} seals"


def test_what_is_looked_for_is_read_before_anything_else_and_the_longest_first() -> None:
    short, long = Literal("code", "inv20"), Literal("code", "inv20448")
    assert read("INV 20 448", literals=[short, long]).facts == [long]
    assert read("seat INV 20", literals=[short, long]).facts == [short]
    assert read("INV 20 448", literals=[short, long]).masked == MASK * 10


@pytest.mark.parametrize(
    ("one", "other", "same", "agrees", "contradicts"),
    [
        (FIVE, Quantity(5), True, True, False),
        (FIVE, Quantity(6), True, False, True),
        (FIVE, Date(day=5), False, False, False),
        (CODE, Literal("code", "inv20448"), True, True, False),
        (CODE, Literal("code", "inv20449"), True, False, True),
        (CODE, Literal("phone", "inv20448"), False, False, False),
        (CODE, FIVE, False, False, False),
        (FIVE, CODE, False, False, False),
        (Date(day=5), Date(day=6), True, False, True),
    ],
)
def test_facts_are_compared_within_their_kind(
    one: Fact, other: Fact, same: bool, agrees: bool, contradicts: bool
) -> None:
    assert (same_kind(one, other), agree(one, other), contradict(one, other)) == (same, agrees, contradicts)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("2.10", [Literal("version", "2.10")]),
        ("section 2.1, on 5 pages", [Literal("version", "2.1"), Quantity(5)]),
        ("version 2.1", [Literal("version", "2.1")]),
        ("2.1.3", [Literal("version", "2.1.3")]),
        ("$2.10", [Quantity(2.1, "usd")]),
        ("2.10%", [Quantity(2.1, "percent")]),
        ("21", [Quantity(21)]),
    ],
)
def test_where_a_version_is_asked_for_a_point_is_no_decimal_point(text: str, facts: list[Fact]) -> None:
    assert read(text, numbering=True).facts == facts


def test_a_version_is_not_the_head_of_a_longer_one() -> None:
    assert read("2.1.3", literals=[Literal("version", "2.1")]).facts == [Literal("version", "2.1.3")]
    assert read("It is 2.1.", literals=[Literal("version", "2.1")]).facts == [Literal("version", "2.1")]


def test_nothing_is_read_across_what_was_read() -> None:
    assert read("http://x.org/INV-20448-b", literals=[CODE]).facts == [CODE]


def test_a_number_grown_together_with_its_unit_is_no_code() -> None:
    assert read("5lb").facts == [Quantity(5, "gram", 453.59237)]


def test_a_version_is_read_only_if_one_is_asked_for() -> None:
    assert read("2.10").facts == [Quantity(2.1)]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("2 hours 30 minutes", [Quantity(2.5, "minute", 60)]),
        ("2 hours, 30 minutes", [Quantity(2.5, "minute", 60)]),
        ("2 hours and 30 minutes", [Quantity(2.5, "minute", 60)]),
        ("1 week, 2 days, and 12 hours", [Quantity(1 + 2.5 / 7, "minute", 10080)]),
        ("5 feet 6 inches", [Quantity(5.5, "metre", 0.3048)]),
        ("5 kg in 2 hours 30 minutes", [Quantity(5, "gram", 1000), Quantity(2.5, "minute", 60)]),
        ("3 dollars and 50 cents a day", [Quantity(3.5, "usd", 1, "day")]),
        ("2 hours or 30 minutes", [Quantity(2, "minute", 60), Quantity(30, "minute")]),
        ("2 hours, 60 minutes", [Quantity(2, "minute", 60), Quantity(60, "minute")]),
        ("30 minutes, 2 hours", [Quantity(30, "minute"), Quantity(2, "minute", 60)]),
        ("2 hours, 0 minutes", [Quantity(2, "minute", 60), Quantity(0, "minute")]),
        ("2 hours a day and 30 minutes", [Quantity(2, "minute", 60, "day"), Quantity(30, "minute")]),
        ("2 hours, 30 kg", [Quantity(2, "minute", 60), Quantity(30, "gram", 1000)]),
        ("2, 0.5", [Quantity(2), Quantity(0.5)]),
    ],
)
def test_an_amount_in_two_units_is_one(text: str, facts: list[Fact]) -> None:
    found = read(text).facts
    assert [(fact.base, fact.factor, fact.rate) for fact in found if isinstance(fact, Quantity)] == [
        (fact.base, fact.factor, fact.rate) for fact in facts if isinstance(fact, Quantity)
    ]
    assert [fact.value for fact in found if isinstance(fact, Quantity)] == pytest.approx(
        [fact.value for fact in facts if isinstance(fact, Quantity)]
    )


def test_an_amount_in_two_units_is_blotted_out_as_one() -> None:
    reading = read("It took 2 hours and 30 minutes.")
    assert reading.masked == f"It took {MASK * 22}."
    assert [unit.text for unit in reading.units] == ["2 hours and 30 minutes"]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("1 3/8 inches", [Quantity(1.375, "metre", 0.0254)]),
        ("2-1/2 miles", [Quantity(2.5, "metre", 1609.344)]),
        ("on 3/8", [Date(month=3, day=8)]),
        ("room 2 5/20", [Quantity(2), Date(month=5, day=20)]),
    ],
)
def test_a_share_behind_a_number_belongs_to_it(text: str, facts: list[Fact]) -> None:
    assert read(text).facts == facts
