"""Numbers with their scales and units."""

from __future__ import annotations

import pytest

from emailrl.facts.quantities import NUMBER, SCALES, SHORT_SCALES, UNITS, Quantity, read_quantity


@pytest.mark.parametrize(
    ("text", "value", "base"),
    [
        ("$12,500", 12500, "usd"),
        ("USD 12,500.00", 12500, "usd"),
        ("12.5k dollars", 12500, "usd"),
        ("$2.3 million", 2.3e6, "usd"),
        ("\u00a35m", 5e6, "gbp"),
        ("45 \u20ac", 45, "eur"),
        ("1.200,50 EUR", 1200.5, "eur"),
        ("15%", 15, "percent"),
        ("fifteen per cent", 15, "percent"),
        ("twenty-three", 23, None),
        ("sixteen hundred", 1600, None),
        ("one hundred and five", 105, None),
        ("two and a half million", 2.5e6, None),
        ("half a million", 5e5, None),
        ("two thirds", 200 / 3, "percent"),
        ("half", 50, "percent"),
        ("half a percent", 0.5, "percent"),
        ("half an hour", 0.5, "minute"),
        ("two-and-a-half miles", 2.5, "metre"),
        ("2 cf", 2, "mcf"),
        ("three quarters", 75, "percent"),
        ("1/2", 50, "percent"),
        ("15 mph", 15, "speed"),
        ("8,849 m", 8849, "metre"),
        ("a dozen", 12, None),
        ("-4", -4, None),
    ],
)
def test_quantities(text: str, value: float, base: str | None) -> None:
    found = NUMBER.search(text)
    assert found is not None
    quantity = read_quantity(found)
    assert quantity.value == pytest.approx(value, rel=1e-9)
    assert quantity.base == base


def test_quantities_of_one_kind_are_compared_in_one_unit() -> None:
    def read(text: str):  # type: ignore[no-untyped-def]
        found = NUMBER.search(text)
        assert found is not None
        return read_quantity(found)

    assert read("2 hours").agrees(read("120 minutes"))
    assert read("1,250 kg").agrees(read("1.25 tonnes"))
    assert not read("1,250 kg").agrees(read("1,250 tonnes"))
    assert read("40%").agrees(read("40")) and not read("40").agrees(read("40%"))
    assert not read("$45").agrees(read("\u20ac45"))
    assert not read("100 MMBtu/day").agrees(read("100 MMBtu per month"))
    assert read("twice a week").agrees(read("two times a week"))
    assert read("half").agrees(read("50 %"))
    assert read("5,280 feet").agrees(read("1,760 yards"))
    assert not read("two weeks").agrees(read("twice a week"))
    assert read("two weeks").agrees(read("two")) and read("two").agrees(read("two weeks"))
    assert not read("$10,000 a day").contradicts(read("two cents"))


def quantity(text: str) -> Quantity:
    found = NUMBER.search(text)
    assert found is not None
    return read_quantity(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
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


def test_scales_and_units_are_those_of_the_world() -> None:
    assert SCALES == {
        "hundred": 100,
        "thousand": 1000,
        "million": 1000**2,
        "billion": 1000**3,
        "trillion": 1000**4,
        "dozen": 12,
    }
    assert SHORT_SCALES == {"k": 1000, "m": 10**6, "mn": 10**6, "mm": 10**6, "mil": 10**6, "bn": 10**9, "b": 10**9}
    minutes = {"sec": 1 / 60, "min": 1, "hour": 60, "day": 24 * 60, "week": 7 * 24 * 60}
    assert {word: UNITS[word] for word in minutes} == {word: ("minute", many) for word, many in minutes.items()}
    metres = {"km": 1000, "mile": 1609.344, "m": 1, "ft": 0.3048, "inch": 0.0254, "yard": 0.9144}
    assert {word: UNITS[word] for word in metres} == {word: ("metre", many) for word, many in metres.items()}
    grams = {"kg": 10**3, "ton": 10**6, "kt": 10**9}
    assert {word: UNITS[word] for word in grams} == {word: ("gram", many) for word, many in grams.items()}
    assert (UNITS["cent"], UNITS["dollar"], UNITS["euro"], UNITS["pound"]) == (
        ("usd", 0.01),
        ("usd", 1),
        ("eur", 1),
        ("gbp", 1),
    )
    assert (UNITS["year"], UNITS["month"]) == (("month", 12), ("month", 1))
    assert (UNITS["mph"], UNITS["kmh"]) == (("speed", 1.609344), ("speed", 1))
    assert (UNITS["mcf"], UNITS["mmcf"], UNITS["bcf"]) == (("mcf", 1), ("mcf", 1000), ("mcf", 10**6))
    assert (UNITS["kw"], UNITS["mw"], UNITS["kwh"], UNITS["mwh"]) == (
        ("watt", 1000),
        ("watt", 10**6),
        ("watthour", 1000),
        ("watthour", 10**6),
    )
    counted = ("percent", "barrel", "gallon", "litre", "times", "pallet", "drum", "crate", "box", "bag", "container")
    assert [UNITS[word][1] for word in (*counted, "mmbtu")] == [1] * 12


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
    ],
)
def test_agreement_and_contradiction(one: str, other: str, agrees: bool, contradicts: bool) -> None:
    assert quantity(one).agrees(quantity(other)) is agrees
    assert quantity(one).contradicts(quantity(other)) is contradicts
