"""Numbers with their scales and units."""

from __future__ import annotations

import pytest

from emailrl.facts.quantities import NUMBER, read_quantity


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
    assert not read("$10,000 a day").contradicts(read("two cents"))
