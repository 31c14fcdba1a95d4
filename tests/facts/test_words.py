"""Cleaning and stems."""

from __future__ import annotations

import pytest
from facts.tables import CASES

from emailrl.facts.lexicon import CARDINALS, MONTHS, ORDINALS, TENS, WEEKDAYS
from emailrl.facts.words import OPPOSITES, clean, has_word, says_something, stem


@pytest.mark.parametrize(("text", "cleaned"), CASES["test_one_spelling"])
def test_one_spelling(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_a_longer_form_is_the_same_word() -> None:
    assert has_word("meeting", {"meeting"}) and has_word("volatil", {"volatility"})
    assert not has_word("gas", {"gasoline"}) and not has_word("tariff", {"target"})
    assert has_word("pumps", {"pumpset"}) and has_word("pumpset", {"pumps"}) and has_word("pump", {"pump"})
    assert not has_word("pump", {"pumps"}) and not has_word("pumps", {"pump"})  # four letters are too few


def test_grammar_says_nothing() -> None:
    assert not says_something("The") and not says_something("wouldn't")
    assert says_something("Tariff")


@pytest.mark.parametrize(
    ("word", "stemmed"),
    [
        *((form, "delay") for form in ("postpone", "postponed", "postpones", "postponing")),
        ("reservations", "reserv"),
        ("nations", "nation"),  # too short to lose more
        ("foundation", "found"),
        ("ration", "ration"),
        ("shipments", "shipment"),
        ("statements", "stat"),
        ("payment", "payment"),
        ("shipment", "shipment"),
        ("formations", "format"),
        ("formation", "format"),
        ("portions", "portion"),
        ("portion", "portion"),
        ("rings", "ring"),
        ("oddly", "oddly"),
        ("equipment", "equip"),
        ("meeting", "meet"),
        ("king", "king"),
        ("ring", "ring"),
        ("evenings", "even"),
        ("relation", "relat"),
        ("region", "region"),
        ("motions", "motion"),
        ("replied", "reply"),
        ("studies", "study"),
        ("tied", "tied"),
        ("ties", "tie"),
        ("added", "add"),
        ("bed", "bed"),
        ("quickly", "quick"),
        ("early", "early"),
        ("gas", "gas"),
        ("dogs", "dog"),
        ("boss", "boss"),
        ("stopped", "stop"),
        ("odd", "odd"),
        ("webb", "web"),
        ("egg", "egg"),
        ("called", "call"),
        ("passed", "pass"),
        ("buzzed", "buzz"),
        ("page", "page"),
        ("prices", "pric"),
        ("price", "pric"),
        ("Moss's", "moss"),
        ("lost", "lose"),
        ("women", "woman"),
        ("growing", "rise"),
        ("refused", "refus"),
        ("declines", "refus"),
    ],
)
def test_stems(word: str, stemmed: str) -> None:
    assert stem(word) == stemmed


def test_opposites_are_mutual() -> None:
    assert stem("closed") in OPPOSITES[stem("open")] and stem("opens") in OPPOSITES[stem("close")]
    assert OPPOSITES[stem("rises")] == {stem("fall"), stem("cut"), stem("reduce")}


def test_numbers_by_their_names() -> None:
    assert list(dict.fromkeys(CARDINALS.values())) == list(range(20))
    assert (CARDINALS["once"], CARDINALS["twice"], CARDINALS["nine"], CARDINALS["nineteen"]) == (1, 2, 9, 19)
    assert list(TENS.values()) == [20, 30, 40, 50, 60, 70, 80, 90]
    assert (ORDINALS["first"], ORDINALS["twelfth"]) == (1, 12)
    assert (MONTHS["january"], MONTHS["jan"], MONTHS["december"]) == (1, 1, 12)
    assert (WEEKDAYS["monday"], WEEKDAYS["tues"], WEEKDAYS["sun"]) == (0, 1, 6)


@pytest.mark.parametrize(
    ("british", "american"),
    [
        ("colour", "color"),
        ("favourable", "favorable"),
        ("organised", "organized"),
        ("organisation", "organization"),
        ("analysing", "analyzing"),
        ("centres", "centers"),
        ("fibre", "fiber"),
        ("catalogues", "catalogs"),
        ("defence", "defense"),
        ("cancelled", "canceled"),
        ("enrolment", "enrollment"),
        ("grey", "gray"),
        ("programmes", "programs"),
        ("cheque", "check"),
    ],
)
def test_british_and_american_spellings_are_one(british: str, american: str) -> None:
    assert stem(british) == stem(american)


@pytest.mark.parametrize(
    ("one", "other"),
    [("four", "for"), ("hour", "horse"), ("basis", "bazaar"), ("advice", "advise"), ("sell", "sel")],
)
def test_short_words_keep_their_spelling(one: str, other: str) -> None:
    assert stem(one) != stem(other)
