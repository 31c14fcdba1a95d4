"""What the conversion of OpenRLHF's flags says in comments: defaults that differ, roundings, credentials left out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from emailrl.openrlhf import to_toml
from emailrl.settings import load_settings


def comments_of(text: str) -> str:
    return "\n".join(line for line in to_toml(text).splitlines() if line.startswith("#"))


def test_every_default_that_differs_is_a_comment_of_its_own(tmp_path: Path) -> None:
    """All but what the objective sets: with the ``#`` of these lines taken away, the file is OpenRLHF's own."""
    lines = re.findall(r"^# (\w+) = (.+?)  # --(\w+) not given", to_toml(""), re.MULTILINE)
    assert {key: tomllib.loads(f"x = {value}")["x"] for key, value, _ in lines} == {
        **{"dtype": "bf16", "max_model_len": 2048, "lora_alpha": 16},
        **{"train_dataset_size": 100_000_000, "max_tokens": 1024, "temperature": 1.0},
        **{"max_batch_trajectories": 8, "reward_batch_size": 8, "num_train_epochs": 1, "num_generations": 1},
        **{"per_device_train_batch_size": 1024, "num_mini_batches": 8, "max_rows_per_micro_batch": 4},
        **{"learning_rate": 1e-6, "critic_learning_rate": 9e-6, "warmup_ratio": 0.03, "lr_scheduler": "cosine"},
        **{"min_lr_ratio": 0.1, "adam_beta2": 0.95, "packing": False, "gradient_checkpointing": "off"},
        **{"eval_steps": 10**9, "save_steps": 10**9, "export_dir": "./ckpt", "wandb_mode": "disabled"},
        **{"wandb_project": "openrlhf_train_ppo", "shard": "off"},
    }
    text = re.sub(r"^# (\w+ = .+?  # --\w+ not given)", r"\1", to_toml(""), flags=re.MULTILINE)
    (tmp_path / "emailrl.toml").write_text(text)
    assert load_settings(cwd=tmp_path, environ={}).training.num_mini_batches == 8


def test_a_default_is_offered_only_beside_flags_that_it_matters_with() -> None:
    grpo = "--advantage_estimator group_norm --rollout_batch_size 16 --n_samples_per_prompt 16"
    said = comments_of(grpo)
    assert "critic_learning_rate" not in said and "vllm_enable_sleep" not in said
    assert "# num_mini_batches = 2  # --train_batch_size not given: OpenRLHF's default is 128" in said
    assert "# max_batch_trajectories = 8" in said and "max_batch_" not in comments_of("--vllm_num_engines 2")
    assert "max_batch_" not in to_toml("--micro_rollout_batch_size 4 --vllm_num_engines 2")
    assert '# vllm_enable_sleep = "off"  # --vllm_enable_sleep not given' in comments_of("--vllm_num_engines 1")
    assert "# vllm_gpu_memory_utilization = 0.95  #" in comments_of("--vllm_num_engines 1")
    off = '# importance_correction = "off"  # --enable_vllm_is_correction not given'
    assert off in comments_of("--vllm_num_engines 1") and off not in said
    assert off not in comments_of("--vllm_num_engines 1 --async_train")  # stale rollouts need the correction
    sharded_only = "shard_offload acts on a sharded base only"
    assert sharded_only in comments_of("--deepspeed_enable_sleep") and sharded_only not in said
    assert sharded_only not in comments_of("--deepspeed_enable_sleep --zero_stage 3")
    only_update = comments_of("--train_batch_size 32")
    assert "num_mini_batches" not in only_update and "per_device_train_batch_size" not in only_update
    assert "lora_alpha" not in comments_of("--lora_alpha 8")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--rollout_batch_size 16 --n_samples_per_prompt 4 --train_batch_size 48", "= 64 / 48, rounded up to 2"),
        ("--train_batch_size 30 --n_samples_per_prompt 4", "= 30 / 4, rounded down to 7: one update per step"),
        ("--train_batch_size 3 --n_samples_per_prompt 4", "= 3 / 4, rounded up to 1"),
        ("--top_k -1", "--top_k -1: all, which is 0 here"),
        ("--lr_scheduler constant_with_warmup", 'lr_scheduler = "constant"  # --lr_scheduler constant_with_warmup'),
    ],
)
def test_a_value_that_does_not_stay_as_it_was_says_so(text: str, told: str) -> None:
    assert told in to_toml(text)
    assert "rounded" not in to_toml("--rollout_batch_size 16 --n_samples_per_prompt 4 --train_batch_size 32")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:hunter2@host:5000/score", "http://host:5000/score"),
        ("https://host/score?api_key=hunter2&v=1", "https://host/score?api_key=***&v=1"),
    ],
)
def test_credentials_in_an_address_are_not_written(url: str, shown: str) -> None:
    toml = to_toml(f"--remote_rm_url '{url}'")
    assert "hunter2" not in toml
    [line] = [line for line in toml.splitlines() if line.startswith("reward = ")]
    assert line == f'reward = "{shown}"  # --remote_rm_url; credentials removed: ' + (
        "set the full URL as EMAILRL_REWARD"
    )
