"""OpenRLHF's flags by name, a parser for its command lines that follows shell and argparse rules, and their conversion.
An ``emailrl.toml`` gets the given flags and the complete objective, as it is by OpenRLHF's defaults. Its other defaults
are left out: 1024 questions per step must not be set silently."""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from emailrl.base.credentials import without_credentials
from emailrl.base.errors import UsageError
from emailrl.base.plain import one_line
from emailrl.questions.load import HUB_QUESTIONS
from emailrl.settings import Settings
from emailrl.settings.names import Leaf, by_name, first_problem, leaves, nearest, tree_of
from emailrl.settings.needs import without_effect
from emailrl.training.algorithms import in_force, resolve

Given = dict[str, list[str]]  # Flag (by its old name) → its values as written; the last wins if repeated.


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    dotted: str
    takes: str  # Its arguments as in the table: a key of ``TAKES``.
    group: str
    settings: tuple[str, ...]  # The settings that it sets here; empty if none.
    default: str  # OpenRLHF's default.
    note: str  # What differs, or why there is no setting.

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        return tuple(by_name()[key] for key in self.settings)


TAKES: Final[Mapping[str, tuple[int, float, str]]] = {
    "": (0, 0, "no value"),
    "X": (1, 1, "one value"),
    "L H": (2, 2, "two values"),
    "X …": (1, math.inf, "one value or more"),
}  # How many values a flag takes, at least and at most
FLAGS: Final = tuple(
    Flag(name, dotted, takes, group, tuple(settings.split()), default, note)
    for group, rows in tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8")).items()
    for written, (dotted, settings, default, note) in rows.items()
    for name, _, takes in [written.partition(" ")]
)  # All known flags, in the order of the page
NAMES: Final[Mapping[str, Flag]] = {alias: flag for flag in FLAGS for alias in (flag.name, flag.dotted) if alias}

_COMMAND = re.compile(r"openrlhf[./]cli[./]\w+(\.py)?$")


def find_flag(name: str) -> Flag:
    """Find a flag by old or dotted name, with or without ``--``; UsageError suggests the nearest if unknown."""
    bare = re.sub("^-+", "", name).replace("-", "_")
    if bare in NAMES:
        return NAMES[bare]
    near = nearest(bare, NAMES)
    hint = f"Did you mean --{near}?" if near else "See docs/reference/openrlhf.md for all flags."
    raise UsageError(f"Unknown flag of OpenRLHF: {name}.", hint)


def parse(text: str) -> Given:
    """Parse flags with shell quoting, ``--flag value`` or ``--flag=value``, and backslash line continuations. A leading
    command that starts OpenRLHF (``python3 -m openrlhf.cli.train_ppo_ray``) is skipped. Raises UsageError for an
    unknown flag, suggesting the nearest, and for too few or too many values. Errors never quote a value: it may be a
    token."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise UsageError(f"The flags cannot be read: {error}.", "Quote them as in a shell.") from None
    started = [place for place, word in enumerate(words) if _COMMAND.search(word)]
    words = words[started[-1] + 1 :] if started else words
    # Trailing spaces after a backslash at a line end, as from Markdown or Windows files.
    words = [word for word in words if word.strip()]
    if words and not words[0].startswith("--"):
        hint = 'Pass all flags as one quoted string: --from-openrlhf "--pretrain …".'
        raise UsageError("Expected a flag first.", hint)
    given: Given = {}
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    for start, end in pairwise([*starts, len(words)]):
        name, equals, value = words[start].partition("=")
        flag, values = find_flag(name), [value] * bool(equals) + words[start + 1 : end]
        least, most, wanted = TAKES[flag.takes]
        if not least <= len(values) <= most:
            hint = "An empty value does not count." if len(values) < least else "Quote values that contain spaces."
            hint = hint if most else "Omit the flag to turn it off."
            raise UsageError(f"{name} takes {wanted}, not {len(values)}.", hint)
        if not all(value.strip() for value in values) and flag.name != "use_wandb":  # empty means off
            raise UsageError(f"{name}: the value is empty.", "Fill it in, or omit the flag.")
        given[flag.name] = values
    return given


def read_value(flag: Flag, leaf: Leaf, text: str) -> Any:
    """Convert a value to its setting's type; UsageError if it is not a number. Choices are checked later."""
    if bool in leaf.kinds:
        return True
    if not leaf.kinds & {int, float}:
        return text
    if math.isnan(number := _number(text)):
        kind = "a whole number" if int in leaf.kinds else "numbers" if flag.takes == "L H" else "a number"
        raise UsageError(f"--{flag.name} takes {kind}.", hint_of(flag))
    return int(number) if int in leaf.kinds and number.is_integer() else number


def hint_of(flag: Flag) -> str:
    """A hint with the flag's default as an example of a valid value."""
    example = flag.default.strip("`")
    shown = f"OpenRLHF's default is {example}. " if example[:1].isdigit() or example[:1] == "-" else ""
    return f"{shown}See docs/reference/openrlhf.md."


NEVER: Final = 1_000_000_000  # Save or evaluation interval for OpenRLHF's -1 (none in between).
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
)  # Numbers that others are divided by
JOINT: Final = {
    *("train_batch_size", "rollout_batch_size", "micro_train_batch_size", "async_queue_size"),
    *("advantage_estimator", "policy_loss_type", "use_kl_loss", "kl_estimator"),
    *("enable_vllm_is_correction", "use_icepop", "is_correction_type"),
}  # Flags that are converted together with others
CONSTANTS: Final = {
    "bf16": "bf16",
    "flash_attn": "flash_attention_2",
    "gradient_checkpointing": "on",
    "load_checkpoint": "auto",
}  # Values for flags without an argument, if not ``true``
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
}  # Flags without a setting of their own that another flag must accompany
DECISIVE: Final = ("algorithm", "beta", "dynamic_filtering", "importance_correction", "overlong_buffer")
"""Settings without which others have no effect."""


class Conversion:
    """A command line and the settings it is converted to."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.values: dict[str, Any] = {}  # Setting (by its unique name) → value.
        self.flags: dict[str, str] = {}  # Setting → the flag it came from, or another comment for its line.
        self.notes: list[str] = []

    def set(self, key: str, value: Any, why: str) -> None:
        """Set a value; an infinite bound of the reward clip is left unset."""
        if key in ("reward_clip_low", "reward_clip_high") and math.isinf(value):
            self.notes.append(f"{why}: an infinite bound is no bound ({key} omitted)")
        else:
            self.values[key], self.flags[key] = value, why

    def first(self, flag: str, default: str) -> str:
        """The first value of a flag, or the default if it is not given."""
        return self.given.get(flag, [default])[0]

    @property
    def ranks(self) -> int:
        return int(self.values.get("nproc", 1) * self.values.get("nnodes", 1))

    @property
    def shares_gpus(self) -> bool:
        """Whether vLLM runs on the trainer's GPUs; with --async_train only the other models share theirs."""
        return "colocate_all_models" in self.given and "async_train" not in self.given


def to_toml(text: str) -> str:
    """Convert an OpenRLHF command line into an ``emailrl.toml``. Raises UsageError for an unreadable line, an unknown
    flag, an invalid value, or a combination that cannot be trained here. Tokens are never written."""
    taken = Conversion(parse(text))
    counts = {name: _count(name, taken.given[name][0]) for name in COUNTS if name in taken.given}
    for flag in FLAGS:
        if flag.name in taken.given:
            _take(flag, taken)
    _take_batches(counts, taken)
    _take_objective(taken)
    for name, needed in NEEDED.items():
        if name in taken.given and needed not in taken.given:
            taken.notes.append(f"--{name}: no effect without --{needed}")
    decisive = {"importance_correction": "off"} | {key: taken.values[key] for key in DECISIVE if key in taken.values}
    for key, needed in without_effect(in_force(_settings_of(decisive, taken))[1]).items():
        if key in taken.values:
            taken.notes.append(f"{taken.flags.pop(key)}: no effect, it needs {needed}")
            del taken.values[key]
    resolve(_settings_of(taken.values, taken))
    if "lora_rank" not in taken.given:
        taken.notes.append("--lora_rank not given: OpenRLHF trains all weights; emailrl trains an adapter (lora_rank)")
    if taken.values.get("shard_offload") and "shard" not in taken.values:
        auto = "shard = auto shards one above 70% of a GPU's memory, which needs vLLM servers (vllm_urls)"
        taken.notes.append(f"shard_offload acts on a sharded base only: {auto}")
    if "max_steps" not in taken.given:
        taken.notes.append("--max_steps not given: computed there from --num_episodes; here max_steps ends a run")
    for key, value in taken.values.items():
        if isinstance(value, str) and "://" in value and (shown := without_credentials(value)) != value:
            taken.values[key] = shown
            taken.flags[key] += f"; credentials removed: set the full URL as {by_name()[key].env_names[0]}"
    lines = [
        "# Converted from an OpenRLHF command line by emailrl train --from-openrlhf.",
        "# Settings not listed keep emailrl's defaults; docs/reference/openrlhf.md shows where OpenRLHF's differ.",
        *(f"# {one_line(note)}" for note in taken.notes),
    ]
    for leaf in (leaf for leaf in leaves() if leaf.key in taken.values):
        if f"[{leaf.section}]" not in lines:
            lines += ["", f"[{leaf.section}]"]
        value = taken.values[leaf.key]
        # A JSON value is valid TOML except for DEL in a string, which TOML requires escaped, and infinity.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        text = repr(value) if isinstance(value, float) else text
        lines.append(f"{leaf.key} = {text}  # {one_line(taken.flags[leaf.key])}")
    return "\n".join(lines) + "\n"


def _take(flag: Flag, taken: Conversion) -> None:
    """Convert one flag to its settings, or note why it has none."""
    name, values, why = flag.name, taken.given[flag.name], f"--{flag.name}"
    if not flag.settings:
        taken.notes.append(f"{why}: {flag.note}")
    elif name in ALWAYS_ON:
        taken.notes.append(f"{why}: always on ({ALWAYS_ON[name]})")
    elif name not in JOINT and SUPERSEDED.get(name) not in taken.given:
        value = values[0] if values else ""
        try:
            if _take_text(name, value, taken) or _take_placement(name, value, taken):
                return
        except ValueError:
            raise UsageError(f"{why} takes a whole number.", hint_of(flag)) from None
        values = values or [CONSTANTS.get(name, "true")]
        values = values * len(flag.settings) if len(values) == 1 else values
        for key, each in zip(flag.settings, values, strict=True):
            taken.set(key, read_value(flag, by_name()[key], each), why)


def _take_text(name: str, value: str, taken: Conversion) -> bool:
    """Convert a flag whose value is not that of a setting; False for another flag."""
    match name:
        case "agent_func_path":
            taken.set("environment", f"{value}:Environment", "--agent_func_path; its class needs start() and step()")
        case "dynamic_filtering":
            taken.set("dynamic_filtering", True, "--dynamic_filtering")
            on = "reward" if "remote_rm_url" in taken.given else "accuracy"
            taken.set("filter_on", on, "OpenRLHF filters on the scores of --remote_rm_url")
        case "eval_steps" | "save_steps" | "top_k":
            meaning = "all, which is 0 here" if name == "top_k" else "never in between"
            if is_off := int(value) == -1:
                value = "0" if name == "top_k" else str(NEVER)
            taken.set(name, int(value), f"--{name} -1: {meaning}" if is_off else f"--{name} {int(value)}")
        case "lora_rank":
            if int(value) == 0:
                raise UsageError("--lora_rank 0 trains all weights; emailrl trains an adapter.", "Give at least 1.")
            taken.set("lora_rank", int(value), "--lora_rank")
        case "lr_scheduler":
            here = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}.get(value, value)
            taken.set("lr_scheduler", here, "--lr_scheduler" + f" {value}" * (here != value))
            if value == "cosine_with_min_lr":
                taken.set("min_lr_ratio", 0.1, "--lr_scheduler cosine_with_min_lr")
        case "prompt_data" if value == HUB_QUESTIONS:
            taken.notes.append("--prompt_data: the default when `questions` is not set")
        case "prompt_data":
            taken.set("questions", value, "--prompt_data, a question file (docs/guides/data.md)")
        case "prompt_max_len":
            window = int(value) + int(taken.first("generate_max_len", "1024"))
            taken.set("max_model_len", window, "--prompt_max_len + --generate_max_len")
        case "remote_rm_url":
            if "," in value and "://" in value:
                raise UsageError("--remote_rm_url lists several servers.", "Give one URL, as of a load balancer.")
            taken.set("reward", f"{value}:reward_func" if value.endswith(".py") else value, "--remote_rm_url")
        case "save_hf_ckpt":
            taken.set("export_format", "merged", "--save_hf_ckpt")
            if "save_path" not in taken.given:
                taken.set("export_dir", "./ckpt", "--save_path not given: OpenRLHF's default")
        case "target_modules":
            taken.set("target_modules", ",".join(taken.given[name]), "--target_modules")
        case "use_wandb" if value.strip():
            taken.set("wandb_mode", "online", "--use_wandb; set its key in WANDB_API_KEY, or run wandb login")
        case "use_wandb":
            taken.set("wandb_mode", "disabled", "--use_wandb is empty: off in OpenRLHF")
        case _:
            return False
    return True


def _take_placement(name: str, value: str, taken: Conversion) -> bool:
    given = taken.given
    match name:
        case "async_train":
            steps = int(taken.first("async_queue_size", "1"))
            if steps < 1:
                raise UsageError("--async_queue_size must be at least 1.", hint_of(find_flag("async_queue_size")))
            if taken.first("vllm_num_engines", "0") == "0":
                raise UsageError("--async_train needs vLLM servers.", "Give --vllm_num_engines as well, at least 1.")
            taken.set("max_staleness", steps, "--async_train" + " --async_queue_size" * ("async_queue_size" in given))
        case "colocate_all_models" if taken.shares_gpus:
            taken.set("vllm_urls", "", "--colocate_all_models: every rank samples on its own GPU")
        case "colocate_all_models":
            taken.notes.append("--colocate_all_models: with --async_train vLLM has its own GPUs, set vllm_urls")
        case "micro_rollout_batch_size":
            taken.set("reward_batch_size", int(value), "--micro_rollout_batch_size")
            if int(taken.first("vllm_num_engines", "0")) == 0:  # vLLM forms its own batches
                taken.set("max_batch_trajectories", int(value), "--micro_rollout_batch_size")
        case "vllm_num_engines":
            if (count := int(value)) < 0:
                hint = "0: transformers in process; 1: vLLM in process."
                raise UsageError("--vllm_num_engines must be at least 0.", hint)
            taken.set("engine", "vllm" if count else "transformers", "--vllm_num_engines")
            engines = taken.ranks // taken.values.get("vllm_tensor_parallel_size", 1) or 1
            if taken.shares_gpus and count not in (0, engines):
                taken.notes.append(
                    f"--vllm_num_engines {count} --colocate_all_models: the number of engines follows from the ranks,"
                    f" one for each vllm_tensor_parallel_size of them: {engines}"
                )
            elif not taken.shares_gpus and (count > 1 or "async_train" in given):
                taken.notes.append(
                    f"--vllm_num_engines {count}: start them with emailrl serve --replicas {count} and set vllm_urls to"
                    " the addresses it prints"
                )
        case "zero_stage":
            if (stage := int(value)) not in range(4):
                raise UsageError(f"--zero_stage {stage}: should be 0, 1, 2 or 3.")
            taken.set("shard", "host" if stage == 3 else "off", f"--zero_stage {stage}")
            if stage == 3 and taken.shares_gpus:
                both = "--zero_stage 3 --colocate_all_models"
                taken.notes.append(f"{both}: a sharded base needs vLLM servers, set vllm_urls")
        case _:
            return False
    return True


def _take_batches(counts: dict[str, int], taken: Conversion) -> None:
    """Questions and updates per step; OpenRLHF counts trajectories per update instead."""
    rollouts, update = counts.get("n_samples_per_prompt", 1), counts.get("train_batch_size")
    questions, why = counts.get("rollout_batch_size"), "--rollout_batch_size, questions per step"
    if questions is not None and update is not None:
        updates = -(-questions * rollouts // update)
        product = "--rollout_batch_size x --n_samples_per_prompt / --train_batch_size"
        taken.set("num_mini_batches", updates, product + _rounded(questions * rollouts, update, updates))
    elif update is not None:
        questions = max(update // rollouts, 1)
        why = f"--train_batch_size / --n_samples_per_prompt{_rounded(update, rollouts, questions)}: one update per step"
        why += " (--rollout_batch_size not given: 1024 in OpenRLHF)"
    if questions is not None:  # of all ranks, of which each has its share
        ranks = taken.ranks
        own = max(round(questions / ranks), 1)
        share = f", / {ranks} ranks{_rounded(questions, ranks, own)}" if ranks > 1 else ""
        taken.set("per_device_train_batch_size", own, why + share)
    if "micro_train_batch_size" in counts and "use_dynamic_batch" not in taken.given:
        taken.set("max_rows_per_micro_batch", counts["micro_train_batch_size"], "--micro_train_batch_size")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _count(name: str, text: str) -> int:
    count = _number(text)
    if not count.is_integer() or count < 1:
        raise UsageError(f"--{name} takes a whole number of at least 1.", "See docs/reference/openrlhf.md.")
    return int(count)


def _rounded(dividend: int, divisor: int, result: int) -> str:
    """The comment for a division with a remainder."""
    if dividend == result * divisor:
        return ""
    return f" = {dividend} / {divisor}, rounded {'up' if result * divisor > dividend else 'down'} to {result}"


def _take_objective(taken: Conversion) -> None:
    """Set the complete objective, including OpenRLHF's defaults."""
    given, theirs = taken.given, "as in OpenRLHF"
    estimator, loss = taken.first("advantage_estimator", "gae"), taken.first("policy_loss_type", "ppo")
    if estimator not in ESTIMATORS:
        raise UsageError(f"--advantage_estimator {estimator}: should be one of {', '.join(ESTIMATORS)}.")
    if loss not in ("ppo", "gspo"):
        raise UsageError(f"--policy_loss_type {loss}: should be ppo or gspo.")
    sequence, in_loss = loss == "gspo", "use_kl_loss" in given
    why = "--advantage_estimator" + ("" if "advantage_estimator" in given else " not given: OpenRLHF's default is gae")
    taken.set("algorithm", ESTIMATORS[estimator], why)
    taken.set("whiten_advantages", estimator in WHITENED, theirs)
    taken.set("ratio_level", "sequence" if sequence else "token", "--policy_loss_type" if sequence else theirs)
    taken.set("loss_aggregation", "sequence_mean" if sequence else "token_mean", theirs)
    taken.set("kl_in", "loss" if in_loss or sequence else "reward", "--use_kl_loss" if in_loss else theirs)
    if sequence and not in_loss:
        taken.flags["kl_in"] = "OpenRLHF: reward; a per-sequence ratio does not allow a per-token KL there"
    estimated = "--kl_estimator" if "kl_estimator" in given else theirs
    taken.set("kl_estimator", taken.first("kl_estimator", "k1"), estimated)
    taken.set("min_group_std", 0.0, "OpenRLHF keeps groups of equal rewards")
    if "reward_clip_range" not in given:
        taken.set("reward_clip_low", -10.0, theirs)
        taken.set("reward_clip_high", 10.0, theirs)
    if "enable_vllm_is_correction" in given:
        kind = "icepop" if "use_icepop" in given else taken.first("is_correction_type", "tis")
        kind = {"seq-mask-tis": "sequence_mask"}.get(kind, kind)
        taken.set("importance_correction", kind, "--enable_vllm_is_correction")
        if "vllm_is_truncated_threshold" not in given:
            taken.set("correction_low", 0.5, theirs)
            taken.set("correction_high", 5.0, theirs)


def _settings_of(values: dict[str, Any], taken: Conversion) -> Settings:
    """The settings with these values; UsageError for an invalid one."""
    if values.get("max_staleness"):
        values = {"vllm_urls": "http://to-be-set"} | values  # checked as if the servers were listed
    try:
        return Settings.model_validate(tree_of({by_name()[key]: value for key, value in values.items()}))
    except ValidationError as error:
        leaf, reason = first_problem(error)
        problem = f"{taken.flags[leaf.key]}: {leaf.key} should be {reason}."
        raise UsageError(problem, "See docs/reference/settings.md.") from None
