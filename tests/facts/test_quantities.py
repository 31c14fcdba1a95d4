"""Numbers with their scales and units."""

from __future__ import annotations

import pytest

from emailrl.facts.quantities import NUMBER, SCALES, SHORT_SCALES, Quantity, read_quantity


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
    ],
)
def test_agreement_and_contradiction(one: str, other: str, agrees: bool, contradicts: bool) -> None:
    assert quantity(one).agrees(quantity(other)) is agrees
    assert quantity(one).contradicts(quantity(other)) is contradicts
