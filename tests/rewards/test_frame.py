"""Answers that repeat the frame of a reference or a question and change what it says."""

from __future__ import annotations

import pytest

from emailrl.rewards.matching import match

CAUSE = ("Why was the tour moved?", "because the south gate was blocked")


@pytest.mark.parametrize(
    "answer", ["the south gate was painted", "Because the south gate was too narrow.", "the south gate was open"]
)
def test_another_word_at_the_end(answer: str) -> None:
    assert not match(*CAUSE, answer)


@pytest.mark.parametrize("answer", ["The south gate was blocked.", "the gate was blocked", "a blocked south gate"])
def test_the_word_that_counts(answer: str) -> None:
    assert match(*CAUSE, answer)


@pytest.mark.parametrize("answer", ["hard hat and ear plugs", "hard hat, ear plugs and a rope"])
def test_the_last_item_of_a_list(answer: str) -> None:
    reference = "hard hat, ear plugs and a steel torch"
    assert match("What must visitors bring?", reference, reference)
    assert not match("What must visitors bring?", reference, answer)


@pytest.mark.parametrize("answer", ["It was increased by 15%.", "It rose by 15%.", "It went up 15%.", "raised by 15%"])
def test_a_rise_for_a_cut(answer: str) -> None:
    assert match("By what percentage was the rent cut?", "15%", "It was cut by 15%.")
    assert not match("By what percentage was the rent cut?", "15%", answer)


@pytest.mark.parametrize(
    ("question", "reference", "answer", "right"),
    [
        ("By what date must bids arrive?", "May 14, 2002", "After May 14, 2002.", False),
        ("By what date must bids arrive?", "May 14, 2002", "Before May 14, 2002.", True),
        ("By when must bids arrive?", "By Tuesday noon", "after Tuesday noon", False),
        ("What is the least we can order?", "40 drums", "at least 40 drums", True),
        ("What is the least we can order?", "40 drums", "less than 40 drums", False),
        ("What is the most we can order?", "40 drums", "no more than 40 drums", True),
        ("What is the most we can order?", "40 drums", "more than 40 drums", False),
        ("What is the limit for an order?", "40 drums", "under 40 drums", True),
        ("When do bids arrive?", "From May 14", "After May 14", True),
        ("When do bids arrive?", "From May 14", "Before May 14", False),
    ],
)
def test_a_limit_has_a_direction(question: str, reference: str, answer: str, right: bool) -> None:
    assert match(question, reference, answer) is right


COUNCIL = ("Which agency signs?", "the Harbor Traffic Safety Council")


@pytest.mark.parametrize("answer", ["The Delta Safety Council", "The Ostend Traffic Safety Council"])
def test_the_end_of_another_name(answer: str) -> None:
    assert match(*COUNCIL, "The Traffic Safety Council signs.")
    assert not match(*COUNCIL, answer)
