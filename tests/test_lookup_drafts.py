"""Drafts looked up in recorded trajectories, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu.lookup_drafts import lookup, turns_of


@pytest.mark.parametrize(
    ("context", "completion", "counts"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 5], (1, 2, 2)),  # both drafted tokens, and one more
        ([1, 2, 3, 1, 2], [4, 5], (2, 2, 0)),  # 3 and 1 are drafted, 4 comes instead; nothing follows (2, 4)
        ([1, 2], [7, 8], (2, 0, 0)),
        ([1, 2, 3, 1, 2], [3], (1, 2, 1)),  # the completion ends before its second drafted token
        ([5, 1, 2, 7, 6, 1, 2, 8, 6, 1, 2], [8], (1, 2, 1)),  # the longest n-gram counts: (6, 1, 2), not (1, 2)
    ],
)
def test_steps_drafts_and_accepted(context: list[int], completion: list[int], counts: tuple[int, int, int]) -> None:
    assert lookup(context, completion, most=2) == counts


def test_completions_are_where_the_mask_is(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.jsonl"
    file.write_text(json.dumps({"token_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 0, 1]}) + "\n{}\n")
    assert list(turns_of(file)) == [([1], [2, 3]), ([1, 2, 3, 4], [5])]
