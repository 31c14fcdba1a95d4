"""Dates, quantities, literals and names: how each is read, and when two of them say the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from facts.tables import CASES

from emailrl.facts.dates import DATE, TIME, Date, read_dates, read_time
from emailrl.facts.quantities import (
    KINDS,
    NUMBER,
    SCALES,
    SENSES,
    SHORT_SCALES,
    UNITS,
    Quantity,
    rate_of,
    read_quantity,
)
from emailrl.facts.reading import Literal, find_names, name_of, read, same_token, word_before


@pytest.mark.parametrize(("text", "dates"), CASES["test_dates"])
def test_dates(text: str, dates: list[dict[str, Any]]) -> None:
    assert [date for found in DATE.finditer(text) for date in read_dates(found)] == [Date(**one) for one in dates]


@pytest.mark.parametrize(("text", "minutes"), CASES["test_times"])
def test_times(text: str, minutes: list[int]) -> None:
    assert read_time(TIME.search(text)).minutes == {*minutes}  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(("wanted", "given", "agrees"), CASES["test_the_finer_date_gives_the_coarser"])
def test_the_finer_date_gives_the_coarser(wanted: dict[str, Any], given: dict[str, Any], agrees: bool) -> None:
    assert Date(**wanted).agrees(Date(**given)) is agrees


@pytest.mark.parametrize("text", ["half past twenty", "any o'clock", "ten to late", "thirteen o'clock"])
def test_words_that_only_look_like_a_time(text: str) -> None:
    assert read_time(TIME.search(text)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("one", "other", "agrees"), CASES["test_times_of_two_zones"])
def test_times_of_two_zones(one: str, other: str, agrees: bool) -> None:
    first, second = (read_time(TIME.search(text)) for text in (one, other))  # type: ignore[arg-type]
    assert first.agrees(second) is agrees  # type: ignore[union-attr, arg-type]
    assert second.contradicts(first) is not agrees  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("text", ["noon Central Park", "10 am et al", "3 pm Pacific Gas", "9:30 estimated"])
def test_what_is_no_zone(text: str) -> None:
    assert read_time(TIME.search(text)).zone is None  # type: ignore[arg-type, union-attr]


def quantity(text: str) -> Quantity:
    found = NUMBER.search(text)
    assert found is not None
    return read_quantity(found)


@pytest.mark.parametrize(("text", "expected"), CASES["test_value_unit_and_rate"])
def test_value_unit_and_rate(text: str, expected: dict[str, Any]) -> None:
    found = quantity(text)
    assert found.value == pytest.approx(expected["value"], rel=1e-12)
    assert replace(found, value=0) == Quantity(**expected | {"value": 0})


def test_scales_are_those_of_the_world() -> None:
    powers = {"hundred": 100, "thousand": 1000, "million": 1000**2, "billion": 1000**3, "trillion": 1000**4}
    assert powers | {"dozen": 12} == SCALES
    assert SHORT_SCALES == {"k": 1000, "m": 10**6, "mn": 10**6, "mm": 10**6, "mil": 10**6, "bn": 10**9, "b": 10**9}


@pytest.mark.parametrize(("one", "other", "agrees", "contradicts"), CASES["test_agreement_and_contradiction"])
def test_agreement_and_contradiction(one: str, other: str, agrees: bool, contradicts: bool) -> None:
    assert quantity(one).agrees(quantity(other)) is agrees
    assert quantity(one).contradicts(quantity(other)) is contradicts


@pytest.mark.parametrize(
    ("base", "factors"),
    [
        ("minute", {"ms": 1 / 60_000, "sec": 1 / 60, "min": 1, "hour": 60, "day": 1440, "week": 7 * 1440}),
        ("minute", {"fortnight": 14 * 1440}),
        ("month", {"month": 1, "year": 12, "decade": 120}),
        ("metre", {"millimeter": 0.001, "cm": 0.01, "m": 1, "km": 1000}),
        ("metre", {"inch": 0.0254, "ft": 12 * 0.0254, "yard": 36 * 0.0254, "mile": 1760 * 0.9144}),
        ("gram", {"mg": 0.001, "g": 1, "kg": 10**3, "ton": 10**6, "kt": 10**9, "lb": 453.59237, "oz": 453.59237 / 16}),
        ("area", {"sqm": 1, "sqft": 0.3048**2, "acre": 4840 * 0.9144**2, "hectare": 100**2}),
        ("area", {"sqkm": 1000**2, "sqmi": 1609.344**2}),
        ("litre", {"ml": 0.001, "liter": 1, "cbm": 1000}),
        ("byte", {"byte": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}),
        ("usd", {"cent": 0.01, "dollar": 1}),
        ("speed", {"mph": 1.609344, "kmh": 1}),
        ("mcf", {"cf": 0.001, "mcf": 1, "mmcf": 1000, "bcf": 10**6}),
        ("mmbtu", {"btu": 1e-6, "mmbtu": 1, "dth": 1}),
        ("watt", {"watt": 1, "kw": 1000, "mw": 10**6, "gw": 10**9}),
        ("watthour", {"kwh": 1000, "mwh": 10**6, "gwh": 10**9}),
    ],
)
def test_units_are_those_of_the_world(base: str, factors: dict[str, float]) -> None:
    assert {word: UNITS[word] for word in factors} == {
        word: (base, pytest.approx(factor, rel=1e-12)) for word, factor in factors.items()
    }


def test_what_is_not_converted_counts_one_of_itself() -> None:
    own = "percent euro yen cad aud barrel gallon times pallet drum crate box bag container psi bar degc degf pp"
    assert [UNITS[word][1] for word in own.split()] == [1] * len(own.split())
    assert len({UNITS[word][0] for word in own.split()}) == len(own.split())


def test_a_unit_of_two_senses_has_the_factors_of_both() -> None:
    assert dict(SENSES[UNITS["pounds"][0]]) == {"gbp": 1, "gram": UNITS["lb"][1]}
    assert dict(SENSES[UNITS["degrees"][0]]) == {"celsius": 1, "fahrenheit": 1}
    assert dict(SENSES[UNITS["bps"][0]]) == {"percent": 0.01, "point": 0.01}


ALIKE = "yen:cad percent:pp degc:degf psi:bar day:year kg:barrel kwh:mcf box:drum box:kg"
UNLIKE = "kg:euro sqft:ft mb:km"


@pytest.mark.parametrize("pair", f"{ALIKE} {UNLIKE}".split())
def test_units_of_one_kind_answer_the_same_question(pair: str) -> None:
    first, second = (UNITS[word][0] for word in pair.split(":"))
    assert (KINDS.get(first, first) == KINDS.get(second, second)) is (pair in ALIKE)


@pytest.mark.parametrize(("word", "rate"), CASES["test_a_rate_has_one_spelling"])
def test_a_rate_has_one_spelling(word: str, rate: str) -> None:
    assert rate_of(word) == rate


def phone(text: str) -> Literal:
    return Literal("phone", text)


@pytest.mark.parametrize(
    ("one", "other", "agrees"),
    [
        (phone("7135550199"), phone("7135550199"), True),
        (phone("5550199"), phone("7135550199"), True),
        (phone("7135550199"), phone("550199"), False),  # six digits are no number
        (phone("5550199"), phone("5550199713"), False),  # its end must be the same, not its beginning
        (Literal("extension", "30396"), Literal("extension", "30396"), True),
        (Literal("extension", "30396"), Literal("extension", "0396"), False),
        (Literal("code", "17135550199"), phone("7135550199"), False),
    ],
)
def test_the_same_signs(one: Literal, other: Literal, agrees: bool) -> None:
    assert one.agrees(other) is agrees


@pytest.mark.parametrize(
    ("one", "other", "contradicts"),
    [
        (Literal("code", "inv20448"), Literal("code", "inv20449"), True),
        (Literal("code", "inv20448"), Literal("code", "po7"), True),  # letters, then digits, however many
        (Literal("code", "inv20448"), Literal("code", "12a"), False),
        (Literal("url", "x.org/a"), Literal("url", "x.org/b"), True),
        (phone("7135550199"), phone("5550199"), False),
        (phone("7135550199"), phone("5550198"), True),
    ],
)
def test_another_of_the_same_make(one: Literal, other: Literal, contradicts: bool) -> None:
    assert one.contradicts(other) is contradicts


@pytest.mark.parametrize(
    ("literal", "text", "found"),
    [
        (Literal("code", "inv20448"), "see Inv 20-448 now", "Inv 20-448"),
        (Literal("code", "inv20448"), "see INV-20448/2", None),
        (phone("7135550199"), "call +1 713.555.0199", "+1 713.555.0199"),
        (Literal("extension", "30396"), "dial ext. 3-0396", "ext. 3-0396"),
        (Literal("url", "x.org/a"), "at http://www.x.org/a/", "http://www.x.org/a/"),
        (Literal("version", "2.0.1"), "in V2.0.1", "V2.0.1"),
        (Literal("version", "2.0.1"), "in 2-0-1", None),  # other signs between make another version
        (Literal("code", "eb1450"), "in EB-14502", None),
        (Literal("file", "quay_plan.xls"), "Quay Plan", "Quay Plan"),
        (Literal("file", "quay_plan.xls"), "plan_quay.xls", None),
        (Literal("url", "x.org/a"), "x.org/ab", None),
    ],
)
def test_any_spelling_is_found(literal: Literal, text: str, found: str | None) -> None:
    match = literal.spellings.search(text)
    assert (match[0].strip() if match else None) == found


@pytest.mark.parametrize(("text", "names"), CASES["test_names"])
def test_names(text: str, names: list[list[str]]) -> None:
    assert [[*name.tokens] for name in find_names(read(text))] == names


def test_a_name_stands_where_it_is_written() -> None:
    (name,) = find_names(read("we met Ada Moss there"))
    assert (name.start, name.end) == (7, 15)


@pytest.mark.parametrize(("one", "other", "is_same"), CASES["test_the_same_word_of_a_name"])
def test_the_same_word_of_a_name(one: str, other: str, is_same: bool) -> None:
    assert same_token(one, other) is is_same


@pytest.mark.parametrize(
    ("text", "position", "word"),
    [
        ("Ada", 0, ""),
        ("from Ada", 5, "from"),
        ("from", 4, ""),  # the word has not ended
        ("by" + 28 * " " + "Ada", 30, "by"),
        ("by" + 29 * " " + "Ada", 31, "y"),  # looks back over 30 characters
    ],
)
def test_the_word_before(text: str, position: int, word: str) -> None:
    assert word_before(text, position) == word


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("sara.shackleton@enron.com", "Sara Shackleton"),
        ("sara_b.shackleton@enron.com", "Sara Shackleton"),
        ("mary-ann.o'neil@x.org", "Mary-Ann O'neil"),
        ("s.shackleton@enron.com", None),
        ("sara@enron.com", None),
        ("sara.2@enron.com", None),
        ("sales.team@enron.com", None),
        ("mike.enron@enron.com", None),
    ],
)
def test_the_name_in_an_address(address: str, name: str | None) -> None:
    assert name_of(address) == name
