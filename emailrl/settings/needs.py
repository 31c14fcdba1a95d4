"""Which setting needs which: one table for `train`'s errors and notes, OpenRLHF's flags and the page of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, Literal

from emailrl.settings.names import by_name
from emailrl.settings.tree import Settings

Level = Literal["error", "note"]


@dataclass(frozen=True, slots=True)
class Need:
    """One rule: ``train`` stops if it is not met (error), or says so in the run's header (note)."""

    level: Level
    settings: str
    """Names of the settings that the rule is about."""
    needs: str
    """What they need, as the reference page and the messages say it."""
    met: Callable[[SimpleNamespace], object]
    """Reads the values in force: every setting by name, as `training.algorithms.in_force` derives them."""
    reason: str = ""
    """What is wrong, a template of ``now``; empty: the settings have no effect, which matters only if one was given."""
    remedy: str = ""


_ONE_ADVANTAGE: Final = "RATIO_LEVEL=sequence needs one advantage per sequence"
_CORRECTED: Final = "IMPORTANCE_CORRECTION=tis, icepop or sequence_mask"
_UPDATES: Final = "NUM_MINI_BATCHES or UPDATE_EPOCHS above 1 (else every ratio is 1)"


def _reachable(now: SimpleNamespace) -> bool:
    """Whether a group's share of correct answers can be inside the filter's range."""
    by_reward = now.filter_on == "reward" or (now.filter_on is None and now.mode == "simple")
    shares = (right / now.num_generations for right in range(now.num_generations + 1))
    return by_reward or any(now.filter_low < share < now.filter_high for share in shares)


NEEDS: Final = (
    # Without effect.
    Need(
        "error",
        "value_clip value_coef critic_learning_rate critic_warmup_steps gae_lambda",
        "ADVANTAGE_ESTIMATOR=gae (--algorithm ppo)",
        lambda now: now.critic,
    ),
    Need("error", "gamma", "ADVANTAGE_ESTIMATOR=gae or reinforce", lambda now: not now.compares),
    Need("error", "constant_length", "LOSS_AGGREGATION=constant", lambda now: now.loss_aggregation == "constant"),
    Need("error", "kl_target", "BETA above 0", lambda now: now.beta),
    Need("error", "correction_low correction_high", _CORRECTED, lambda now: now.importance_correction != "off"),
    Need(
        "error",
        "filter_on filter_low filter_high max_refill_rounds",
        "DYNAMIC_FILTERING=true (--algorithm dapo)",
        lambda now: now.dynamic_filtering,
    ),
    Need("error", "overlong_penalty", "OVERLONG_BUFFER", lambda now: now.overlong),
    Need("note", "clip_low clip_high dual_clip value_clip ratio_level", _UPDATES, lambda now: now.updates > 1),
    Need("note", "reference", "BETA above 0", lambda now: now.beta or now.reference != "start"),
    Need("note", "kl_horizon", "KL_TARGET", lambda now: now.kl_target is not None),
    Need("note", "min_group_std", "an ADVANTAGE_ESTIMATOR that compares rewards", lambda now: now.compares),
    Need("note", "min_lr_ratio", "LR_SCHEDULER=linear or cosine", lambda now: now.lr_scheduler != "constant"),
    Need("note", "warmup_steps", "WARMUP_RATIO unset", lambda now: now.warmup_ratio is None),
    Need("note", "export_format", "EXPORT_DIR", lambda now: now.export_dir is not None),
    Need("note", "shard_offload", "SHARD=auto or host", lambda now: now.shard != "off"),
    Need(
        "note",
        "vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_enforce_eager vllm_enable_prefix_caching"
        " vllm_enable_sleep",
        "VLLM_URLS unset, because servers have their own flags",
        lambda now: not now.vllm_urls,
    ),
    # Contradictions.
    Need(
        "error",
        "ratio_level",
        "",
        lambda now: now.ratio_level != "sequence" or not now.critic,
        f"{_ONE_ADVANTAGE}, but {{now.estimator}} gives one per token.",
        "Use ADVANTAGE_ESTIMATOR=group_norm, or RATIO_LEVEL=token.",
    ),
    Need(
        "error",
        "ratio_level",
        "",
        lambda now: now.ratio_level != "sequence" or now.kl_in != "reward" or not now.beta,
        f"{_ONE_ADVANTAGE}, but KL_IN=reward penalizes each token separately.",
        "Use KL_IN=loss, BETA=0, or RATIO_LEVEL=token.",
    ),
    Need(
        "error",
        "ratio_level",
        "",
        lambda now: now.ratio_level != "sequence" or now.gamma == 1,
        f"{_ONE_ADVANTAGE}; EMAILRL_GAMMA={{now.gamma:g}} gives one per token.",
        "Use EMAILRL_GAMMA=1, or RATIO_LEVEL=token.",
    ),
    Need(
        "error",
        "correction_low correction_high",
        "",
        lambda now: now.importance_correction == "off" or now.correction_low < now.correction_high,
        "No weight is between CORRECTION_LOW={now.correction_low:g} and CORRECTION_HIGH={now.correction_high:g}.",
        "Set the lower bound below the upper one, with 1 between them.",
    ),
    Need(
        "error",
        "reward_clip_low reward_clip_high",
        "",
        lambda now: None in (now.reward_clip_low, now.reward_clip_high) or now.reward_clip_low < now.reward_clip_high,
        "No reward is between REWARD_CLIP_LOW={now.reward_clip_low:g} and REWARD_CLIP_HIGH={now.reward_clip_high:g}.",
        "Set the lower bound below the upper one.",
    ),
    Need(
        "error",
        "critic_warmup_steps",
        "",
        lambda now: not now.critic or now.critic_warmup_steps < now.max_steps,
        "CRITIC_WARMUP_STEPS={now.critic_warmup_steps} leaves none of MAX_STEPS={now.max_steps} for the policy.",
        "Lower CRITIC_WARMUP_STEPS or raise MAX_STEPS.",
    ),
    Need(
        "error",
        "num_generations",
        "",
        lambda now: now.num_generations > 1 or not now.compares,
        "NUM_GENERATIONS={now.num_generations} is too low for {now.algorithm}, which compares the rollouts of one"
        " question ({now.estimator}).",
        "Use at least 2, or ADVANTAGE_ESTIMATOR=reinforce or gae.",
    ),
    Need(
        "error",
        "importance_correction",
        "EMAILRL_ENGINE=transformers or vllm",
        lambda now: now.importance_correction == "off" or now.engine != "openai",
        "IMPORTANCE_CORRECTION={now.importance_correction} needs the sampler's log-probabilities, which"
        " EMAILRL_ENGINE=openai does not return.",
        "Train with EMAILRL_ENGINE=transformers or vllm.",
    ),
    Need(
        "error",
        "filter_low filter_high",
        "",
        lambda now: not now.dynamic_filtering or now.filter_low < now.filter_high,
        "No mean is between FILTER_LOW={now.filter_low:g} and FILTER_HIGH={now.filter_high:g}.",
        "Set the lower bound below the upper one.",
    ),
    Need(
        "error",
        "dynamic_filtering",
        "",
        lambda now: not now.dynamic_filtering or _reachable(now),
        "DYNAMIC_FILTERING drops every question with NUM_GENERATIONS={now.num_generations}: the share of correct"
        " answers is never between {now.filter_low:g} and {now.filter_high:g}.",
        "Use more rollouts, a wider range, or FILTER_ON=reward.",
    ),
    Need(
        "error",
        "max_staleness",
        "VLLM_URLS",
        lambda now: not now.lag or now.servers,
        "MAX_STALENESS={now.lag} needs samplers of their own; in process, sampling and training take turns.",
        "Use --engine vllm with VLLM_URLS (emailrl serve starts servers), or MAX_STALENESS=0.",
    ),
    Need(
        "error",
        "max_staleness",
        _CORRECTED,
        lambda now: not now.lag or now.importance_correction != "off",
        "MAX_STALENESS={now.lag} trains on rollouts of an older policy, which IMPORTANCE_CORRECTION=off ignores.",
        f"Use {_CORRECTED}, or MAX_STALENESS=0.",
    ),
    # Rarely as meant.
    Need(
        "note",
        "kl_estimator",
        "",
        lambda now: not (now.beta and now.kl_in == "loss" and now.kl_estimator == "k1"),
        "KL_ESTIMATOR=k1 with KL_IN=loss has zero gradient in expectation: use k2 or k3",
    ),
    Need(
        "note",
        "kl_estimator",
        "",
        lambda now: not (now.beta and now.kl_in == "reward" and now.kl_estimator != "k1"),
        "KL_ESTIMATOR={now.kl_estimator} with KL_IN=reward does not follow the gradient of the KL: use k1",
    ),
    Need(
        "note",
        "ratio_level",
        "",
        lambda now: now.ratio_level != "sequence" or max(now.clip_low, now.clip_high) <= 0.1,
        "RATIO_LEVEL=sequence averages over tokens: CLIP_LOW={now.clip_low:g} and CLIP_HIGH={now.clip_high:g} will"
        " hardly ever clip (GSPO uses 3e-4 and 4e-4)",
    ),
    Need(
        "note",
        "lora_dropout",
        "",
        lambda now: now.updates == 1 or not now.lora_dropout,
        "LORA_DROPOUT={now.lora_dropout:g} with {now.updates} updates per step makes the ratios noisy: each pass drops"
        " different weights; use LORA_DROPOUT=0",
    ),
    Need(
        "note",
        "whiten_advantages",
        "",
        lambda now: now.compares or now.critic or now.whiten_advantages,
        "{now.estimator} without WHITEN_ADVANTAGES has no baseline at all",
    ),
    Need(
        "note",
        "algorithm",
        "",
        lambda now: now.algorithm != "gspo" or now.updates > 1,
        f"--algorithm gspo differs from grpo only in its aggregation without {_UPDATES}",
    ),
)


def unmet(settings: Settings, now: SimpleNamespace, level: Level) -> Iterator[tuple[str, str]]:
    """Reason and remedy of each rule of this level that is not met."""
    for need in (need for need in NEEDS if need.level == level and not need.met(now)):
        if need.reason:
            yield need.reason.format(now=now), need.remedy
            continue
        for leaf in (by_name()[name] for name in need.settings.split()):
            section, env_name = getattr(settings, leaf.section), leaf.env_names[0]
            value = getattr(section, leaf.field)
            if level == "note" and leaf.field in section.model_fields_set:
                yield f"{env_name} has no effect: it needs {need.needs}", ""
            elif level == "error" and value != leaf.default:
                given = f"{env_name}={value:g}" if isinstance(value, float) else f"{env_name}={value}"
                yield f"{given} has no effect: it needs {need.needs}.", f"Set that, or unset {env_name}."


def without_effect(now: SimpleNamespace) -> dict[str, str]:
    """Settings without effect that ``train`` would refuse, and those that need them, with what each needs."""
    found: dict[str, str] = {}
    for need in (need for need in NEEDS if not need.reason):
        if (need.level == "error" and not need.met(now)) or need.needs.lower() in found:
            found |= dict.fromkeys(need.settings.split(), need.needs)
    return found


def needs_of(name: str) -> list[str]:
    """What a setting needs, as the reference page says it."""
    return [need.needs for need in NEEDS if need.needs and name in need.settings.split()]
