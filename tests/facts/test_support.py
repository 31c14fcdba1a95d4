"""What a text says of an answer."""

from __future__ import annotations

import pytest

from emailrl.facts.support import passage, unstated

TEXT = "Dear Nora,\n\nthe rent will be £925 a month from 1 March. Please change your order.\n\nKind regards\nSam Okafor"


@pytest.mark.parametrize(
    ("answer", "lacking"),
    [
        ("£925", []),
        ("From March 1 the rent is 925 pounds, says Okafor.", []),
        ("I pay it by standing order", []),
        ("£880", ["£880"]),
        ("Ada Moss, 2746", ["2746", "Ada Moss"]),
        ("on 2 March", ["2 March"]),
    ],
)
def test_what_a_text_does_not_state_is_named(answer: str, lacking: list[str]) -> None:
    assert unstated(answer, TEXT) == lacking


def test_a_value_behind_what_is_read_of_a_long_text_counts() -> None:
    assert unstated("7318", "No news here.\n" * 5000 + "The code is 7318.") == []


def test_a_passage_is_where_the_answer_stands() -> None:
    greeting, rent, order = "Dear Nora,", "the rent will be £925 a month from 1 March.", "Please change your order."
    assert passage("£925", "What is my rent?", TEXT) == [greeting, rent, order, "…"]
    assert passage("a standing order", "What is my rent?", TEXT) == ["…", rent, order, "Kind regards", "…"]
    assert passage("7318", "Which code?", " \n") == []
    assert passage("9:30", "When?", "See Dr. Ott on the 3. May at 9:30.") == ["See Dr. Ott on the 3. May at 9:30."]
    far = "No news of code here.\n" * 500 + "It is 7318.\n" + "No news of code here.\n" * 500
    assert passage("7318", "Which code?", far) == ["…", *far.splitlines()[499:502], "…"]
