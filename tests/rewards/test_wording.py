"""What an answer looks like: its words, what it offers, its capitals."""

from __future__ import annotations

import pytest
from hang import must_end

from emailrl.rewards.scorer import count_candidates, measure


@pytest.mark.parametrize(
    ("answer", "candidates"),
    [
        ("May 20", 1),
        ("in Houston, Texas", 1),
        ("Tuesday, May 20, 2001", 1),  # a year after its day is no item
        ("On Monday, he said that the meeting would be moved.", 1),  # clauses are no items
        ("Jill and Tom Reed", 1),  # a pair is an answer
        ("24/7, on 5/20/01", 1),
        ("It is in <a/b@x> or so I believe it to be.", 1),
        ("Tuesday or Friday", 2),
        ("he/she", 2),
        ("It is one of 5, 6, 7 or 8.", 4),
        ("May 3, May 4, or May 5", 3),
        ("Ida, Jill, Tom and Ben came.", 4),
        ("5 or 6. Perhaps 7, 8 or 9.", 3),  # the longest list of all sentences
        ("One of these:\n- red\n- green\n* blue", 3),
        ("1. red\n2) green", 2),
        ("", 1),
    ],
)
def test_candidates_are_the_items_of_the_longest_list_or_choice(answer: str, candidates: int) -> None:
    assert count_candidates(answer) == candidates


def test_words_and_capitals_by_hand() -> None:
    assert measure("MAY 20, at Ida's") == {
        "answer_words": 4,
        "answer_candidates": 1,
        "answer_capitals": pytest.approx(4 / 9),  # M A Y I of M A Y a t I d a s
    }
    assert measure("20")["answer_capitals"] == 0.0


@pytest.mark.parametrize("piece", [" ", "\n", "<", ", ", "a or ", "/ ", "1. \n", ",\t"])
def test_a_long_answer_of_anything_is_measured_at_once(piece: str) -> None:
    with must_end():
        measure(piece * 200_000)
