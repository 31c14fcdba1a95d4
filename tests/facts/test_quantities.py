"""Numbers with their scales and units of measurement or money."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from facts.tables import CASES

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


@pytest.mark.parametrize(("text", "expected"), CASES["test_value_unit_and_rate"])
def test_value_unit_and_rate(text: str, expected: dict[str, Any]) -> None:
    found = quantity(text)
    assert found.value == pytest.approx(expected["value"], rel=1e-12)
    assert replace(found, value=0) == Quantity(**expected | {"value": 0})


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


@pytest.mark.parametrize(("word", "rate"), CASES["test_a_rate_has_one_spelling"])
def test_a_rate_has_one_spelling(word: str, rate: str) -> None:
    assert rate_of(word) == rate
