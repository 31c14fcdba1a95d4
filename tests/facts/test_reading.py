"""A text as facts and words in order."""

from __future__ import annotations

from emailrl.facts.dates import Date, Time
from emailrl.facts.literals import Literal
from emailrl.facts.names import find_names, same_token, word_before
from emailrl.facts.quantities import Quantity
from emailrl.facts.reading import MASK, agree, contradict, read


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


def test_facts_of_different_kinds_neither_agree_nor_contradict() -> None:
    day, amount = Date(month=5, day=3), Quantity(3)
    assert not agree(day, amount) and not contradict(day, amount)
    assert not contradict(Literal("phone", "5550142"), Literal("code", "5550142"))


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
