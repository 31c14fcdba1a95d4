"""The passes before a step's first update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emailrl.settings import Settings
from emailrl.training.algorithms import Algorithm
from emailrl.training.mix import resolve
from emailrl.training.passes import needs_old_logprobs, needs_reference

GRPO = resolve(Settings.model_validate({}))


@pytest.mark.parametrize(
    ("algorithm", "kl_coef", "updates", "needed"),
    [
        (GRPO, 0.01, 1, False),
        (GRPO, 0.01, 2, True),
        (replace(GRPO, kl_in="reward"), 0.01, 1, True),
        (replace(GRPO, kl_in="reward"), 0.0, 1, False),
        (replace(GRPO, advantage="gae"), 0.0, 1, True),
    ],
)
def test_old_log_probabilities(algorithm: Algorithm, kl_coef: float, updates: int, needed: bool) -> None:
    assert needs_old_logprobs(algorithm, kl_coef=kl_coef, updates=updates) is needed


def test_the_reference_scores_where_its_kl_counts() -> None:
    assert needs_reference(0.01) and not needs_reference(0.0)
