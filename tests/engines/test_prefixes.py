"""Common beginnings of prompts, worked out by hand."""

from __future__ import annotations

import pytest

from emailrl.engines import prefixes
from emailrl.engines.prefixes import common_length, shared_beginnings


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST", 2)


@pytest.mark.parametrize(
    ("one", "other", "length"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([1], [2], 0)],
)
def test_common_length(one: list[int], other: list[int], length: int) -> None:
    assert common_length(one, other) == common_length(other, one) == length


def test_prompts_that_begin_alike_are_found_together() -> None:
    prompts = {0: [1, 2, 3, 4], 1: [7, 7, 7], 2: [1, 2, 3, 9], 3: [7, 7, 8], 4: [5, 6]}
    assert shared_beginnings(prompts) == [([0, 2], 3), ([1, 3], 2)]


def test_a_set_grows_only_while_that_saves_no_less() -> None:
    # Two prompts share 6 tokens: 6 saved. A third that shares 3 of them makes it 2 · 3 = 6: taken in.
    alike = {0: [1] * 6 + [0], 1: [1] * 6 + [1], 2: [1] * 3 + [2]}
    assert shared_beginnings(alike) == [([0, 1, 2], 3)]
    # One that shares 2 would make it 2 · 2 = 4: left alone.
    assert shared_beginnings(alike | {2: [1, 1, 2]}) == [([0, 1], 6)]


def test_short_beginnings_and_single_prompts_are_left() -> None:
    assert shared_beginnings({0: [1, 2], 1: [1, 3]}) == []
    assert shared_beginnings({0: [1, 2]}) == []
    assert shared_beginnings({}) == []
