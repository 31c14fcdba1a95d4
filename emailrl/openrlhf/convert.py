"""From flags to ``emailrl.toml``: the given flags and the complete objective, as it is by OpenRLHF's defaults.

Its other defaults are left out: 1024 questions per step must not be set silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from emailrl.base.errors import UsageError
from emailrl.base.plain import one_line
from emailrl.openrlhf.flags import FLAGS, Flag, Given, find_flag, hint_of, parse, read_value
from emailrl.questions.rows import HUB_QUESTIONS
from emailrl.settings import Settings, without_credentials
from emailrl.settings.names import by_name, leaves
from emailrl.settings.needs import without_effect
from emailrl.training.algorithms import in_force, override, resolve

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
COUNTS: Final[tuple[str, ...]] = (
    *("actor_num_nodes", "actor_num_gpus_per_node", "vllm_tensor_parallel_size"),
    *("rollout_batch_size", "train_batch_size", "n_samples_per_prompt", "micro_train_batch_size"),
)
"""Numbers that others are divided by."""
JOINT: Final = {
    *("train_batch_size", "rollout_batch_size", "micro_train_batch_size", "async_queue_size"),
    *("advantage_estimator", "policy_loss_type", "use_kl_loss", "kl_estimator"),
    *("enable_vllm_is_correction", "use_icepop", "is_correction_type"),
}
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
NEEDED: Final = {
    "async_queue_size": "async_train",
    "use_icepop": "enable_vllm_is_correction",
    "is_correction_type": "enable_vllm_is_correction",
}
"""Flags without a setting of their own that another flag must accompany."""
DECISIVE: Final = ("algorithm", "beta", "dynamic_filtering", "importance_correction", "overlong_buffer")
"""Settings without which others have no effect."""


@dataclass(slots=True)
class Conversion:
    """A command line converted to settings."""

    values: dict[str, Any] = field(default_factory=dict)
    """Setting (by its unique name) → value."""
    flags: dict[str, str] = field(default_factory=dict)
    """Setting → the flag it came from, or another comment for its line."""
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, why: str) -> None:
        """Set a value; an infinite bound of the reward clip is left unset."""
        if key in ("reward_clip_low", "reward_clip_high") and math.isinf(value):
            self.notes.append(f"{why}: an infinite bound is no bound ({key} omitted)")
        else:
            self.values[key], self.flags[key] = value, why


def to_toml(text: str) -> str:
    """Convert an OpenRLHF command line into an ``emailrl.toml``.

    Raises UsageError for an unreadable line, an unknown flag, an invalid value, or a combination that cannot be trained
    here. Tokens are never written.
    """
    given, taken = parse(text), Conversion()
    counts = {name: _count(name, given[name][0]) for name in COUNTS if name in given}
    for flag in FLAGS:
        if flag.name in given:
            _take(flag, given[flag.name], given, taken)
    _take_batches(counts, taken, dynamic="use_dynamic_batch" in given)
    _take_objective(given, taken)
    _drop_idle(given, taken)
    resolve(_settings_of(taken.values, taken))
    _note_the_rest(given, taken)
    return _write(taken)


def _take(flag: Flag, values: list[str], given: Given, taken: Conversion) -> None:
    """Convert one flag to its settings, or note why it has none."""
    why = f"--{flag.name}"
    if not flag.settings:
        taken.notes.append(f"{why}: {flag.note}")
    elif flag.name in ALWAYS_ON:
        taken.notes.append(f"{why}: always on ({ALWAYS_ON[flag.name]})")
    elif flag.name in SPECIAL:
        try:
            SPECIAL[flag.name](values[0] if values else "", given, taken)
        except ValueError:
            raise UsageError(f"{why} takes a whole number.", hint_of(flag)) from None
    elif flag.name not in JOINT and SUPERSEDED.get(flag.name) not in given:
        values = values or [CONSTANTS.get(flag.name, "true")]
        values = values * len(flag.settings) if len(values) == 1 else values
        for key, value in zip(flag.settings, values, strict=True):
            taken.set(key, read_value(flag, by_name()[key], value), why)


# -- flags whose value is not that of a setting


def _scheduler(value: str, given: Given, taken: Conversion) -> None:
    name = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}.get(value, value)
    taken.set("lr_scheduler", name, "--lr_scheduler" + f" {value}" * (name != value))
    if value == "cosine_with_min_lr":
        taken.set("min_lr_ratio", 0.1, "--lr_scheduler cosine_with_min_lr")


def _prompts(value: str, given: Given, taken: Conversion) -> None:
    if value == HUB_QUESTIONS:
        taken.notes.append("--prompt_data: the default when `questions` is not set")
    else:
        taken.set("questions", value, "--prompt_data, a question file (docs/guides/data.md)")


def _reward(value: str, given: Given, taken: Conversion) -> None:
    if "," in value and "://" in value:
        raise UsageError("--remote_rm_url lists several servers.", "Give one URL, for example of a load balancer.")
    taken.set("reward", f"{value}:reward_func" if value.endswith(".py") else value, "--remote_rm_url")


def _minus_one(key: str, stands_for: int, meaning: str) -> Special:
    def take(value: str, given: Given, taken: Conversion) -> None:
        count = int(value)
        taken.set(key, stands_for if count == -1 else count, f"--{key} {count}" + f": {meaning}" * (count == -1))

    return take


def _window(value: str, given: Given, taken: Conversion) -> None:
    completion = int(given.get("generate_max_len", ["1024"])[0])
    taken.set("max_model_len", int(value) + completion, "--prompt_max_len + --generate_max_len")


def _filter(value: str, given: Given, taken: Conversion) -> None:
    taken.set("dynamic_filtering", True, "--dynamic_filtering")
    own = "remote_rm_url" in given
    taken.set("filter_on", "reward" if own else "accuracy", "OpenRLHF filters on the scores of --remote_rm_url")


def _micro_rollout(value: str, given: Given, taken: Conversion) -> None:
    taken.set("reward_batch_size", int(value), "--micro_rollout_batch_size")
    if int(given.get("vllm_num_engines", ["0"])[0]) == 0:  # vLLM forms its own batches
        taken.set("max_batch_trajectories", int(value), "--micro_rollout_batch_size")


def _lora_rank(value: str, given: Given, taken: Conversion) -> None:
    if int(value) == 0:
        raise UsageError("--lora_rank 0 trains all weights; emailrl trains an adapter.", "Give a rank of at least 1.")
    taken.set("lora_rank", int(value), "--lora_rank")


def _wandb(value: str, given: Given, taken: Conversion) -> None:
    if value.strip():
        taken.set("wandb_mode", "online", "--use_wandb; set its key in WANDB_API_KEY, or run wandb login")
    else:
        taken.set("wandb_mode", "disabled", "--use_wandb is empty: off in OpenRLHF")


def _tensorboard(value: str, given: Given, taken: Conversion) -> None:
    taken.set("tensorboard", True, "--use_tensorboard")
    taken.set("tensorboard_dir", value, "--use_tensorboard")


def _export_format(value: str, given: Given, taken: Conversion) -> None:
    taken.set("export_format", "merged", "--save_hf_ckpt")
    if "save_path" not in given:
        taken.set("export_dir", "./ckpt", "--save_path not given: OpenRLHF's default")


def _engines(value: str, given: Given, taken: Conversion) -> None:
    count = int(value)
    if count < 0:
        raise UsageError("--vllm_num_engines must be at least 0.", "0: transformers in process; 1: vLLM in process.")
    taken.set("engine", "vllm" if count else "transformers", "--vllm_num_engines")
    if _shares_gpus(given):
        engines = _ranks(taken) // taken.values.get("vllm_tensor_parallel_size", 1) or 1
        if count not in (0, engines):
            taken.notes.append(
                f"--vllm_num_engines {count} --colocate_all_models: the number of engines follows from the ranks, one "
                f"for each vllm_tensor_parallel_size of them: {engines}"
            )
    elif count > 1 or "async_train" in given:
        taken.notes.append(
            f"--vllm_num_engines {count}: start them with emailrl serve --replicas {count} and set vllm_urls to the "
            "addresses it prints"
        )


def _shares_gpus(given: Given) -> bool:
    """Whether vLLM runs on the trainer's GPUs; with --async_train only the other models share theirs."""
    return "colocate_all_models" in given and "async_train" not in given


def _ranks(taken: Conversion) -> int:
    return int(taken.values.get("nproc", 1) * taken.values.get("nnodes", 1))


def _colocation(value: str, given: Given, taken: Conversion) -> None:
    if _shares_gpus(given):
        taken.set("vllm_urls", "", "--colocate_all_models: every rank samples on its own GPU")
    else:
        taken.notes.append("--colocate_all_models: with --async_train vLLM has its own GPUs, set vllm_urls")


def _asynchronous(value: str, given: Given, taken: Conversion) -> None:
    steps = int(given.get("async_queue_size", ["1"])[0])
    if steps < 1:
        raise UsageError("--async_queue_size must be at least 1.", hint_of(find_flag("async_queue_size")))
    if given.get("vllm_num_engines", ["0"])[0] == "0":
        raise UsageError("--async_train needs vLLM servers.", "Give --vllm_num_engines as well, at least 1.")
    taken.set("max_staleness", steps, "--async_train" + " --async_queue_size" * ("async_queue_size" in given))


def _zero_stage(value: str, given: Given, taken: Conversion) -> None:
    stage = int(value)
    if stage not in range(4):
        raise UsageError(f"--zero_stage {stage}: should be 0, 1, 2 or 3.")
    taken.set("shard", "host" if stage == 3 else "off", f"--zero_stage {stage}")
    if stage == 3 and _shares_gpus(given):
        taken.notes.append("--zero_stage 3 --colocate_all_models: a sharded base needs vLLM servers, set vllm_urls")


Special = Callable[[str, Given, Conversion], None]
SPECIAL: Final[dict[str, Special]] = {
    "agent_func_path": lambda value, given, taken: taken.set(
        "environment", f"{value}:Environment", "--agent_func_path; its class needs start() and step()"
    ),
    "async_train": _asynchronous,
    "colocate_all_models": _colocation,
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
    "target_modules": lambda value, given, taken: taken.set(
        "target_modules", ",".join(given["target_modules"]), "--target_modules"
    ),
    "top_k": _minus_one("top_k", 0, "all, which is 0 here"),
    "use_tensorboard": _tensorboard,
    "use_wandb": _wandb,
    "vllm_num_engines": _engines,
    "zero_stage": _zero_stage,
}


# -- flags converted together


def _take_batches(counts: dict[str, int], taken: Conversion, *, dynamic: bool) -> None:
    """Questions and updates per step; OpenRLHF counts trajectories per update instead."""
    rollouts, update = counts.get("n_samples_per_prompt", 1), counts.get("train_batch_size")
    questions = counts.get("rollout_batch_size")
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
    if "micro_train_batch_size" in counts and not dynamic:
        taken.set("max_rows_per_micro_batch", counts["micro_train_batch_size"], "--micro_train_batch_size")


def _take_questions(questions: int, why: str, taken: Conversion) -> None:
    """Questions of all ranks, of which each has its share."""
    ranks = _ranks(taken)
    own = max(round(questions / ranks), 1)
    share = f", / {ranks} ranks{_rounded(questions, ranks, own)}" if ranks > 1 else ""
    taken.set("per_device_train_batch_size", own, why + share)


def _count(name: str, text: str) -> int:
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not count.is_integer() or count < 1:
        raise UsageError(f"--{name} takes a whole number of at least 1.", "See docs/reference/openrlhf.md.")
    return int(count)


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
    sequence, in_loss, theirs = loss == "gspo", "use_kl_loss" in given, "as in OpenRLHF"
    why = "--advantage_estimator" + ("" if "advantage_estimator" in given else " not given: OpenRLHF's default is gae")
    taken.set("algorithm", ESTIMATORS[estimator], why)
    taken.set("whiten_advantages", estimator in WHITENED, theirs)
    taken.set("ratio_level", "sequence" if sequence else "token", "--policy_loss_type" if sequence else theirs)
    taken.set("loss_aggregation", "sequence_mean" if sequence else "token_mean", theirs)
    taken.set("kl_in", "loss" if in_loss or sequence else "reward", "--use_kl_loss" if in_loss else theirs)
    if sequence and not in_loss:
        taken.flags["kl_in"] = "OpenRLHF: reward; a per-sequence ratio does not allow a per-token KL there"
    estimated = given.get("kl_estimator", ["k1"])[0]
    taken.set("kl_estimator", estimated, "--kl_estimator" if "kl_estimator" in given else theirs)
    taken.set("min_group_std", 0.0, "OpenRLHF keeps groups of equal rewards")
    if "reward_clip_range" not in given:
        taken.set("reward_clip_low", -10.0, theirs)
        taken.set("reward_clip_high", 10.0, theirs)
    if "enable_vllm_is_correction" in given:
        kind = "icepop" if "use_icepop" in given else given.get("is_correction_type", ["tis"])[0]
        kind = {"seq-mask-tis": "sequence_mask"}.get(kind, kind)
        taken.set("importance_correction", kind, "--enable_vllm_is_correction")
        if "vllm_is_truncated_threshold" not in given:
            taken.set("correction_low", 0.5, theirs)
            taken.set("correction_high", 5.0, theirs)


def _drop_idle(given: Given, taken: Conversion) -> None:
    """Remove settings that have no effect given the others, and note why."""
    for name, needed in NEEDED.items():
        if name in given and needed not in given:
            taken.notes.append(f"--{name}: no effect without --{needed}")
    values = {"importance_correction": "off"} | {key: taken.values[key] for key in DECISIVE if key in taken.values}
    settings = _settings_of(values, taken)
    for key, needed in without_effect(in_force(override(settings), settings)).items():
        if key in taken.values:
            taken.notes.append(f"{taken.flags.pop(key)}: no effect, it needs {needed}")
            del taken.values[key]


def _settings_of(values: dict[str, Any], taken: Conversion) -> Settings:
    """The settings with these values; UsageError for an invalid one."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        leaf = by_name()[key]
        tree.setdefault(leaf.section, {})[leaf.field] = value
    if values.get("max_staleness"):
        tree["vllm"].setdefault("vllm_urls", "http://to-be-set")  # checked as if the servers were listed
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        section, name = error.errors()[0]["loc"][:2]
        [leaf] = [leaf for leaf in leaves() if (leaf.section, leaf.field) == (section, name)]
        reason = error.errors()[0]["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        problem = f"{taken.flags[leaf.key]}: {leaf.key} should be {reason}."
        raise UsageError(problem, "See docs/reference/settings.md.") from None


# -- the file


def _note_the_rest(given: Given, taken: Conversion) -> None:
    """Note OpenRLHF's defaults that no setting can express, and remove credentials from URLs."""
    if "lora_rank" not in given:
        taken.notes.append("--lora_rank not given: OpenRLHF trains all weights; emailrl trains an adapter (lora_rank)")
    if taken.values.get("shard_offload") and "shard" not in taken.values:
        taken.notes.append(
            "shard_offload acts on a sharded base only: shard = auto shards one above 70 % of a GPU's memory, which"
            " needs vLLM servers (vllm_urls)"
        )
    if "max_steps" not in given:
        taken.notes.append("--max_steps not given: computed there from --num_episodes; here max_steps ends a run")
    for key, value in taken.values.items():
        if isinstance(value, str) and "://" in value and (shown := without_credentials(value)) != value:
            taken.values[key] = shown
            taken.flags[key] += f"; credentials removed: set the full URL as {by_name()[key].env_names[0]}"


def _write(taken: Conversion) -> str:
    lines = [
        "# Converted from an OpenRLHF command line by emailrl train --from-openrlhf.",
        "# Settings not listed keep emailrl's defaults; docs/reference/openrlhf.md shows where OpenRLHF's differ.",
    ]
    lines += [f"# {one_line(note)}" for note in taken.notes]
    section = ""
    for leaf in leaves():
        if leaf.key not in taken.values:
            continue
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"[{section}]"]
        lines.append(f"{leaf.key} = {_toml(taken.values[leaf.key])}  # {one_line(taken.flags[leaf.key])}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A JSON string is valid TOML except for DEL, which TOML requires escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
