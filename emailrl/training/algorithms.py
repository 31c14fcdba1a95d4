"""Modes and algorithms as data, the algorithm that the settings make of them, and the passes and steps of a run. The
loop and the update read fields, never a name; a new algorithm is a new row of ``ALGORITHMS``. ``emailrl plan`` shares
this file, so it imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final, Literal

from emailrl.agent.task import MailEnvironment, StaticPromptEnvironment
from emailrl.base.errors import UsageError
from emailrl.model.resolve import resolve_model, same_base
from emailrl.model.shape import load_config
from emailrl.settings import Settings, TrainingSettings
from emailrl.settings.names import changed, leaves, nearest
from emailrl.settings.needs import errors, notes

LossMask = Literal["sampled", "after_prompt", "completion"]
"""Tokens that a mode trains: the sampled ones (masked), all after the prompt including tool results (rollout), or
those of the completion (simple: the sampled ones of a single-completion trajectory)."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to train; evaluations are agent rollouts with the settings' reward in every mode, as in ``benchmark``."""

    name: str
    summary: str  # Description for a run's header
    loss_mask: LossMask
    epochs_bound: bool = True  # NUM_TRAIN_EPOCHS ends the run; otherwise the questions repeat until MAX_STEPS
    make_environment: type[MailEnvironment] | None = None
    """Replaces the settings' environment; None keeps it."""
    reward: str | None = None  # Replaces the settings' reward, by name; None keeps it


_SIMPLE = "static prompts and a heuristic reward, for smoke tests"
MODES: Final = {
    "masked": Mode("masked", "real rollouts, training only the tokens the policy sampled", "sampled", False),
    "rollout": Mode("rollout", "real rollouts, training everything after the prompt", "after_prompt"),
    "simple": Mode("simple", _SIMPLE, "completion", make_environment=StaticPromptEnvironment, reward="heuristic"),
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One policy-gradient algorithm. ``docs/reference/algorithms.md`` compares each field with its paper."""

    name: str
    advantage: str  # A key of ``advantages.ESTIMATORS``, or per token: ``gae`` (from a critic), ``teacher``
    whiten: bool = False
    """Shift and scale the advantages to mean 0 and variance 1 over all trainable tokens of the step."""
    surrogate: Literal["ppo", "cispo"] = "ppo"
    """What the ratio's clip bounds: PPO's objective, or CISPO's constant weight of each log-probability."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio_level: Literal["token", "sequence"] = "token"
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    value_clip: float | None = None  # Maximum change of a value from its old estimate before its error is clipped
    dynamic_filtering: bool = False
    """Train only on groups whose mean is inside a range, and replace the others with more questions."""
    importance_correction: Literal["off", "tis", "icepop", "sequence_mask"] = "off"
    """Importance weighting of tokens when the sampler differs from the trainer's policy."""
    overlong_share: float = 0.0  # Final share of MAX_TOKENS over which the length penalty grows; 0 is off

    @property
    def has_critic(self) -> bool:
        """Whether a value head estimates returns."""
        return self.advantage == "gae"

    @property
    def has_teacher(self) -> bool:
        """Whether advantages come from a teacher's log-probabilities: rewards are then only measured."""
        return self.advantage == "teacher"

    @property
    def compares_rollouts(self) -> bool:
        """Whether rewards are compared within their group: if so, equal rewards teach nothing, and it takes two."""
        return self.advantage not in ("reinforce", "gae", "teacher")


_ROWS = (
    Algorithm("grpo", "group_norm"),
    Algorithm("dr_grpo", "dr_grpo", aggregation="constant"),
    Algorithm("dapo", "group_norm", clip_high=0.28, dynamic_filtering=True, overlong_share=0.2),
    Algorithm("gspo", "group_norm", clip_low=3e-4, clip_high=4e-4, ratio_level="sequence", aggregation="sequence_mean"),
    Algorithm("cispo", "group_norm", surrogate="cispo", clip_low=1.0, clip_high=4.0),
    Algorithm("rloo", "rloo", kl_estimator="k1", kl_in="reward"),
    Algorithm("reinforce_pp", "reinforce", whiten=True, kl_estimator="k1", kl_in="reward"),
    Algorithm("reinforce_pp_baseline", "reinforce_baseline", whiten=True, kl_estimator="k2"),
    Algorithm("ppo", "gae", whiten=True, kl_estimator="k1", kl_in="reward", value_clip=0.5),
    Algorithm("opd", "teacher"),
)
ALGORITHMS: Final = {algorithm.name: algorithm for algorithm in _ROWS}
_SAME_NAME: Final = (
    *("surrogate", "clip_low", "clip_high", "dual_clip", "ratio_level", "kl_estimator", "kl_in", "value_clip"),
    *("dynamic_filtering", "importance_correction"),
)
OVERRIDES: Final = {name: name for name in _SAME_NAME} | {
    "advantage_estimator": "advantage",
    "whiten_advantages": "whiten",
    "loss_aggregation": "aggregation",
}  # Setting → the field of the algorithm that it overrides


def resolve(settings: Settings) -> Algorithm:
    """Return the algorithm named by ``settings.training.algorithm``, with the overrides of ``settings.algorithm``.
    Raises UsageError for an unknown name, for conflicting settings, and for one that another disables."""
    algorithm, now = in_force(settings)
    for reason, remedy in errors(now):
        raise UsageError(reason, remedy)
    return algorithm


def advice(settings: Settings) -> list[str]:
    """Settings that were given but have no effect, and combinations that rarely work as meant; for the run's header."""
    return list(notes(in_force(settings)[1]))


def in_force(settings: Settings) -> tuple[Algorithm, SimpleNamespace]:
    """The algorithm, unchecked, and every setting by name, for `settings.needs`. The names have the algorithm's values
    where they are not set; ``given`` has those that are."""
    name = settings.training.algorithm
    if name not in ALGORITHMS:
        near = nearest(name, ALGORITHMS)
        hint = f"Did you mean {near}? " if near else ""
        raise UsageError(f"Unknown algorithm '{name}'.", f"{hint}Known: {', '.join(ALGORITHMS)}.")
    # vLLM's kernels compute slightly different log-probabilities from the trainer's; other trainers correct too.
    fields: dict[str, Any] = {"importance_correction": "tis" if settings.agent.engine == "vllm" else "off"}
    wanted = {field: getattr(settings.algorithm, setting) for setting, field in OVERRIDES.items()}
    algorithm = replace(ALGORITHMS[name], **fields | {field: one for field, one in wanted.items() if one is not None})
    if not algorithm.has_critic:
        algorithm = replace(algorithm, value_clip=settings.algorithm.value_clip)
    sections = {leaf: getattr(settings, leaf.section) for leaf in leaves()}
    own = {leaf.key: getattr(section, leaf.field) for leaf, section in sections.items()}
    given = {leaf.key: own[leaf.key] for leaf, section in sections.items() if leaf.field in section.model_fields_set}
    values = own | {setting: getattr(algorithm, field) for setting, field in OVERRIDES.items()}
    buffer = settings.algorithm.overlong_buffer
    if values["correction_low"] is None:
        values["correction_low"] = default_low(algorithm.importance_correction)
    source = "" if settings.algorithm.advantage_estimator else f" (--algorithm {algorithm.name})"
    return algorithm, SimpleNamespace(
        **values,
        given=given,
        critic=algorithm.has_critic,
        distills=algorithm.has_teacher,
        compares=algorithm.compares_rollouts,
        estimator=f"ADVANTAGE_ESTIMATOR={algorithm.advantage}{source}",
        overlong=algorithm.overlong_share if buffer is None else buffer,
        updates=settings.training.updates_per_step,
        servers=settings.has_servers,
        lag=settings.staleness,
    )


def default_low(correction: str) -> float:
    """Lower bound of importance weights: 0 for ``tis``, as raising small weights biases the gradient, else 0.5."""
    return 0.0 if correction == "tis" else 0.5


def needs_old_logprobs(algorithm: Algorithm, *, kl_coef: float, updates: int) -> bool:
    """Whether the policy scores the samples beforehand; otherwise the only update's own pass gives the same numbers.
    ``updates`` is the number per step. Advantages need a critic's values, a KL in the reward and the distance to a
    teacher beforehand."""
    before = algorithm.has_critic or algorithm.has_teacher or (algorithm.kl_in == "reward" and kl_coef > 0)
    return before or updates > 1


MEASURED_RATES: Final = {"nano": 2e-3, "smol": 3e-4, "smol-base": 3e-4}  # docs/guides/learning_rate.md
QWEN, LLAMA = 0.0775, 0.781
"""tinker's exponents: a family's best rate falls with (hidden size)^-exponent (sl-hyperparams, tinker-docs)."""


def auto_rate(family: str, hidden: int) -> float:
    """Peak learning rate of a LoRA adapter, to two digits: the one measured on SmolLM2-135M (a Llama of hidden size
    576), carried to this size as tinker carries its rates for LoRA, (2000 / hidden)^exponent, whatever the rank. Its
    scale is ours, as tinker's is that of supervised training, 4.4 times this. Families that tinker did not measure
    have the lower of both rates. ``family`` is transformers' model type."""
    exponents = [each for name, each in (("qwen", QWEN), ("llama", LLAMA)) if family.startswith(name)]
    scale = MEASURED_RATES["smol"] / (2000 / 576) ** LLAMA
    return float(f"{scale * min((2000 / hidden) ** each for each in exponents or (QWEN, LLAMA)):.2g}")


def with_rate(settings: Settings) -> tuple[Settings, list[str]]:
    """The settings with a number for LEARNING_RATE=auto, and a note on it for the run's header."""
    name = settings.model.name
    if settings.training.learning_rate != "auto":
        return settings, []
    if rate := next((each for base, each in MEASURED_RATES.items() if same_base(name, base)), None):
        why = f"measured with {name}"
    else:
        config = load_config(name, resolve_model(name, settings.model.smol_base)).get_text_config()
        rate = auto_rate(config.model_type, config.hidden_size)
        why = f"by hidden size {config.hidden_size} of {config.model_type}, for LoRA"
    return changed(settings, learning_rate=rate), [f"LEARNING_RATE=auto is {rate:g}: {why}"]


def questions_per_step(training: TrainingSettings, num_ranks: int = 1) -> int:
    """Questions per step with this many ranks."""
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * num_ranks


def num_epochs(steps: int, per_step: int, num_questions: int) -> float:
    """Passes over the questions in ``steps`` steps; the last step of each pass may be short."""
    return steps / math.ceil(num_questions / per_step)


def count_steps(num_questions: int, per_step: int, max_steps: int, epochs: int | None) -> int:
    """Most steps of a run: MAX_STEPS, or fewer if its epochs (None: no limit) end first; refills may end it earlier."""
    return max_steps if epochs is None else min(max_steps, epochs * math.ceil(num_questions / per_step))


def learning_rate(step: int, training: TrainingSettings, total_steps: int) -> float:
    """Learning rate of all updates of step ``step`` (from 1): linear warm-up, then constant, linear or cosine decay.
    Step ``total_steps`` is the last above ``min_lr_ratio`` of the full rate."""
    warmup = training.warmup_steps
    if training.warmup_ratio is not None:
        warmup = math.ceil(training.warmup_ratio * total_steps)
    if step < warmup:
        return training.peak_rate * step / warmup
    start = max(warmup, 1)
    progress = min((step - start) / max(total_steps + 1 - start, 1), 1.0)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    left = decay[training.lr_scheduler]
    return training.peak_rate * (training.min_lr_ratio + (1 - training.min_lr_ratio) * left)
