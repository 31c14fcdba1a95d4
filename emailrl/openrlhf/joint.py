"""Flags that mean something only together: the sizes of a step, and the objective."""

from __future__ import annotations

import math
from typing import Final

from emailrl.errors import UsageError
from emailrl.openrlhf.parse import Given
from emailrl.openrlhf.special import Conversion

ALGORITHMS: Final = {
    "gae": "ppo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "rloo": "rloo",
    "dr_grpo": "dr_grpo",
}
WHITENED: Final = ("gae", "reinforce", "reinforce_baseline")
JOINT: Final = frozenset(
    ("train_batch_size", "rollout_batch_size", "micro_train_batch_size", "advantage_estimator", "policy_loss_type",
     "use_kl_loss", "kl_estimator", "enable_vllm_is_correction", "use_icepop", "is_correction_type")
)  # fmt: skip
"""Flags that mean something only together with others."""


def take_batches(given: Given, plan: Conversion) -> None:
    """Questions a step, and updates of its rollouts: OpenRLHF counts an update's trajectories instead."""
    sizes = {name: _size(name, given[name][0]) for name in BATCHES if name in given}
    rollouts, update = sizes.get("n_samples_per_prompt", 1), sizes.get("train_batch_size")
    questions = sizes.get("rollout_batch_size")
    if questions is None and update is not None:
        questions = max(update // rollouts, 1)
        why = f"--train_batch_size / --n_samples_per_prompt{_rounded(update, rollouts, questions)}: one update a step"
        plan.set("per_device_train_batch_size", questions, f"{why} (--rollout_batch_size not given: 1024 in OpenRLHF)")
    elif questions is not None:
        plan.set("per_device_train_batch_size", questions, "--rollout_batch_size, questions a step")
        if update is not None:
            updates = -(-questions * rollouts // update)
            why = "--rollout_batch_size x --n_samples_per_prompt / --train_batch_size"
            plan.set("num_mini_batches", updates, why + _rounded(questions * rollouts, update, updates))
    if "micro_train_batch_size" in sizes and "use_dynamic_batch" not in given:
        plan.set("max_rows_per_micro_batch", sizes["micro_train_batch_size"], "--micro_train_batch_size")


def _size(name: str, text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not size.is_integer() or size < 1:
        raise UsageError(f"--{name} takes a whole number of at least 1; this is none.", "See docs/openrlhf.md.")
    return int(size)


def _rounded(dividend: int, divisor: int, result: int) -> str:
    """What to say of a division that does not come out even."""
    if dividend == result * divisor:
        return ""
    return f" = {dividend} / {divisor}, rounded {'up' if result * divisor > dividend else 'down'} to {result}"


BATCHES: Final = ("rollout_batch_size", "train_batch_size", "n_samples_per_prompt", "micro_train_batch_size")


def take_objective(given: Given, plan: Conversion) -> None:
    """What is optimised, in full: OpenRLHF's defaults are part of it."""
    estimator = given.get("advantage_estimator", ["gae"])[0]
    if estimator not in ALGORITHMS:
        raise UsageError(f"--advantage_estimator {estimator}: should be one of {', '.join(ALGORITHMS)}.")
    loss = given.get("policy_loss_type", ["ppo"])[0]
    if loss not in ("ppo", "gspo"):
        raise UsageError(f"--policy_loss_type {loss}: should be ppo or gspo.")
    sequence = loss == "gspo"
    said = "--advantage_estimator" + ("" if "advantage_estimator" in given else " not given: OpenRLHF's default is gae")
    theirs = "as OpenRLHF has it"
    plan.set("algorithm", ALGORITHMS[estimator], said)
    plan.set("whiten_advantages", estimator in WHITENED, theirs)
    plan.set("ratio_level", "sequence" if sequence else "token", "--policy_loss_type" if sequence else theirs)
    plan.set("loss_aggregation", "sequence_mean" if sequence else "token_mean", theirs)
    in_loss = "use_kl_loss" in given
    plan.set("kl_in", "loss" if in_loss or sequence else "reward", "--use_kl_loss" if in_loss else theirs)
    if sequence and not in_loss:
        plan.flags["kl_in"] = "OpenRLHF: reward; a ratio a sequence leaves no place for a KL a token there"
    plan.set(
        "kl_estimator", given.get("kl_estimator", ["k1"])[0], "--kl_estimator" if "kl_estimator" in given else theirs
    )
    plan.set("min_group_std", 0.0, "OpenRLHF drops no group for equal rewards")
    if not {"reward_clip_low", "reward_clip_high"} & set(plan.values) and "reward_clip_range" not in given:
        plan.set("reward_clip_low", -10.0, theirs)
        plan.set("reward_clip_high", 10.0, theirs)
    _take_correction(given, plan)
    if estimator != "gae":
        plan.drop(("critic_learning_rate", "value_clip", "gae_lambda"), f"idle, {estimator} has no critic")
    if estimator not in ("gae", "reinforce"):
        plan.drop(("gamma",), f"idle, as in OpenRLHF: {estimator} gives a sequence one advantage")
    if "dynamic_filtering" not in given:
        plan.drop(("filter_low", "filter_high"), "idle without --dynamic_filtering")
    if "overlong_buffer_len" not in given:
        plan.drop(("overlong_penalty",), "idle without --overlong_buffer_len")
    if plan.values.get("beta") == 0:
        plan.drop(("kl_target", "kl_horizon"), "idle without a KL (--init_kl_coef 0)")


def _take_correction(given: Given, plan: Conversion) -> None:
    if "enable_vllm_is_correction" not in given:
        plan.drop(("correction_low", "correction_high"), "idle without --enable_vllm_is_correction")
        plan.notes += [
            f"--{name}: idle without --enable_vllm_is_correction"
            for name in ("use_icepop", "is_correction_type")
            if name in given
        ]
        return
    kind = given.get("is_correction_type", ["tis"])[0]
    kind = "icepop" if "use_icepop" in given else kind
    plan.set("importance_correction", {"seq-mask-tis": "sequence_mask"}.get(kind, kind), "--enable_vllm_is_correction")
