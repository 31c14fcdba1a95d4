"""Which setting needs which: one table for `train`'s errors and notes, OpenRLHF's flags and the page of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final, Literal

from emailrl.settings.fields import is_url
from emailrl.settings.names import by_name

Level = Literal["error", "note"]


@dataclass(frozen=True, slots=True)
class Need:
    """One row: ``train`` stops if it is not met (error), or says so in the run's header (note)."""

    level: Level
    settings: str
    """Names of the settings that have no effect without what they need, which matters only if one was given."""
    needs: str  # What they need, as the reference page and the messages say it.
    met: Callable[[SimpleNamespace], object]
    """Reads the values in force: every setting by name, as `training.algorithms.in_force` derives them."""


_OF_CRITIC: Final = "value_clip value_coef critic_learning_rate critic_warmup_steps gae_lambda"
_OF_FILTER: Final = "filter_on filter_low filter_high max_refill_rounds"
_OF_SERVERS: Final = (
    "vllm_tensor_parallel_size vllm_gpu_memory_utilization vllm_enforce_eager vllm_enable_prefix_caching"
    " vllm_enable_sleep"
)
_OF_REWARDS: Final = "reward_clip_low reward_clip_high overlong_buffer overlong_penalty"
_CORRECTED: Final = "IMPORTANCE_CORRECTION=tis, icepop or sequence_mask"
_UPDATES: Final = "NUM_MINI_BATCHES or UPDATE_EPOCHS above 1 (else every ratio is 1)"

NEEDS: Final = (  # what has no effect without another setting
    Need("error", _OF_CRITIC, "ADVANTAGE_ESTIMATOR=gae (--algorithm ppo)", lambda now: now.critic),
    Need("error", "teacher", "ADVANTAGE_ESTIMATOR=teacher (--algorithm opd)", lambda now: now.distills),
    Need("error", "gamma", "ADVANTAGE_ESTIMATOR=gae or reinforce", lambda now: not (now.compares or now.distills)),
    Need("error", "constant_length", "LOSS_AGGREGATION=constant", lambda now: now.loss_aggregation == "constant"),
    Need("error", "kl_target", "BETA above 0", lambda now: now.beta),
    Need("error", "correction_low correction_high", _CORRECTED, lambda now: now.importance_correction != "off"),
    Need("error", _OF_FILTER, "DYNAMIC_FILTERING=true (--algorithm dapo)", lambda now: now.dynamic_filtering),
    Need("error", "filter_low filter_high", "FILTER_ON=accuracy or reward", lambda now: now.filter_on != "spread"),
    Need("error", "dual_clip", "EMAILRL_SURROGATE=ppo", lambda now: now.surrogate == "ppo"),
    Need("error", "overlong_penalty", "OVERLONG_BUFFER", lambda now: now.overlong),
    Need("note", _OF_REWARDS, "an ADVANTAGE_ESTIMATOR of rewards", lambda now: not now.distills),
    Need("note", "clip_low clip_high dual_clip value_clip ratio_level", _UPDATES, lambda now: now.updates > 1),
    Need("note", "reference", "BETA above 0", lambda now: now.beta or now.reference != "start"),
    Need("note", "kl_horizon", "KL_TARGET", lambda now: now.kl_target is not None),
    Need("note", "min_group_std", "an ADVANTAGE_ESTIMATOR that compares rewards", lambda now: now.compares),
    Need("note", "min_lr_ratio", "LR_SCHEDULER=linear or cosine", lambda now: now.lr_scheduler != "constant"),
    Need("note", "warmup_steps", "WARMUP_RATIO unset", lambda now: now.warmup_ratio is None),
    Need("note", "export_format", "EXPORT_DIR", lambda now: now.export_dir is not None),
    Need("note", "shard_offload", "SHARD=auto or host", lambda now: now.shard != "off"),
    Need("note", _OF_SERVERS, "VLLM_URLS unset, because servers have their own flags", lambda now: not now.vllm_urls),
)
REFUSED: Final = (  # what a setting needs, in the words of the page, where ``_contradictions`` has the rule
    ("importance_correction", "EMAILRL_ENGINE=transformers or vllm"),
    ("teacher", "TEMPERATURE=1 if it is a server"),
    ("max_staleness", "VLLM_URLS"),
    ("max_staleness", _CORRECTED),
)


def _contradictions(now: SimpleNamespace) -> Iterator[tuple[str, str]]:
    """Reason and remedy of each combination that cannot be trained."""
    if now.ratio_level == "sequence":
        one, token = "RATIO_LEVEL=sequence needs one advantage per sequence", "or RATIO_LEVEL=token."
        if now.critic or now.distills:
            yield f"{one}, but {now.estimator} gives one per token.", f"Use ADVANTAGE_ESTIMATOR=group_norm, {token}"
        if now.kl_in == "reward" and now.beta:
            yield f"{one}, but KL_IN=reward penalizes each token separately.", f"Use KL_IN=loss, BETA=0, {token}"
        if now.gamma != 1:
            yield f"{one}; EMAILRL_GAMMA={now.gamma:g} gives one per token.", f"Use EMAILRL_GAMMA=1, {token}"
    corrects, below = now.importance_correction != "off", "Set the lower bound below the upper one"
    if corrects and now.correction_low >= now.correction_high:
        bounds = f"CORRECTION_LOW={now.correction_low:g} and CORRECTION_HIGH={now.correction_high:g}"
        yield f"No weight is between {bounds}.", f"{below}, with 1 between them."
    low, high = now.reward_clip_low, now.reward_clip_high
    if None not in (low, high) and low >= high:
        yield f"No reward is between REWARD_CLIP_LOW={low:g} and REWARD_CLIP_HIGH={high:g}.", f"{below}."
    if now.critic and now.critic_warmup_steps >= now.max_steps:
        problem = f"CRITIC_WARMUP_STEPS={now.critic_warmup_steps} leaves none of MAX_STEPS={now.max_steps}"
        yield f"{problem} for the policy.", "Lower CRITIC_WARMUP_STEPS or raise MAX_STEPS."
    if now.distills and not now.teacher:
        yield f"{now.estimator} needs a TEACHER.", "Name a checkpoint, a model or a vLLM server: --teacher."
    if now.distills and now.kl_in == "reward" and now.beta:
        yield f"KL_IN=reward has no reward to change with {now.estimator}.", "Use KL_IN=loss or BETA=0."
    if now.distills and is_url(now.teacher or "") and now.temperature not in (0, 1):
        problem = "A server returns log-probabilities before temperature, so a TEACHER there needs TEMPERATURE=1, not"
        yield f"{problem} {now.temperature:g}.", "Use --temperature 1, or a teacher in this process."
    rollouts = f"NUM_GENERATIONS={now.num_generations}"
    if now.compares and now.num_generations <= 1:
        problem = f"{rollouts} is too low for {now.algorithm}, which compares the rollouts of one question"
        yield f"{problem} ({now.estimator}).", "Use at least 2, or ADVANTAGE_ESTIMATOR=reinforce or gae."
    if now.reward == "ruler" and (now.mode == "simple" or now.num_generations <= 1):
        problem = (
            "Mode simple has a reward of its own" if now.mode == "simple" else f"{rollouts} leaves nothing to compare"
        )
        yield f"{problem}: --reward ruler compares the rollouts of one question.", "Use --mode masked and 2 or more."
    if corrects and now.engine == "openai":
        problem = f"IMPORTANCE_CORRECTION={now.importance_correction} needs the sampler's log-probabilities, which"
        yield f"{problem} EMAILRL_ENGINE=openai does not return.", "Train with EMAILRL_ENGINE=transformers or vllm."
    if now.dynamic_filtering and now.filter_on != "spread":
        low, high = now.filter_low, now.filter_high
        no_answers = now.mode == "simple" or now.reward == "ruler"
        by_reward = now.filter_on == "reward" or (now.filter_on is None and no_answers)
        shares = (right / now.num_generations for right in range(now.num_generations + 1))
        if low >= high:
            yield f"No mean is between FILTER_LOW={low:g} and FILTER_HIGH={high:g}.", f"{below}."
        if not by_reward and not any(low < share < high for share in shares):
            problem = f"DYNAMIC_FILTERING drops every question with {rollouts}: the share of correct answers"
            remedy = "Use more rollouts, a wider range, or FILTER_ON=reward."
            yield f"{problem} is never between {low:g} and {high:g}.", remedy
    lag = f"MAX_STALENESS={now.lag}"
    if now.lag and not now.servers:
        problem = f"{lag} needs samplers of their own; in process, sampling and training take turns."
        yield problem, "Use --engine vllm with VLLM_URLS (emailrl serve starts servers), or MAX_STALENESS=0."
    if now.lag and not corrects:
        problem = f"{lag} trains on rollouts of an older policy, which IMPORTANCE_CORRECTION=off ignores."
        yield problem, f"Use {_CORRECTED}, or MAX_STALENESS=0."


def errors(now: SimpleNamespace) -> Iterator[tuple[str, str]]:
    """Reason and remedy of everything that ``train`` refuses."""
    for need, env_name, value in _idle(now, "error"):
        given = f"{env_name}={value:g}" if isinstance(value, float) else f"{env_name}={value}"
        yield f"{given} has no effect: it needs {need}.", f"Set that, or unset {env_name}."
    yield from _contradictions(now)


def notes(now: SimpleNamespace) -> Iterator[str]:
    """What a run's header says about its settings."""
    for need, env_name, _ in _idle(now, "note"):
        yield f"{env_name} has no effect: it needs {need}"
    # Combinations that rarely work as meant.
    if now.beta and now.kl_in == "loss" and now.kl_estimator == "k1":
        yield "KL_ESTIMATOR=k1 with KL_IN=loss has zero gradient in expectation: use k2 or k3"
    if now.beta and now.kl_in == "reward" and now.kl_estimator != "k1":
        yield f"KL_ESTIMATOR={now.kl_estimator} with KL_IN=reward does not follow the gradient of the KL: use k1"
    if now.ratio_level == "sequence" and max(now.clip_low, now.clip_high) > 0.1:
        clips = f"CLIP_LOW={now.clip_low:g} and CLIP_HIGH={now.clip_high:g}"
        yield f"RATIO_LEVEL=sequence averages over tokens: {clips} will hardly ever clip (GSPO uses 3e-4 and 4e-4)"
    if now.updates > 1 and now.lora_dropout:
        passes = f"LORA_DROPOUT={now.lora_dropout:g} with {now.updates} updates per step makes the ratios noisy"
        yield f"{passes}: each pass drops different weights; use LORA_DROPOUT=0"
    if not (now.compares or now.critic or now.distills or now.whiten_advantages):
        yield f"{now.estimator} without WHITEN_ADVANTAGES has no baseline at all"
    if now.reward == "ruler" and not now.compares:
        yield f"--reward ruler scores rollouts only relative to their group, which {now.estimator} does not compare"
    if now.algorithm == "gspo" and now.updates == 1:
        yield f"--algorithm gspo differs from grpo only in its aggregation without {_UPDATES}"
    if now.surrogate == "cispo" and now.updates == 1:
        chosen = "EMAILRL_SURROGATE=cispo" if "surrogate" in now.given else f"--algorithm {now.algorithm}"
        yield f"{chosen} trains as grpo does without {_UPDATES}"


def _idle(now: SimpleNamespace, level: Level) -> Iterator[tuple[str, str, object]]:
    """What each given setting without effect needs, its name, and its value; a default is no error."""
    for need in NEEDS:
        if need.level == level and not need.met(now):
            for leaf in (by_name()[name] for name in need.settings.split() if name in now.given):
                value = now.given[leaf.key]
                if level == "note" or value != leaf.default:
                    yield need.needs, leaf.env_names[0], value


def without_effect(now: SimpleNamespace) -> dict[str, str]:
    """Settings without effect that ``train`` would refuse, and those that need them, with what each needs."""
    found: dict[str, str] = {}
    for need in NEEDS:
        if (need.level == "error" and not need.met(now)) or need.needs.lower() in found:
            found |= dict.fromkeys(need.settings.split(), need.needs)
    return found
