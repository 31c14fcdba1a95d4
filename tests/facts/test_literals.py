"""Addresses, numbers and codes that are copied sign by sign."""

from __future__ import annotations

import pytest

from emailrl.facts.literals import PATTERNS, Literal, read_literal


@pytest.mark.parametrize(
    ("kind", "text", "signs"),
    [
        ("email", "Bo.Lind@X.org", "bo.lind@x.org"),
        ("url", "http://www.x.org/a", "x.org/a"),
        ("path", "S:\\\\models\\\\2002", "s:\\\\models\\\\2002"),
        ("phone", "(713) 555-0142", "7135550142"),
        ("phone", "+1 713.555.0142", "7135550142"),
        ("extension", "ext. 4-7712", "47712"),
        ("extension", "4-7712", "47712"),
        ("version", "Version 4.2", "4.2"),
        ("version", "v3.2.1", "3.2.1"),
        ("code", "EB-1450", "eb1450"),
        ("code", "CO 1743", "co1743"),
    ],
)
def test_found_and_read_in_one_spelling(kind: str, text: str, signs: str) -> None:
    found = PATTERNS[kind].search(f"see {text} now")
    assert found is not None and found[0].strip() == text
    assert read_literal(kind, found[0]) == Literal(kind, signs)


@pytest.mark.parametrize("text", ["31.12.2002", "TX 77027", "3rd", "40-page", "10am"])
def test_dates_and_numbers_are_no_codes(text: str) -> None:
    assert PATTERNS["version"].search(text) is None
    found = PATTERNS["code"].search(text)
    assert found is None or found[0] == "40-page"


def test_a_phone_number_may_lack_its_area_code() -> None:
    assert Literal("phone", "7135550142").agrees(Literal("phone", "5550142"))
    assert not Literal("phone", "7135550142").agrees(Literal("phone", "3035550142"))
    assert not Literal("phone", "7135550142").agrees(Literal("phone", "0142"))


def test_codes_of_one_make_contradict() -> None:
    code = Literal("code", "inv20448")
    assert code.contradicts(Literal("code", "po20449")) and not code.contradicts(Literal("code", "12a"))


@pytest.mark.parametrize(
    ("literal", "text", "found"),
    [
        (Literal("code", "eb1450"), "in eb 1450", True),
        (Literal("code", "eb1450"), "in EB-14502", False),
        (Literal("phone", "7135550142"), "+1 (713) 555-0142", True),
        (Literal("extension", "47712"), "x4-7712", True),
        (Literal("url", "x.org/a"), "https://www.x.org/a/", True),
        (Literal("url", "x.org/a"), "x.org/ab", False),
    ],
)
def test_a_literal_is_found_in_any_spelling(literal: Literal, text: str, found: bool) -> None:
    assert (literal.spellings.search(text) is not None) is found
