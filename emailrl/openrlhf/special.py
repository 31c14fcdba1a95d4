"""Flags that come to something else than the value of one setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from emailrl.errors import UsageError
from emailrl.openrlhf.parse import Given

NEVER: Final = 1_000_000_000
"""Steps between two saves or evaluations where OpenRLHF's -1 means none in between."""


@dataclass(slots=True)
class Conversion:
    """The settings a command line comes to."""

    values: dict[str, Any] = field(default_factory=dict)
    """Setting (by its unique name) → value."""
    flags: dict[str, str] = field(default_factory=dict)
    """Setting → the flag it came from, or what else to say behind its line."""
    notes: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any, why: str) -> None:
        """Take a value; of a clipped reward an endless bound is none, which here is no setting."""
        if key in ("reward_clip_low", "reward_clip_high") and math.isinf(value):
            self.notes.append(f"{why}: an endless bound is none ({key} is left out)")
        else:
            self.values[key], self.flags[key] = value, why

    def drop(self, keys: Iterable[str], note: str) -> None:
        """Take settings out again, and say why where there were any."""
        present = [key for key in keys if key in self.values]
        for key in present:
            self.notes.append(f"{self.flags.pop(key)}: {note}")
            del self.values[key]


Special = Callable[[list[str], Given, Conversion], None]


def _both_clips(values: list[str], given: Given, plan: Conversion) -> None:
    if "eps_clip_low_high" not in given:
        plan.set("clip_low", float(values[0]), "--eps_clip")
        plan.set("clip_high", float(values[0]), "--eps_clip")


def _scheduler(values: list[str], given: Given, plan: Conversion) -> None:
    names = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
    renamed = f" {values[0]}" if values[0] in names else ""
    plan.set("lr_scheduler", names.get(values[0], values[0]), "--lr_scheduler" + renamed)
    if values[0] == "cosine_with_min_lr":
        plan.set("min_lr_ratio", 0.1, "--lr_scheduler cosine_with_min_lr")


def _prompts(values: list[str], given: Given, plan: Conversion) -> None:
    from emailrl.scenarios.hub import HUB_QUESTIONS

    if values[0] == HUB_QUESTIONS:
        plan.notes.append("--prompt_data: what is read where `questions` names no file")
    else:
        plan.set("questions", values[0], "--prompt_data, a question file (docs/data.md)")


def _agent(values: list[str], given: Given, plan: Conversion) -> None:
    plan.set("environment", f"{values[0]}:Environment", "--agent_func_path; its class is to have start() and step()")


def _reward(values: list[str], given: Given, plan: Conversion) -> None:
    if "," in values[0] and "://" in values[0]:
        raise UsageError("--remote_rm_url names several servers.", "Give one address; it may balance the load.")
    plan.set("reward", f"{values[0]}:reward_func" if values[0].endswith(".py") else values[0], "--remote_rm_url")


def _engines(values: list[str], given: Given, plan: Conversion) -> None:
    count = int(values[0])
    if count < 0:
        raise UsageError("--vllm_num_engines is less than 0.", "0 is transformers in process, 1 vLLM in process.")
    plan.set("engine", "vllm" if count else "transformers", "--vllm_num_engines")
    if count > 1 and "colocate_all_models" not in given:
        plan.notes.append(f'--vllm_num_engines {count}: start so many servers and name them: vllm_urls = "http://…,…"')
    elif count > 1:
        plan.notes.append(f"--vllm_num_engines {count} that share GPUs with the trainer: not built yet (one is)")


def _colocate(values: list[str], given: Given, plan: Conversion) -> None:
    plan.set("vllm_urls", "", "--colocate_all_models: vLLM, where it is used, in the trainer's process")


def _every(key: str, name: str) -> Special:
    def take(values: list[str], given: Given, plan: Conversion) -> None:
        steps = int(values[0])
        plan.set(key, NEVER if steps == -1 else steps, f"--{name} {steps}" + (": never in between" * (steps == -1)))

    return take


def _window(values: list[str], given: Given, plan: Conversion) -> None:
    prompt, completion = (
        int(given[name][0]) if name in given else 1024 for name in ("prompt_max_len", "generate_max_len")
    )
    plan.set("max_model_len", prompt + completion, "--prompt_max_len + --generate_max_len")


def _filter(values: list[str], given: Given, plan: Conversion) -> None:
    plan.set("dynamic_filtering", True, "--dynamic_filtering")
    own = "remote_rm_url" in given
    plan.set("filter_on", "reward" if own else "accuracy", "OpenRLHF filters by the scores of --remote_rm_url")


def _lora_rank(values: list[str], given: Given, plan: Conversion) -> None:
    if int(values[0]) == 0:
        raise UsageError("--lora_rank 0 trains all weights; emailrl trains an adapter.", "Give a rank of at least 1.")
    plan.set("lora_rank", int(values[0]), "--lora_rank")


def _constant(key: str, value: Any, why: str) -> Special:
    return lambda values, given, plan: plan.set(key, value, why)


def _top_k(values: list[str], given: Given, plan: Conversion) -> None:
    count = int(values[0])
    plan.set("top_k", 0 if count == -1 else count, "--top_k" + " -1: all, which is 0 here" * (count == -1))


def _unless(later: str, special: Special) -> Special:
    """A flag of old scripts, which gives way to the one that came after it."""
    return lambda values, given, plan: None if later in given else special(values, given, plan)


def _wandb(values: list[str], given: Given, plan: Conversion) -> None:
    if values[0].strip():
        plan.set("wandb_mode", "online", "--use_wandb; put its key into WANDB_API_KEY, or run wandb login")
    else:
        plan.set("wandb_mode", "disabled", "--use_wandb is empty, which is off in OpenRLHF")


def _tensorboard(values: list[str], given: Given, plan: Conversion) -> None:
    plan.set("tensorboard", True, "--use_tensorboard")
    plan.set("tensorboard_dir", values[0], "--use_tensorboard")


def _export_format(values: list[str], given: Given, plan: Conversion) -> None:
    plan.set("export_format", "merged", "--save_hf_ckpt")
    if "save_path" not in given:
        plan.set("export_dir", "./ckpt", "--save_path not given: OpenRLHF's default")


def _rollout_rows(values: list[str], given: Given, plan: Conversion) -> None:
    for key in ("reward_batch_size", "max_batch_trajectories"):
        plan.set(key, int(values[0]), "--micro_rollout_batch_size")


SPECIAL: Final[dict[str, Special]] = {
    "prompt_data": _prompts,
    "apply_chat_template": lambda values, given, plan: plan.notes.append(
        "--apply_chat_template: always on (chat_template names another than the model's own)"
    ),
    "vllm_num_engines": _engines,
    "colocate_all_models": _colocate,
    "gradient_checkpointing": _constant("gradient_checkpointing", "on", "--gradient_checkpointing"),
    "micro_rollout_batch_size": _rollout_rows,
    "use_dynamic_batch": lambda values, given, plan: plan.notes.append(
        "--use_dynamic_batch: always on (max_tokens_per_micro_batch)"
    ),
    "lr_scheduler": _scheduler,
    "bf16": _unless("param_dtype", _constant("dtype", "bf16", "--bf16")),
    "flash_attn": _unless("attn_implementation", _constant("attn_implementation", "flash_attention_2", "--flash_attn")),
    "eps_clip": _both_clips,
    "dynamic_filtering": _filter,
    "agent_func_path": _agent,
    "remote_rm_url": _reward,
    "prompt_max_len": _window,
    "top_k": _top_k,
    "lora_rank": _lora_rank,
    "target_modules": lambda values, given, plan: plan.set("target_modules", ",".join(values), "--target_modules"),
    "load_checkpoint": _constant("resume", "auto", "--load_checkpoint"),
    "save_steps": _every("save_steps", "save_steps"),
    "eval_steps": _every("eval_steps", "eval_steps"),
    "save_hf_ckpt": _export_format,
    "use_wandb": _wandb,
    "use_tensorboard": _tensorboard,
}
"""What a flag comes to that is not the value of one setting."""
