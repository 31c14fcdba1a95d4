"""The table of algorithms, and the overrides of the settings."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from emailrl.errors import UsageError
from emailrl.settings import Settings
from emailrl.training.advantages import ESTIMATORS
from emailrl.training.algorithms import ALGORITHMS, Algorithm, resolve


def resolved(name: str = "grpo", **overrides: Any) -> Algorithm:
    return resolve(Settings.model_validate({"training": {"algorithm": name}, "algorithm": overrides}))


def test_default_is_grpo_with_k3_in_the_loss_and_token_mean() -> None:
    assert resolve(Settings()) == Algorithm(
        name="grpo", advantage="group_norm", whiten=False, clip_low=0.2, clip_high=0.2, dual_clip=None,
        ratio_level="token", aggregation="token_mean", kl_estimator="k3", kl_in="loss",
    )  # fmt: skip


def test_every_row_names_an_estimator_and_itself() -> None:
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.name == name and algorithm.advantage in {*ESTIMATORS, "gae"}
    with pytest.raises(FrozenInstanceError):
        ALGORITHMS["grpo"].clip_low = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("dr_grpo", {"advantage": "dr_grpo", "aggregation": "constant"}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28}),
        ("gspo", {"ratio_level": "sequence", "aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4}),
        ("rloo", {"advantage": "rloo", "kl_estimator": "k1", "kl_in": "reward", "whiten": False}),
        ("reinforce_pp", {"advantage": "reinforce", "kl_estimator": "k1", "kl_in": "reward", "whiten": True}),
        ("reinforce_pp_baseline", {"advantage": "reinforce_baseline", "kl_estimator": "k2", "whiten": True}),
    ],
)
def test_rows(name: str, facts: dict[str, object]) -> None:
    assert {key: getattr(resolved(name), key) for key in facts} == facts


def test_overrides_win_and_zero_counts_as_given() -> None:
    algorithm = resolved(
        "dapo", clip_low=0.0, clip_high=0.3, dual_clip=4.0, kl_estimator="k2", loss_aggregation="sequence_mean"
    )
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip) == (0.0, 0.3, 4.0)
    assert (algorithm.kl_estimator, algorithm.aggregation) == ("k2", "sequence_mean")
    assert ALGORITHMS["dapo"].clip_high == 0.28


def test_those_that_compare_no_rollouts_take_single_ones() -> None:
    singles = [name for name, algorithm in ALGORITHMS.items() if algorithm.min_group_size == 1]
    assert singles == ["reinforce_pp", "ppo"]
    assert singles == [name for name, algorithm in ALGORITHMS.items() if not algorithm.compares_rollouts]
    assert [name for name, algorithm in ALGORITHMS.items() if algorithm.has_critic] == ["ppo"]


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match=r"Unknown algorithm 'grop'\. Did you mean grpo\? Known: grpo, "):
        resolved("grop")
    with pytest.raises(UsageError, match=r"Unknown algorithm 'xyz'\. Known: "):
        resolved("xyz")
