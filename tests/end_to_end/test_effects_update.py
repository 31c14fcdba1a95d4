"""Settings that a flag of OpenRLHF comes to change the updates: one observation with each, one without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.effects import shows
from training.updaters import PAID, make_updater, samples

from emailrl.base.errors import EmailRLError
from emailrl.model.packing import takes_packed
from emailrl.training.batch import micro_batches

PPO = {"algorithm": "ppo"}
ROUGH = {"update_epochs": 3, "learning_rate": 5e-2}
"""Updates large enough that ratios leave the clip range."""

UPDATES: dict[str, tuple[dict[str, Any], Any]] = {
    "learning_rate": ({}, 2e-2),
    "critic_learning_rate": (PPO, 1e-2),
    "lr_scheduler": ({"max_steps": 3}, "linear"),
    "min_lr_ratio": ({"max_steps": 3, "lr_scheduler": "linear"}, 0.5),
    "warmup_ratio": ({"max_steps": 10}, 0.5),
    "adam_beta1": ({}, 0.5),
    "adam_beta2": ({}, 0.5),
    "weight_decay": ({}, 0.5),
    "max_grad_norm": ({}, 1e-3),
    "num_mini_batches": ({}, 2),
    "update_epochs": ({}, 2),
    "seed": ({}, 7),
    "beta": ({}, 0.1),
    "kl_target": ({"beta": 0.1}, 1e-3),
    "kl_horizon": ({"beta": 0.1, "kl_target": 1e-3}, 10),
    "kl_in": ({"beta": 0.1}, "reward"),
    "kl_estimator": ({"beta": 0.1}, "k1"),
    "algorithm": ({}, "dr_grpo"),
    "whiten_advantages": ({}, True),
    "loss_aggregation": ({}, "sequence_mean"),
    "clip_low": (ROUGH, 0.0),
    "clip_high": (ROUGH, 0.0),
    "dual_clip": (ROUGH, 1.001),
    "value_clip": (PPO | {"update_epochs": 3, "critic_learning_rate": 0.1}, 1e-4),
    "gamma": (PPO, 0.5),
    "gae_lambda": (PPO, 0.5),
    "ratio_level": ({"update_epochs": 2}, "sequence"),
    "entropy_coef": ({}, 0.1),
    "importance_correction": ({}, "tis"),
    "correction_low": ({"importance_correction": "icepop"}, 1.0),
    "correction_high": ({"importance_correction": "icepop"}, 1.0),
    "temperature": ({}, 1.0),
    "lora_alpha": ({}, 64),
    "lora_dropout": ({}, 0.5),
    "dtype": ({}, "bf16"),
}
"""Setting → the settings around it, and a value for it that its default is not."""


def updated(model: Path, **changes: Any) -> list[torch.Tensor]:
    """The trained weights after two steps, and the weight of the KL."""
    updater = make_updater(model, **changes)
    for step in (1, 2):
        updater.train(samples(), PAID, step=step)
    return [*(parameter.detach().float() for parameter in updater.parameters), torch.tensor(updater.kl.coef)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_same_settings_give_the_same_update(tiny_model: Path) -> None:
    """Without this the differences below would show nothing."""
    for around in ({}, PPO, ROUGH):
        assert same(updated(tiny_model, **around), updated(tiny_model, **around))


@shows(*UPDATES)
@pytest.mark.parametrize("key", UPDATES)
def test_the_update_depends_on(tiny_model: Path, key: str) -> None:
    around, value = UPDATES[key]
    assert not same(updated(tiny_model, **around), updated(tiny_model, **around | {key: value}))


@shows("lora_rank", "target_modules")
def test_the_shape_of_the_adapter(tiny_model: Path) -> None:
    plain = make_updater(tiny_model)
    assert {min(parameter.shape) for parameter in plain.parameters} == {4}
    assert {min(parameter.shape) for parameter in make_updater(tiny_model, lora_rank=8).parameters} == {8}
    assert all("q_proj" in name for name in make_updater(tiny_model, target_modules="q_proj").names)
    assert not all("q_proj" in name for name in plain.names)


@shows("max_rows_per_micro_batch", "max_tokens_per_micro_batch")
def test_how_much_a_micro_batch_holds(tiny_model: Path) -> None:
    def rows(**cap: int) -> list[int]:
        return [
            len(batch.indices) for batch in micro_batches(samples(), make_updater(tiny_model, **cap).forward.layout())
        ]

    assert rows() == [4]
    assert rows(max_rows_per_micro_batch=3) == [2, 2]
    assert len(rows(max_tokens_per_micro_batch=14)) >= 3


@shows("packing", "gradient_checkpointing", "attn_implementation", "load_in_4bit")
def test_how_the_model_computes(tiny_model: Path) -> None:
    plain = make_updater(tiny_model).policy
    assert takes_packed(plain.model) and not takes_packed(make_updater(tiny_model, packing=False).policy.model)
    assert not plain.model.is_gradient_checkpointing
    assert make_updater(tiny_model, gradient_checkpointing="on").policy.model.is_gradient_checkpointing
    for wanted in "eager", "sdpa":
        model = make_updater(tiny_model, attn_implementation=wanted, packing=False).policy.model
        assert model.config._attn_implementation == wanted
    with pytest.raises(EmailRLError, match="LOAD_IN_4BIT needs a CUDA GPU"):
        make_updater(tiny_model, load_in_4bit=True)


@shows("reward_clip_low", "reward_clip_high")
def test_rewards_are_clipped(tiny_model: Path) -> None:
    free = updated(tiny_model)
    assert not same(free, updated(tiny_model, reward_clip_low=-0.1))
    assert not same(free, updated(tiny_model, reward_clip_high=0.1))
    assert same(free, updated(tiny_model, reward_clip_low=-10, reward_clip_high=10))
