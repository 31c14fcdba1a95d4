"""Convert flags to settings, one by one or several together, with notes for flags without a setting."""

from __future__ import annotations

import math
from typing import Final

from emailrl.errors import UsageError
from emailrl.openrlhf.conversion import Conversion, Special
from emailrl.openrlhf.flags import FLAGS, Flag, Given, hint_of, read_value
from emailrl.openrlhf.placement import take_asynchronous, take_colocation, take_engines, take_zero_stage
from emailrl.questions.rows import HUB_QUESTIONS
from emailrl.settings.names import by_name

NEVER: Final = 1_000_000_000
"""Save or evaluation interval for OpenRLHF's -1 (none in between)."""
ESTIMATORS: Final = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "rloo": "rloo",
    "dr_grpo": "dr_grpo",
}
WHITENED: Final = ("gae", "reinforce", "reinforce_baseline")
SIZES: Final = ("rollout_batch_size", "train_batch_size", "n_samples_per_prompt", "micro_train_batch_size")
COUNTS: Final = ("actor_num_nodes", "actor_num_gpus_per_node", "vllm_tensor_parallel_size")
"""Numbers that others are divided by."""
JOINT: Final = frozenset(
    ("train_batch_size", "rollout_batch_size", "micro_train_batch_size", "advantage_estimator", "policy_loss_type",
     "use_kl_loss", "kl_estimator", "async_queue_size", "enable_vllm_is_correction", "use_icepop", "is_correction_type")
)  # fmt: skip
"""Flags that are converted together with others."""
CONSTANTS: Final = {
    "bf16": "bf16",
    "flash_attn": "flash_attention_2",
    "gradient_checkpointing": "on",
    "load_checkpoint": "auto",
}
"""Values for flags without an argument, if not ``true``."""
ALWAYS_ON: Final = {
    "apply_chat_template": "chat_template replaces the model's own",
    "use_dynamic_batch": "max_tokens_per_micro_batch",
}
SUPERSEDED: Final = {"bf16": "param_dtype", "eps_clip": "eps_clip_low_high", "flash_attn": "attn_implementation"}
"""Flags superseded by another."""
NEEDED_BY: Final = {
    "enable_vllm_is_correction": ("correction_low", "correction_high"),
    "dynamic_filtering": ("filter_low", "filter_high"),
    "overlong_buffer_len": ("overlong_penalty",),
}
"""Flag → the settings that have no effect without it."""


def take_all(given: Given) -> Conversion:
    """Convert all given flags; raises UsageError for a value of the wrong type, and for a count below 1."""
    taken = Conversion()
    for name in set(COUNTS) & set(given):
        _size(name, given[name][0])
    for flag in FLAGS:
        if flag.name in given:
            _take(flag, given[flag.name], given, taken)
    _take_batches(given, taken)
    _take_objective(given, taken)
    return taken


def _take(flag: Flag, values: list[str], given: Given, taken: Conversion) -> None:
    """Convert one flag to its settings, or note why it has none."""
    why = f"--{flag.name}"
    if not flag.settings:
        taken.notes.append(f"{why}: {flag.note}")
    elif flag.name in ALWAYS_ON:
        taken.notes.append(f"{why}: always on ({ALWAYS_ON[flag.name]})")
    elif flag.name in SPECIAL:
        try:
            SPECIAL[flag.name](values, given, taken)
        except ValueError:
            raise UsageError(f"{why} takes a whole number.", hint_of(flag)) from None
    elif flag.name not in JOINT and SUPERSEDED.get(flag.name) not in given:
        values = values or [CONSTANTS.get(flag.name, "true")]
        values = values * len(flag.settings) if len(values) == 1 else values
        for key, value in zip(flag.settings, values, strict=True):
            taken.set(key, read_value(flag, by_name()[key], value), why)


# -- flags whose value is not that of a setting


def _scheduler(values: list[str], given: Given, taken: Conversion) -> None:
    name = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}.get(values[0], values[0])
    taken.set("lr_scheduler", name, "--lr_scheduler" + f" {values[0]}" * (name != values[0]))
    if values[0] == "cosine_with_min_lr":
        taken.set("min_lr_ratio", 0.1, "--lr_scheduler cosine_with_min_lr")


def _prompts(values: list[str], given: Given, taken: Conversion) -> None:
    if values[0] == HUB_QUESTIONS:
        taken.notes.append("--prompt_data: the default when `questions` is not set")
    else:
        taken.set("questions", values[0], "--prompt_data, a question file (docs/data.md)")


def _reward(values: list[str], given: Given, taken: Conversion) -> None:
    if "," in values[0] and "://" in values[0]:
        raise UsageError("--remote_rm_url lists several servers.", "Give one URL, for example of a load balancer.")
    taken.set("reward", f"{values[0]}:reward_func" if values[0].endswith(".py") else values[0], "--remote_rm_url")


def _minus_one(key: str, stands_for: int, meaning: str) -> Special:
    def take(values: list[str], given: Given, taken: Conversion) -> None:
        count = int(values[0])
        taken.set(key, stands_for if count == -1 else count, f"--{key} {count}" + f": {meaning}" * (count == -1))

    return take


def _window(values: list[str], given: Given, taken: Conversion) -> None:
    prompt, completion = (
        int(given[name][0]) if name in given else 1024 for name in ("prompt_max_len", "generate_max_len")
    )
    taken.set("max_model_len", prompt + completion, "--prompt_max_len + --generate_max_len")


def _filter(values: list[str], given: Given, taken: Conversion) -> None:
    taken.set("dynamic_filtering", True, "--dynamic_filtering")
    own = "remote_rm_url" in given
    taken.set("filter_on", "reward" if own else "accuracy", "OpenRLHF filters on the scores of --remote_rm_url")


def _micro_rollout(values: list[str], given: Given, taken: Conversion) -> None:
    taken.set("reward_batch_size", int(values[0]), "--micro_rollout_batch_size")
    if int(given.get("vllm_num_engines", ["0"])[0]) == 0:  # vLLM forms its own batches
        taken.set("max_batch_trajectories", int(values[0]), "--micro_rollout_batch_size")


def _lora_rank(values: list[str], given: Given, taken: Conversion) -> None:
    if int(values[0]) == 0:
        raise UsageError("--lora_rank 0 trains all weights; emailrl trains an adapter.", "Give a rank of at least 1.")
    taken.set("lora_rank", int(values[0]), "--lora_rank")


def _wandb(values: list[str], given: Given, taken: Conversion) -> None:
    if values[0].strip():
        taken.set("wandb_mode", "online", "--use_wandb; set its key in WANDB_API_KEY, or run wandb login")
    else:
        taken.set("wandb_mode", "disabled", "--use_wandb is empty: off in OpenRLHF")


def _tensorboard(values: list[str], given: Given, taken: Conversion) -> None:
    taken.set("tensorboard", True, "--use_tensorboard")
    taken.set("tensorboard_dir", values[0], "--use_tensorboard")


def _export_format(values: list[str], given: Given, taken: Conversion) -> None:
    taken.set("export_format", "merged", "--save_hf_ckpt")
    if "save_path" not in given:
        taken.set("export_dir", "./ckpt", "--save_path not given: OpenRLHF's default")


SPECIAL: Final[dict[str, Special]] = {
    "agent_func_path": lambda values, given, taken: taken.set(
        "environment", f"{values[0]}:Environment", "--agent_func_path; its class needs start() and step()"
    ),
    "async_train": take_asynchronous,
    "colocate_all_models": take_colocation,
    "dynamic_filtering": _filter,
    "eval_steps": _minus_one("eval_steps", NEVER, "never in between"),
    "lora_rank": _lora_rank,
    "lr_scheduler": _scheduler,
    "micro_rollout_batch_size": _micro_rollout,
    "prompt_data": _prompts,
    "prompt_max_len": _window,
    "remote_rm_url": _reward,
    "save_hf_ckpt": _export_format,
    "save_steps": _minus_one("save_steps", NEVER, "never in between"),
    "target_modules": lambda values, given, taken: taken.set("target_modules", ",".join(values), "--target_modules"),
    "top_k": _minus_one("top_k", 0, "all, which is 0 here"),
    "use_tensorboard": _tensorboard,
    "use_wandb": _wandb,
    "vllm_num_engines": take_engines,
    "zero_stage": take_zero_stage,
}


# -- flags converted together


def _take_batches(given: Given, taken: Conversion) -> None:
    """Questions and updates per step; OpenRLHF counts trajectories per update instead."""
    sizes = {name: _size(name, given[name][0]) for name in SIZES if name in given}
    rollouts, update = sizes.get("n_samples_per_prompt", 1), sizes.get("train_batch_size")
    questions = sizes.get("rollout_batch_size")
    if questions is None and update is not None:
        questions = max(update // rollouts, 1)
        why = f"--train_batch_size / --n_samples_per_prompt{_rounded(update, rollouts, questions)}: one update per step"
        _take_questions(questions, f"{why} (--rollout_batch_size not given: 1024 in OpenRLHF)", taken)
    elif questions is not None:
        _take_questions(questions, "--rollout_batch_size, questions per step", taken)
        if update is not None:
            updates = -(-questions * rollouts // update)
            why = "--rollout_batch_size x --n_samples_per_prompt / --train_batch_size"
            taken.set("num_mini_batches", updates, why + _rounded(questions * rollouts, update, updates))
    if "micro_train_batch_size" in sizes and "use_dynamic_batch" not in given:
        taken.set("max_rows_per_micro_batch", sizes["micro_train_batch_size"], "--micro_train_batch_size")


def _take_questions(questions: int, why: str, taken: Conversion) -> None:
    """Questions of all ranks, of which each has its share."""
    ranks = taken.values.get("nproc", 1) * taken.values.get("nnodes", 1)
    own = max(round(questions / ranks), 1)
    share = f", / {ranks} ranks{_rounded(questions, ranks, own)}" if ranks > 1 else ""
    taken.set("per_device_train_batch_size", own, why + share)


def _size(name: str, text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not size.is_integer() or size < 1:
        raise UsageError(f"--{name} takes a whole number of at least 1.", "See docs/openrlhf.md.")
    return int(size)


def _rounded(dividend: int, divisor: int, result: int) -> str:
    """The comment for a division with a remainder."""
    if dividend == result * divisor:
        return ""
    return f" = {dividend} / {divisor}, rounded {'up' if result * divisor > dividend else 'down'} to {result}"


def _take_objective(given: Given, taken: Conversion) -> None:
    """Set the complete objective, including OpenRLHF's defaults."""
    estimator = given.get("advantage_estimator", ["gae"])[0]
    if estimator not in ESTIMATORS:
        raise UsageError(f"--advantage_estimator {estimator}: should be one of {', '.join(ESTIMATORS)}.")
    loss = given.get("policy_loss_type", ["ppo"])[0]
    if loss not in ("ppo", "gspo"):
        raise UsageError(f"--policy_loss_type {loss}: should be ppo or gspo.")
    sequence = loss == "gspo"
    why = "--advantage_estimator" + ("" if "advantage_estimator" in given else " not given: OpenRLHF's default is gae")
    theirs = "as in OpenRLHF"
    taken.set("algorithm", ESTIMATORS[estimator], why)
    taken.set("whiten_advantages", estimator in WHITENED, theirs)
    taken.set("ratio_level", "sequence" if sequence else "token", "--policy_loss_type" if sequence else theirs)
    taken.set("loss_aggregation", "sequence_mean" if sequence else "token_mean", theirs)
    in_loss = "use_kl_loss" in given
    taken.set("kl_in", "loss" if in_loss or sequence else "reward", "--use_kl_loss" if in_loss else theirs)
    if sequence and not in_loss:
        taken.flags["kl_in"] = "OpenRLHF: reward; a per-sequence ratio does not allow a per-token KL there"
    estimated = given.get("kl_estimator", ["k1"])[0]
    taken.set("kl_estimator", estimated, "--kl_estimator" if "kl_estimator" in given else theirs)
    taken.set("min_group_std", 0.0, "OpenRLHF keeps groups of equal rewards")
    if not {"reward_clip_low", "reward_clip_high"} & set(taken.values) and "reward_clip_range" not in given:
        taken.set("reward_clip_low", -10.0, theirs)
        taken.set("reward_clip_high", 10.0, theirs)
    if "enable_vllm_is_correction" in given:
        kind = "icepop" if "use_icepop" in given else given.get("is_correction_type", ["tis"])[0]
        kind = {"seq-mask-tis": "sequence_mask"}.get(kind, kind)
        taken.set("importance_correction", kind, "--enable_vllm_is_correction")
        if "vllm_is_truncated_threshold" not in given:
            taken.set("correction_low", 0.5, theirs)
            taken.set("correction_high", 5.0, theirs)
    _drop_idle(estimator, given, taken)


def _drop_idle(estimator: str, given: Given, taken: Conversion) -> None:
    """Drop settings that have no effect given the other flags."""
    for name, keys in NEEDED_BY.items():
        if name not in given:
            taken.drop(keys, f"no effect without --{name}")
    if "async_queue_size" in given and "async_train" not in given:
        taken.notes.append("--async_queue_size: no effect without --async_train")
    if "enable_vllm_is_correction" not in given:
        idle = [name for name in ("use_icepop", "is_correction_type") if name in given]
        taken.notes += [f"--{name}: no effect without --enable_vllm_is_correction" for name in idle]
    if estimator != "gae":
        taken.drop(("critic_learning_rate", "value_clip", "gae_lambda"), f"no effect: {estimator} has no critic")
    if estimator not in ("gae", "reinforce"):
        taken.drop(("gamma",), f"no effect, as in OpenRLHF: {estimator} gives one advantage per sequence")
    if taken.values.get("beta") == 0:
        taken.drop(("kl_target", "kl_horizon"), "no effect without a KL (--init_kl_coef 0)")
