"""Numbers with their scales and units of measurement or money."""

from __future__ import annotations

import pytest

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


def quantity(text: str) -> Quantity:
    found = NUMBER.search(text)
    assert found is not None
    return read_quantity(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$12,500", Quantity(12500, "usd", 1)),
        ("USD 12,500.00", Quantity(12500, "usd", 1)),
        ("12.5k dollars", Quantity(12500, "usd", 1)),
        ("$2.3 million", Quantity(2.3e6, "usd", 1)),
        ("\u00a35m", Quantity(5e6, "gbp", 1)),
        ("45 \u20ac", Quantity(45, "eur", 1)),
        ("1.200,50 EUR", Quantity(1200.5, "eur", 1)),
        ("fifteen per cent", Quantity(15, "percent", 1)),
        ("sixteen hundred", Quantity(1600, weak=True)),
        ("one hundred and five", Quantity(105)),
        ("half a million", Quantity(5e5)),
        ("half a percent", Quantity(0.5, "percent", 1)),
        ("half an hour", Quantity(0.5, "minute", 60)),
        ("two-and-a-half miles", Quantity(2.5, "metre", 1609.344)),
        ("three quarters", Quantity(75, "percent")),
        ("8,849 m", Quantity(8849, "metre", 1)),
        ("a dozen", Quantity(12)),
        ("5 kg", Quantity(5, "gram", 1000)),
        ("twenty-one", Quantity(21)),
        ("three hundred and twenty", Quantity(320)),
        ("two thousand three hundred", Quantity(2300)),
        ("two million three thousand and four", Quantity(2003004)),
        ("a hundred", Quantity(100)),
        ("a million", Quantity(1e6)),
        ("twelve hundred thousand", Quantity(1.2e6)),
        ("three and a quarter million", Quantity(3.25e6)),
        ("a third of a million", Quantity(1e6 / 3)),
        ("two and a half", Quantity(2.5)),
        ("two fifths", Quantity(40, "percent")),
        ("a quarter", Quantity(25, "percent")),
        ("one tenth", Quantity(10, "percent")),
        ("3/4", Quantity(75, "percent")),
        ("3/2", Quantity(1.5)),
        ("1 1/2", Quantity(1.5)),
        ("10-3/4", Quantity(10.75)),
        ("2/2", Quantity(1)),
        ("3/0", Quantity(float("inf"))),
        ("5th", Quantity(5, weak=True)),
        ("third", Quantity(3, weak=True)),
        ("one", Quantity(1, weak=True)),
        ("once", Quantity(1, weak=True)),
        ("two", Quantity(2)),
        ("one kg", Quantity(1, "gram", 1000)),
        ("999", Quantity(999)),
        ("1000", Quantity(1000, weak=True)),  # may be a year
        ("1999", Quantity(1999, weak=True)),
        ("2099", Quantity(2099, weak=True)),
        ("2100", Quantity(2100)),
        ("1,999", Quantity(1999)),
        ("$1999", Quantity(1999, "usd", 1)),
        ("-$5", Quantity(5, "usd", 1)),
        ("-5 km", Quantity(-5, "metre", 1000)),
        ("0.5", Quantity(0.5)),
        (".5", Quantity(0.5)),
        ("1.234,5 km", Quantity(1234.5, "metre", 1000)),
        ("3k", Quantity(3000)),
        ("3 bn", Quantity(3e9)),
        ("2 dozen", Quantity(24)),
        ("2.5 thousand barrels", Quantity(2500, "barrel", 1)),
        ("3 metric tons", Quantity(3, "gram", 1e6)),
        ("50 miles per hour", Quantity(50, "metre", 1609.344, "hour")),
        ("$5/barrels", Quantity(5, "usd", 1, "barrel")),
        ("$5 a day", Quantity(5, "usd", 1, "day")),
        ("$5 for each share", Quantity(5, "usd", 1, "share")),
        ("$5 monthly", Quantity(5, "usd", 1, "month")),
        ("$5 annually", Quantity(5, "usd", 1, "year")),
        ("5 percent", Quantity(5, "percent", 1)),
        ("a week", Quantity(1, "minute", 10080, weak=True)),
        ("an hour", Quantity(1, "minute", 60, weak=True)),
        ("one hour", Quantity(1, "minute", 60)),
        ("negative 4", Quantity(-4)),
        ("\u00a55", Quantity(5, "jpy", 1)),
        ("US$5", Quantity(5, "usd", 1)),
        ("$5 CAD", Quantity(5, "cad", 1)),
        ("$5 barrel", Quantity(5, "usd", 1)),
        ("10 mmbtu/d", Quantity(10, "mmbtu", 1, "day")),
    ],
)
def test_value_unit_and_rate(text: str, expected: Quantity) -> None:
    found = quantity(text)
    assert found.value == pytest.approx(expected.value, rel=1e-12)
    assert (found.base, found.factor, found.rate, found.weak) == (
        expected.base,
        expected.factor,
        expected.rate,
        expected.weak,
    )


def test_scales_are_those_of_the_world() -> None:
    assert SCALES == {
        "hundred": 100,
        "thousand": 1000,
        "million": 1000**2,
        "billion": 1000**3,
        "trillion": 1000**4,
        "dozen": 12,
    }
    assert SHORT_SCALES == {"k": 1000, "m": 10**6, "mn": 10**6, "mm": 10**6, "mil": 10**6, "bn": 10**9, "b": 10**9}


@pytest.mark.parametrize(
    ("one", "other", "agrees", "contradicts"),
    [
        ("5", "5", True, False),
        ("5", "6", False, True),
        ("5", "5 kg", True, False),
        ("5 kg", "5", True, False),
        ("5", "6 kg", False, True),
        ("5 kg", "6 kg", False, True),
        ("5 kg", "5000 kg", False, True),
        ("5 kg", "5 litres", False, True),  # both are amounts of stuff
        ("5 kg", "5 km", False, False),  # a weight and a way
        ("$5", "\u20ac5", False, True),
        ("2 days", "2 months", False, True),
        ("$5 a day", "$5 a week", False, True),
        ("$5 a day", "$5", True, False),
        ("$5 a day", "$6", False, False),  # a rate and a sum
        ("$5 a day", "$6 a day", False, True),
        ("two weeks", "2 a week", False, True),
        ("2", "2 a week", True, False),
        ("$100,000", "$100,001", True, False),  # closer than two in 100,000
        ("$100,000", "$100,003", False, True),
        ("662910", "662901", False, True),  # bare whole numbers may be codes
        ("66291.05", "66291.06", True, False),
        ("3/0", "4", False, True),
        ("2 billion cf", "2 Bcf", True, False),
        ("0", "0.0000000001", True, False),
        ("0", "0.00001", False, True),
        ("5 kg", "5 lbs", False, True),
        ("2 lb", "32 oz", True, False),
        ("5 pounds", "5 lb", True, False),  # a weight
        ("5 pounds", "\u00a35", True, False),  # or money
        ("5 pounds", "5 kg", False, True),
        ("5 pounds", "$5", False, True),
        ("$5", "5 CAD", False, True),
        ("C$5", "$5 CAD", True, False),
        ("A$5", "AUD 5", True, False),
        ("15%", "15 bps", False, True),
        ("0.25%", "25 bps", True, False),
        ("25 bp", "0.25 pp", True, False),
        ("5%", "5 pp", False, True),  # a percentage point is no percent
        ("25", "25 bps", False, True),
        ("25 bps", "25", True, False),
        ("5 pp", "5", True, False),
        ("5", "5 pp", False, True),
        ("0.5", "50%", True, False),
        ("1/2", "0.5", True, False),
        ("-50%", "-0.5", True, False),
        ("2", "200%", False, True),  # a bare number is a share below one alone
        ("1", "100%", False, True),
        ("72 degf", "72 degc", False, True),
        ("72\u00b0", "72 degf", True, False),
        ("72 degrees", "22 degc", False, True),
        ("20 MB", "20 GB", False, True),
        ("2 GB", "2,000 MB", True, False),
        ("40 acres", "40 hectares", False, True),
        ("a week", "7 days", True, False),
        ("a fortnight", "two weeks", True, False),
        ("a year", "12 months", True, False),
        ("a week", "two weeks", False, True),
        ("$20 per barrel", "$20/bbl", True, False),
        ("$20 a barrel", "$20 a gallon", False, True),
        ("500 bbl/d", "500 barrels per day", True, False),
        ("minus 5 km", "-5 km", True, False),
        ("2 hours", "120 minutes", True, False),
        ("40%", "40", True, False),
        ("twice a week", "two times a week", True, False),
        ("half", "50 %", True, False),
        ("5,280 feet", "1,760 yards", True, False),
        ("two weeks", "two", True, False),
        ("$10,000 a day", "two cents", False, False),
    ],
)
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


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("yen", "cad", True),
        ("percent", "pp", True),
        ("degc", "degf", True),
        ("psi", "bar", True),
        ("day", "year", True),
        ("kg", "barrel", True),
        ("kwh", "mcf", True),
        ("box", "drum", True),
        ("box", "kg", True),
        ("kg", "euro", False),
        ("sqft", "ft", False),
        ("mb", "km", False),
    ],
)
def test_units_of_one_kind_answer_the_same_question(one: str, other: str, alike: bool) -> None:
    first, second = UNITS[one][0], UNITS[other][0]
    assert (KINDS.get(first, first) == KINDS.get(second, second)) is alike


@pytest.mark.parametrize(
    ("word", "rate"),
    [
        ("d", "day"),
        ("Days", "day"),
        ("daily", "day"),
        ("h", "hour"),
        ("hr", "hour"),
        ("s", "second"),
        ("weekly", "week"),
        ("mo", "month"),
        ("monthly", "month"),
        ("y", "year"),
        ("yr", "year"),
        ("annually", "year"),
        ("quarterly", "quarter"),
        ("bbl", "barrel"),
        ("pound", "lb"),
        ("heads", "head"),
        ("", ""),
    ],
)
def test_a_rate_has_one_spelling(word: str, rate: str) -> None:
    assert rate_of(word) == rate
