"""OpenRLHF's flags: each of its list has a place, a command line is read as a shell reads it and comes to TOML."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from generate import openrlhf_reference
from openrlhf.converted import settings_of, values_of

from emailrl.openrlhf import FLAGS, find_flag, to_toml
from emailrl.openrlhf.convert import COUNTS, JOINT
from emailrl.openrlhf.flags import NAMES
from emailrl.settings.names import by_name

ROOT = Path(__file__).resolve().parents[2]


SEED = ROOT.parent / "shared" / "seeds" / "openrlhf_options.zh.txt"


# The flags OpenRLHF 0.9.2 documents for PPO: what each stands for is in emailrl/openrlhf/table.py.
DOCUMENTED: list[str] = re.findall(
    r"\w+",
    """
    pretrain reward_pretrain critic_pretrain prompt_data input_key label_key output_key apply_chat_template
    input_template max_samples prompt_split actor_num_nodes actor_num_gpus_per_node critic_num_nodes
    critic_num_gpus_per_node ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node
    vllm_num_engines vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_sync_backend enforce_eager
    enable_prefix_caching colocate_all_models colocate_actor_ref colocate_critic_reward vllm_enable_sleep
    deepspeed_enable_sleep zero_stage gradient_checkpointing adam_offload overlap_comm ds_tensor_parallel_size
    ring_attn_size ring_head_stride train_batch_size rollout_batch_size micro_train_batch_size
    micro_rollout_batch_size n_samples_per_prompt actor_learning_rate critic_learning_rate lr_scheduler
    lr_warmup_ratio max_epochs num_episodes max_steps init_kl_coef kl_target kl_horizon use_kl_loss kl_estimator
    eps_clip eps_clip_low_high dual_clip gamma lambd advantage_estimator agent_func_path remote_rm_url
    async_train async_queue_size dynamic_filtering dynamic_filtering_reward_range packing_samples
    use_dynamic_batch train_max_tokens_per_gpu rollout_max_tokens_per_gpu prompt_max_len generate_max_len
    temperature top_p top_k param_dtype attn_implementation load_in_4bit lora_rank lora_alpha lora_dropout
    target_modules enable_vllm_is_correction vllm_is_truncated_threshold use_icepop save_path ckpt_path
    load_checkpoint save_steps save_hf_ckpt max_ckpt_num logging_steps eval_steps use_wandb use_tensorboard
    """,
)


# What may stand without a setting: placement by role, weight sync, pairs, separate models, DeepSpeed's own.
WITHOUT_A_SETTING = {
    *(f"{role}_num_{what}" for role in ("critic", "ref", "reward") for what in ("nodes", "gpus_per_node")),
    *("vllm_sync_backend", "colocate_actor_ref", "colocate_critic_reward", "reward_pretrain", "critic_pretrain"),
    "normalize_reward",
    *("overlap_comm", "ds_tensor_parallel_size", "ring_attn_size", "ring_head_stride"),
}


def test_every_documented_flag_is_known() -> None:
    assert [name for name in DOCUMENTED if name not in NAMES] == []


def test_every_flag_of_the_list_is_known() -> None:
    if not SEED.is_file():
        pytest.skip(f"no list of OpenRLHF's options at {SEED}")
    listed = re.findall(r"^--(\w+)", SEED.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(listed)) > 90
    assert set(listed) == set(DOCUMENTED)


def test_only_what_has_no_counterpart_is_without_a_setting() -> None:
    assert {flag.name for flag in FLAGS if not flag.settings} == WITHOUT_A_SETTING
    assert all(flag.note for flag in FLAGS if not flag.settings)


def test_flags_and_settings_are_named_once_and_exist() -> None:
    names = [name for flag in FLAGS for name in (flag.name, flag.dotted) if name]
    assert len(names) == len(set(names))
    assert [key for flag in FLAGS for key in flag.settings if key not in by_name()] == []
    assert {*JOINT, *COUNTS} <= {flag.name for flag in FLAGS}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/reference/openrlhf.md").read_text(encoding="utf-8").endswith(openrlhf_reference()), (
        "run `make docs`"
    )


def test_the_page_has_every_flag_once() -> None:
    rows = re.findall(r"^\| `--(\w+)` \|", openrlhf_reference(), re.MULTILINE)
    assert sorted(rows) == sorted(flag.name for flag in FLAGS)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.settings], ids=lambda flag: flag.name)
def test_every_flag_comes_to_the_settings_the_page_names(flag: Any) -> None:
    value = {"nothing": "", "one": VALUES.get(flag.name, "3"), "two": "0.3 0.4", "some": "q_proj v_proj"}[flag.takes]
    text = f"{NEEDS.get(flag.name, '')} --{flag.name} {value}"
    written = set(values_of(text)) | set(re.findall(r"\w+", "\n".join(to_toml(text).splitlines()[2:])))
    assert set(flag.settings) <= written


NEEDS = {
    "train_batch_size": "--rollout_batch_size 8 --n_samples_per_prompt 2",
    **dict.fromkeys(("vllm_is_truncated_threshold", "use_icepop", "is_correction_type"), "--enable_vllm_is_correction"),
    "dynamic_filtering_reward_range": "--dynamic_filtering",
    "overlong_penalty_factor": "--overlong_buffer_len 100",
    "async_train": "--vllm_num_engines 2",
    "async_queue_size": "--async_train --vllm_num_engines 2",
}


VALUES = {
    "actor_learning_rate": "1e-6",
    "advantage_estimator": "gae",
    "attn_implementation": "sdpa",
    "critic_learning_rate": "9e-6",
    "dual_clip": "3.0",
    "gamma": "0.9",
    "input_template": "'Q: {}'",
    "is_correction_type": "icepop",
    "kl_estimator": "k2",
    "lambd": "0.9",
    "lora_dropout": "0.1",
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": "0.1",
    "min_lr_ratio": "0.1",
    "param_dtype": "fp32",
    "policy_loss_type": "ppo",
    "top_p": "0.9",
    "vllm_gpu_memory_utilization": "0.5",
}


def test_all_flags_at_once_load(tmp_path: Path) -> None:
    """Every flag that takes a place in the file, through the loader that train uses."""
    text = " ".join(
        f"--{flag.name} "
        + {"nothing": "", "one": VALUES.get(flag.name, "3"), "two": "0.3 0.4", "some": "q_proj v_proj"}[flag.takes]
        for flag in FLAGS
    )
    settings = settings_of(text, tmp_path)
    assert settings.training.algorithm == "ppo" and settings.algorithm.gae_lambda == 0.9
    assert settings.algorithm.importance_correction == "icepop"


def test_the_nearest_flag_is_found_by_either_name() -> None:
    assert find_flag("--kl-estimator") is find_flag("algo.kl.estimator")
