"""The parts of the answer check by themselves, at their borders."""

from __future__ import annotations

import pytest

from emailrl.facts.reading import read
from emailrl.rewards.matching.coverage import enough, most
from emailrl.rewards.matching.rivals import Item, is_bare, runs


@pytest.mark.parametrize(
    ("right", "wrong", "is_most"),
    [(0, 0, True), (1, 0, True), (3, 1, False), (4, 0, True), (4, 1, True), (3, 2, False), (8, 2, True), (7, 3, False)],
)
def test_all_of_up_to_four_and_four_fifths_of_more(right: int, wrong: int, is_most: bool) -> None:
    assert most([True] * right + [False] * wrong) is is_most


@pytest.mark.parametrize(
    ("total", "others", "bare", "least"),
    [
        (1, True, True, 0),  # a name alone gives it
        (1, True, False, 1),
        (2, True, True, 1),
        (3, True, False, 2),
        (0, False, False, 1),
        (1, False, False, 1),
        (2, False, False, 2),
        (3, False, False, 1.98),  # 0.66 of three to six
        (6, False, False, 3.96),
        (7, False, False, 3.5),  # half of more
    ],
)
def test_how_many_words_must_be_there(total: int, others: bool, bare: bool, least: float) -> None:
    assert enough(total, others, bare) == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ("", []),
        ("new", []),  # one item is no list
        ("new held", [(0, 2)]),
        ("other new", []),
        ("other new held", [(1, 3)]),
        ("new held other new held new", [(0, 2), (3, 6)]),
    ],
)
def test_candidates_side_by_side(states: str, found: list[tuple[int, int]]) -> None:
    assert list(runs(states.split())) == found


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("Ada Moss", True),
        ("one of the pumps", True),
        ("one of all the pumps", False),  # five words
        ("red steel pump", True),
        ("big red steel pump", False),  # four things
        ("Ada is in", False),
    ],
)
def test_a_candidate_and_nothing_else(text: str, bare: bool) -> None:
    assert is_bare(Item("", text, read(text).units)) is bare
