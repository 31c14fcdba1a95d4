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
        ("code", "TW5520.7", "tw55207"),
        ("file", "Quay_plan-2.final.XLS", "quay_plan-2.final.xls"),
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


@pytest.mark.parametrize(
    ("literal", "text", "found"),
    [
        (Literal("code", "eb1450"), "in eb 1450", True),
        (Literal("code", "eb1450"), "in EB-14502", False),
        (Literal("phone", "7135550142"), "+1 (713) 555-0142", True),
        (Literal("extension", "47712"), "x4-7712", True),
        (Literal("url", "x.org/a"), "https://www.x.org/a/", True),
        (Literal("file", "quay_plan.xls"), "Quay Plan", True),
        (Literal("file", "quay_plan.xls"), "plan_quay.xls", False),
        (Literal("url", "x.org/a"), "x.org/ab", False),
    ],
)
def test_a_literal_is_found_in_any_spelling(literal: Literal, text: str, found: bool) -> None:
    assert (literal.spellings.search(text) is not None) is found


def phone(text: str) -> Literal:
    return Literal("phone", text)


@pytest.mark.parametrize(
    ("one", "other", "agrees"),
    [
        (phone("7135550199"), phone("7135550199"), True),
        (phone("7135550199"), phone("5550199"), True),
        (phone("5550199"), phone("7135550199"), True),
        (phone("7135550199"), phone("550199"), False),  # six digits are no number
        (phone("5550199"), phone("7135550198"), False),
        (phone("5550199"), phone("5550199713"), False),  # its end must be the same, not its beginning
        (Literal("extension", "30396"), Literal("extension", "30396"), True),
        (Literal("extension", "30396"), Literal("extension", "0396"), False),
        (Literal("code", "17135550199"), phone("7135550199"), False),
        (phone("17135550199"), Literal("code", "7135550199"), False),
        (Literal("code", "17135550199"), Literal("code", "7135550199"), False),
    ],
)
def test_the_same_signs(one: Literal, other: Literal, agrees: bool) -> None:
    assert one.agrees(other) is agrees


@pytest.mark.parametrize(
    ("one", "other", "contradicts"),
    [
        (Literal("code", "inv20448"), Literal("code", "inv20449"), True),
        (Literal("code", "inv20448"), Literal("code", "po7"), True),  # letters, then digits, however many
        (Literal("code", "inv20448"), Literal("code", "inv20448"), False),
        (Literal("code", "inv20448"), Literal("code", "12a"), False),
        (Literal("url", "x.org/a"), Literal("url", "x.org/b"), True),
        (Literal("url", "x.org/a"), Literal("url", "x.org/a"), False),
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
        (Literal("email", "bo@x.org"), "to Bo@x.org", "Bo@x.org"),
    ],
)
def test_any_spelling_is_found(literal: Literal, text: str, found: str | None) -> None:
    match = literal.spellings.search(text)
    assert (match[0].strip() if match else None) == found
