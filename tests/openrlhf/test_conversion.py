"""OpenRLHF's command lines: every flag has a place, and what each comes to or why it cannot be converted."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from generate import openrlhf_reference

from emailrl.base.errors import UsageError
from emailrl.openrlhf import FLAGS, parse, to_toml
from emailrl.openrlhf.convert import COUNTS, JOINT, NAMES
from emailrl.settings import Settings, load_settings
from emailrl.settings.names import by_name


def settings_of(text: str, folder: Path) -> Settings:
    (folder / "emailrl.toml").write_text(to_toml(text), encoding="utf-8")
    return load_settings(cwd=folder, environ={}, trust=True)


def values_of(text: str) -> dict[str, Any]:
    """Setting → value of the active lines."""
    return {key: value for table in tomllib.loads(to_toml(text)).values() for key, value in table.items()}


BATCH = "--rollout_batch_size 16 --n_samples_per_prompt 4"
CREDENTIALS = "--remote_rm_url; credentials removed: set the full URL as EMAILRL_REWARD"
ROOT = Path(__file__).resolve().parents[2]
SEED = ROOT.parent / "shared" / "seeds" / "openrlhf_options.zh.txt"


# What may stand without a setting: placement by role, weight sync, pairs, separate models, DeepSpeed's own.
WITHOUT_A_SETTING = {
    *(f"{role}_num_{what}" for role in ("critic", "ref", "reward") for what in ("nodes", "gpus_per_node")),
    *("vllm_sync_backend", "colocate_actor_ref", "colocate_critic_reward", "reward_pretrain", "critic_pretrain"),
    "normalize_reward",
    *("overlap_comm", "ds_tensor_parallel_size", "ring_attn_size", "ring_head_stride"),
}


def test_every_documented_flag_is_known_and_only_what_has_no_counterpart_is_without_a_setting() -> None:
    assert {flag.name for flag in FLAGS if not flag.settings} == WITHOUT_A_SETTING
    assert all(flag.note for flag in FLAGS if not flag.settings)
    assert len(FLAGS) >= 113
    if not SEED.is_file():
        pytest.skip(f"no list of OpenRLHF's options at {SEED}")
    listed = set(re.findall(r"^--(\w+)", SEED.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(listed) > 90 and listed <= NAMES.keys()


def test_flags_and_settings_are_named_once_and_exist() -> None:
    names = [name for flag in FLAGS for name in (flag.name, flag.dotted) if name]
    assert len(names) == len(set(names))
    assert [key for flag in FLAGS for key in flag.settings if key not in by_name()] == []
    assert {*JOINT, *COUNTS} <= {flag.name for flag in FLAGS}


def test_the_page_is_current_and_has_every_flag_once() -> None:
    page = openrlhf_reference()
    assert (ROOT / "docs/reference/openrlhf.md").read_text(encoding="utf-8").endswith(page), "run `make docs`"
    assert sorted(re.findall(r"^\| `--(\w+)` \|", page, re.MULTILINE)) == sorted(flag.name for flag in FLAGS)


NEEDS = {
    "train_batch_size": "--rollout_batch_size 8 --n_samples_per_prompt 2",
    **dict.fromkeys(("vllm_is_truncated_threshold", "use_icepop", "is_correction_type"), "--enable_vllm_is_correction"),
    "dynamic_filtering_reward_range": "--dynamic_filtering",
    "overlong_penalty_factor": "--overlong_buffer_len 100",
    "async_train": "--vllm_num_engines 2",
    "async_queue_size": "--async_train --vllm_num_engines 2",
}


VALUES = {
    **{"advantage_estimator": "gae", "policy_loss_type": "ppo", "kl_estimator": "k2", "is_correction_type": "icepop"},
    **{"actor_learning_rate": "1e-6", "critic_learning_rate": "9e-6", "lr_scheduler": "cosine_with_min_lr"},
    **{"attn_implementation": "sdpa", "param_dtype": "fp32", "input_template": "'Q: {}'", "dual_clip": "3.0"},
    **dict.fromkeys(("gamma", "lambd", "top_p"), "0.9"),
    **dict.fromkeys(("lora_dropout", "lr_warmup_ratio", "min_lr_ratio"), "0.1"),
    "vllm_gpu_memory_utilization": "0.5",
}


def words(flag: Any) -> str:
    value = {"": "", "X": VALUES.get(flag.name, "3"), "L H": "0.3 0.4", "X …": "q_proj v_proj"}[flag.takes]
    return f"--{flag.name} {value}"


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.settings], ids=lambda flag: flag.name)
def test_every_flag_comes_to_the_settings_the_page_names(flag: Any) -> None:
    text = f"{NEEDS.get(flag.name, '')} {words(flag)}"
    written = set(values_of(text)) | set(re.findall(r"\w+", "\n".join(to_toml(text).splitlines()[2:])))
    assert set(flag.settings) <= written


def test_all_flags_at_once_load(tmp_path: Path) -> None:
    settings = settings_of(" ".join(map(words, FLAGS)), tmp_path)
    assert settings.training.algorithm == "ppo" and settings.algorithm.gae_lambda == 0.9
    assert settings.algorithm.importance_correction == "icepop"


def test_a_shells_quoting_equals_signs_and_continuations() -> None:
    text = (
        "python3 -m openrlhf.cli.train_ppo_ray \\\n  --pretrain 'a folder/model' \\\r\n --kl_estimator=k2"
        " --use_kl_loss\\\n"
        ' --eps_clip_low_high 0.2 0.28 \\ \n --input_template="Q: {}"  # a comment\n --save_steps -1 --use_wandb='
    )
    words = {"pretrain": ["a folder/model"], "kl_estimator": ["k2"], "use_kl_loss": [], "save_steps": ["-1"]}
    words |= {"eps_clip_low_high": ["0.2", "0.28"], "input_template": ["Q: {}"], "use_wandb": [""]}
    assert parse(text) == words


def test_old_and_dotted_names_are_one_flag_and_of_one_that_comes_twice_the_last_counts() -> None:
    old = "--actor_learning_rate 3e-6 --n_samples_per_prompt 4 --lora_rank 8 --advantage_estimator group_norm"
    new = "--actor.adam.lr 3e-6 --rollout.n-samples-per-prompt 4 --ds.lora.rank 8 --algo.advantage.estimator group_norm"
    assert to_toml(old) == to_toml(new)
    assert values_of("--max_steps 3 --max_steps 5")["max_steps"] == 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("--kl_estimater k3", "Unknown flag of OpenRLHF: --kl_estimater. Did you mean --kl_estimator?"),
        ("--algo.kl.estimater k3", "Did you mean --algo.kl.estimator?"),
        ("--quux 3", "See docs/reference/openrlhf.md for all flags"),
        ("group_norm", "Expected a flag first"),
        ("--pretrain 'open", "cannot be read: No closing quotation"),
        ("--advantage_estimator rloo --n_samples_per_prompt 1", "NUM_GENERATIONS=1 is too low for rloo"),
    ],
)
def test_what_cannot_be_read(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        to_toml(text)


REFUSED = """
    --temperature | --temperature 1 2 | --use_kl_loss true | --eps_clip_low_high 0.2 | --target_modules | --pretrain=
    | --ckpt_path '' --max_steps 3 | --remote_rm_url=' ' | --top_p nan | --max_norm inf | --adam_betas a b
    | --n_samples_per_prompt 2.5 | --vllm_num_engines -1 | --async_train | --zero_stage 4 | --temperature hot
    | --async_train --async_queue_size 0 --vllm_num_engines 1 | --max_steps 2.5 | --save_steps soon
    | --rollout_batch_size many | --actor_num_gpus_per_node 0 --rollout_batch_size 8 | --train_batch_size 0
    | --actor_num_nodes 0 --train_batch_size 8 | --kl_estimator k4 | --temperature -1 | --advantage_estimator ppo
    | --vllm_tensor_parallel_size 0 --vllm_num_engines 2 --colocate_all_models | --policy_loss_type dpo
    | --lr_scheduler polynomial | --lora_rank 0 | --input_template plain | --prompt_split test
    | --remote_rm_url http://a/,http://b/
"""


@pytest.mark.parametrize("text", list(map(str.strip, REFUSED.split("|"))))
def test_what_cannot_be_converted_names_the_flag(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        to_toml(text)
    assert any(flag in str(caught.value) for flag in re.findall(r"--\w+", text))


@pytest.mark.parametrize(
    "text",
    [
        *(f"--use_wandb{rest}" for rest in (" sk-secret", "=sk-secret", " sk-secret sk-secret", " 'sk-secret")),
        *("--use_wandb_key sk-secret", "--use_wandb_key=sk-secret", "--logger.wandb.key sk-secret", "sk-secret"),
    ],
)
def test_a_token_is_never_written(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        said = to_toml(text)
    except UsageError as error:
        said = str(error)
    else:
        assert 'wandb_mode = "online"' in said and "WANDB_API_KEY" in said
    assert "secret" not in said


def test_reinforce_with_a_baseline(tmp_path: Path) -> None:
    text = "--advantage_estimator reinforce_baseline --n_samples_per_prompt 8 --init_kl_coef 1e-5 --use_kl_loss"
    expected = {"algorithm": "reinforce_pp_baseline", "num_generations": 8, "beta": 1e-5, "kl_in": "loss"}
    expected |= {"kl_estimator": "k2", "whiten_advantages": True, "ratio_level": "token", "min_group_std": 0.0}
    expected |= {"loss_aggregation": "token_mean", "reward_clip_low": -10.0, "reward_clip_high": 10.0}
    assert values_of(text + " --kl_estimator k2") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # The objective is OpenRLHF's where it is not given.
        ("", {"algorithm": "ppo", "whiten_advantages": True, "kl_in": "reward", "kl_estimator": "k1"}),
        ("--advantage_estimator group_norm", {"algorithm": "grpo", "whiten_advantages": False, "kl_in": "reward"}),
        ("--advantage_estimator dr_grpo --init_kl_coef 0", {"loss_aggregation": "token_mean", "beta": 0.0}),
        (
            "--advantage_estimator group_norm --policy_loss_type gspo",
            {"ratio_level": "sequence", "loss_aggregation": "sequence_mean", "kl_in": "loss"},
        ),
        # 16 questions x 4 rollouts = 64 trajectories, 32 to an update: two updates a step.
        (f"{BATCH} --train_batch_size 32", {"per_device_train_batch_size": 16, "num_mini_batches": 2}),
        (f"{BATCH} --train_batch_size 48", {"per_device_train_batch_size": 16, "num_mini_batches": 2}),
        (f"{BATCH} --train_batch_size 999", {"per_device_train_batch_size": 16, "num_mini_batches": 1}),
        (
            "--train_batch_size 32 --n_samples_per_prompt 4",
            {"per_device_train_batch_size": 8, "num_mini_batches": None},
        ),
        ("--rollout_batch_size 16", {"per_device_train_batch_size": 16, "num_mini_batches": None}),
        ("--eps_clip 0.3", {"clip_low": 0.3, "clip_high": 0.3}),
        ("--eps_clip 0.3 --eps_clip_low_high 0.2 0.28", {"clip_low": 0.2, "clip_high": 0.28}),
        ("--lr_scheduler cosine_with_min_lr", {"lr_scheduler": "cosine", "min_lr_ratio": 0.1}),
        ("--lr_scheduler cosine_with_min_lr --min_lr_ratio 0.2", {"lr_scheduler": "cosine", "min_lr_ratio": 0.2}),
        ("--max_samples 1e3", {"train_dataset_size": 1000}),
        ("--bf16 --flash_attn", {"dtype": "bf16", "attn_implementation": "flash_attention_2"}),
        ("--bf16 --param_dtype fp32", {"dtype": "fp32"}),
        ("--top_k -1", {"top_k": 0}),
        ("--top_k 20", {"top_k": 20}),
        ("--save_steps -1", {"save_steps": 1_000_000_000}),
        ("--prompt_max_len 3000", {"max_model_len": 4024}),
        ("--prompt_max_len 3000 --generate_max_len 500", {"max_model_len": 3500, "max_tokens": 500}),
        ("--micro_train_batch_size 2", {"max_rows_per_micro_batch": 2}),
        ("--remote_rm_url http://h:5000/get_reward", {"reward": "http://h:5000/get_reward"}),
        ("--remote_rm_url my/r.py --dynamic_filtering", {"reward": "my/r.py:reward_func", "filter_on": "reward"}),
        ("--dynamic_filtering", {"dynamic_filtering": True, "filter_on": "accuracy"}),
        ("--agent_func_path a.py", {"environment": "a.py:Environment"}),
        (
            "--enable_vllm_is_correction",
            {"importance_correction": "tis", "correction_low": 0.5, "correction_high": 5.0},
        ),
        ("--enable_vllm_is_correction --use_icepop", {"importance_correction": "icepop"}),
        (
            "--enable_vllm_is_correction --is_correction_type seq-mask-tis --vllm_is_truncated_threshold 0.9 2",
            {"importance_correction": "sequence_mask", "correction_low": 0.9, "correction_high": 2.0},
        ),
        ("--advantage_estimator reinforce --gamma 0.9", {"gamma": 0.9}),
        ("--gamma 0.9 --lambd 0.8 --value_clip 0.3", {"gamma": 0.9, "gae_lambda": 0.8, "value_clip": 0.3}),
        ("--init_kl_coef 0.1 --kl_target 0.2", {"beta": 0.1, "kl_target": 0.2}),
        ("--reward_clip_range -inf 5", {"reward_clip_high": 5.0, "reward_clip_low": None}),
        ("--use_wandb=", {"wandb_mode": "disabled"}),
        ("--n_samples_per_prompt 8.0 --train_batch_size 16", {"per_device_train_batch_size": 2}),
        ("--target_modules q_proj v_proj", {"target_modules": "q_proj,v_proj"}),
        ("--vllm_num_engines 1", {"engine": "vllm"}),
        ("--actor_num_nodes 2 --actor_num_gpus_per_node 8", {"nnodes": 2, "nproc": 8}),
        ("--zero_stage 3 --adam_offload", {"shard": "host", "shard_offload": True}),
        (
            "--rollout_batch_size 64 --actor_num_nodes 2 --actor_num_gpus_per_node 8",
            {"per_device_train_batch_size": 4, "nnodes": 2, "nproc": 8},
        ),
        ("--rollout_batch_size 3 --actor_num_gpus_per_node 8", {"per_device_train_batch_size": 1, "nproc": 8}),
        ("--zero_stage 2", {"shard": "off"}),
        ("--deepspeed_enable_sleep", {"shard_offload": True}),
        ("--async_train --vllm_num_engines 2", {"max_staleness": 1}),
        ("--async_train --async_queue_size 3 --vllm_num_engines 2", {"max_staleness": 3}),
        ("--vllm_num_engines 0", {"engine": "transformers"}),
        (
            "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --actor_num_gpus_per_node 8",
            {"engine": "vllm", "vllm_urls": "", "vllm_tensor_parallel_size": 2, "nproc": 8},
        ),
        ("--load_checkpoint", {"resume": "auto"}),
        ("--save_hf_ckpt", {"export_format": "merged", "export_dir": "./ckpt"}),
        ("--save_hf_ckpt --save_path out", {"export_format": "merged", "export_dir": "out"}),
        ("--use_tensorboard events", {"tensorboard": True, "tensorboard_dir": "events"}),
        ("--gradient_checkpointing", {"gradient_checkpointing": "on"}),
        ("--max_epochs 2 --num_episodes 3", {"update_epochs": 2, "num_train_epochs": 3}),
    ],
)
def test_values(text: str, expected: dict[str, Any]) -> None:
    values = values_of(text)
    assert {key: values.get(key) for key in expected} == expected


SHARED = "--colocate_all_models --actor_num_gpus_per_node 8 --vllm_tensor_parallel_size 2"


@pytest.mark.parametrize(
    ("text", "absent", "told"),
    [
        ("--use_icepop", "importance_correction", "--use_icepop: no effect without --enable_vllm_is_correction"),
        ("--vllm_is_truncated_threshold 0.5 5", "correction_low", "no effect, it needs IMPORTANCE_CORRECTION"),
        ("--advantage_estimator rloo --lambd 0.9", "gae_lambda", "--lambd: no effect, it needs ADVANTAGE_"),
        ("--advantage_estimator rloo --gamma 0.9", "gamma", "--gamma: no effect, it needs"),
        ("--init_kl_coef 0 --kl_target 0.1", "kl_target", "--kl_target: no effect, it needs BETA"),
        ("--micro_train_batch_size 2 --use_dynamic_batch", "max_rows_per_micro_batch", "_batch: always on"),
        ("--dynamic_filtering_reward_range 0 1", "filter_low", "no effect, it needs DYNAMIC_FILTERING"),
        ("--overlong_penalty_factor 2", "overlong_penalty", "no effect, it needs OVERLONG_BUFFER"),
        ("--prompt_data corbt/enron_emails_sample_questions", "questions", "the default when `questions` is not set"),
        ("--async_queue_size 2", "max_staleness", "--async_queue_size: no effect without --async_train"),
        (
            "--vllm_num_engines 4 --async_train --colocate_all_models",
            "vllm_urls",
            "vLLM has its own GPUs, set vllm_urls",
        ),
        ("--ring_attn_size 2", "ring_attn_size", "--ring_attn_size: DeepSpeed's own"),
        ("--vllm_num_engines 4", "vllm_urls", "start them with emailrl serve --replicas 4 and set vllm_urls"),
        ("", "lora_rank", "--lora_rank not given: OpenRLHF trains all weights"),
        ("", "max_steps", "--max_steps not given: computed there from --num_episodes"),
        ("--reward_clip_range -inf 5", "reward_clip_low", "--reward_clip_range: an infinite bound is no bound"),
        # Engines that share GPUs are as many as the ranks make.
        (f"{SHARED} --vllm_num_engines 8", "", "one for each vllm_tensor_parallel_size of them: 4"),
        ("--colocate_all_models --vllm_num_engines 2", "", "of them: 1"),
        # A value that does not stay as it was says so.
        (f"{BATCH} --train_batch_size 48", "", "= 64 / 48, rounded up to 2"),
        ("--train_batch_size 30 --n_samples_per_prompt 4", "", "= 30 / 4, rounded down to 7: one update per step"),
        ("--train_batch_size 3 --n_samples_per_prompt 4", "", "= 3 / 4, rounded up to 1"),
        ("--top_k -1", "", "--top_k -1: all, which is 0 here"),
        ("--lr_scheduler constant_with_warmup", "", 'lr_scheduler = "constant"  # --lr_scheduler constant_with_warmup'),
        # Credentials are not written.
        ("--remote_rm_url http://me:hunter2@host:5/s", "", f'reward = "http://host:5/s"  # {CREDENTIALS}'),
        (
            "--remote_rm_url 'https://host/s?api_key=hunter2&v=1'",
            "",
            f'reward = "https://host/s?api_key=***&v=1"  # {CREDENTIALS}',
        ),
    ],
)
def test_what_differs_is_a_comment(text: str, absent: str, told: str) -> None:
    toml = to_toml(text)
    assert told in toml and "hunter2" not in toml and absent not in values_of(text)


def test_what_does_not_differ_has_no_comment() -> None:
    assert "rounded" not in to_toml(f"{BATCH} --train_batch_size 32")
    for engines in (0, 4):
        assert "follows from the ranks" not in to_toml(f"{SHARED} --vllm_num_engines {engines}")


def test_awkward_texts_come_through_toml(tmp_path: Path) -> None:
    text = "--pretrain 'a\"b\\c \N{GRINNING FACE}\x7f' --input_template 'Frage: {}\n# not a comment'"
    text += " --wandb_run_name 'x # y'"
    settings = settings_of(text, tmp_path)
    assert settings.model.name == 'a"b\\c \N{GRINNING FACE}\x7f'
    assert settings.agent.question_template == "Frage: {}\n# not a comment"
    assert settings.tracking.wandb_name == "x # y"
