"""Addresses, numbers and codes that are copied sign by sign."""

from __future__ import annotations

import pytest

from emailrl.facts.literals import Literal


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
        (Literal("code", "eb1450"), "in eb 1450", "eb 1450"),
        (Literal("code", "eb1450"), "in EB-14502", None),
        (phone("7135550142"), "+1 (713) 555-0142", "+1 (713) 555-0142"),
        (Literal("extension", "47712"), "x4-7712", "x4-7712"),
        (Literal("file", "quay_plan.xls"), "Quay Plan", "Quay Plan"),
        (Literal("file", "quay_plan.xls"), "plan_quay.xls", None),
        (Literal("url", "x.org/a"), "x.org/ab", None),
    ],
)
def test_any_spelling_is_found(literal: Literal, text: str, found: str | None) -> None:
    match = literal.spellings.search(text)
    assert (match[0].strip() if match else None) == found
