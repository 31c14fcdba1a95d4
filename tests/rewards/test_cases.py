"""The answer check on cases by language models that knew none of its rules, or few (adversarial): it may only improve.

The held-out halves were not read while the rules were written: keep it so, and judge rules by the others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emailrl.rewards.matching import match

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("half", "part", "wrong_accepted", "right_refused"),
    [
        ("development", "mail", 15, 27),
        ("development", "qa", 3, 5),
        ("adversarial_development", "mixed", 50, 10),
        ("adversarial_held_out", "mixed", 37, 20),
        ("held_out", "mail", 35, 39),
        ("held_out", "qa", 9, 16),
    ],
)
def test_no_more_verdicts_are_wrong_than_were(half: str, part: str, wrong_accepted: int, right_refused: int) -> None:
    rows = [json.loads(line) for line in (HERE / f"cases_{half}.jsonl").read_text(encoding="utf-8").splitlines()]
    chosen = [row for row in rows if row["part"] == part]
    assert len(chosen) > 300
    verdicts = [(row["right"], match(row["question"], row["reference"], row["answer"])) for row in chosen]
    assert verdicts.count((False, True)) <= wrong_accepted
    assert verdicts.count((True, False)) <= right_refused
