"""The sections of the tree about learning: training, the algorithm's overrides, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from emailrl.settings.fields import Bool, Decay, Env, Flag, Fraction, NonNegative, Positive, Section, Teacher

YEAR: Final = 365 * 24 * 3600
MOST_SAMPLES: Final = 10_000
LearningRate = Annotated[float, Field(gt=0, le=1)]


class TrainingSettings(Section):
    mode: Literal["simple", "rollout", "masked"] = "masked"
    """Tokens to train: one completion to a static prompt (simple), everything after the prompt (rollout), or only
    sampled tokens (masked)."""
    algorithm: str = "grpo"
    """Algorithm (advantage, clipping, aggregation and KL): grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp,
    reinforce_pp_baseline, ppo or opd."""
    teacher: Teacher = None
    """Teacher that `--algorithm opd` distills: a checkpoint or other adapter, a model (as MODEL_NAME), or the URL of a
    vLLM server. It needs the policy's tokenizer."""
    seed: Annotated[int, Field(ge=0, lt=2**63), Env("SEED")] = 42
    """Random seed."""
    adapter: Annotated[Path | None, Env("ADAPTER_PATH")] = None
    """Start from the adapter in this folder (PEFT, a checkpoint, or an `sft` run), with its rank and targets; default:
    a new adapter."""
    max_steps: Positive = 200
    """Maximum training steps, in every mode; a step is one round of rollouts and the updates on them."""
    num_train_epochs: Annotated[Positive, Env("NUM_TRAIN_EPOCHS", "NUM_EPOCHS"), Flag("--epochs")] = 2
    """Passes over the questions; limits only the modes simple and rollout."""
    per_device_train_batch_size: Annotated[
        Positive, Env("PER_DEVICE_TRAIN_BATCH_SIZE", "GROUPS_PER_STEP"), Flag("--batch-size")
    ] = 4
    """Questions per step and rank, before multiplication by GRADIENT_ACCUMULATION_STEPS."""
    gradient_accumulation_steps: Positive = 1
    """Multiplier of the questions per step; MAX_TOKENS_PER_MICRO_BATCH sets the memory of updates instead."""
    num_generations: Annotated[int, Field(ge=1, le=MOST_SAMPLES), Env("NUM_GENERATIONS", "TRAJECTORIES_PER_GROUP")] = 3
    """Rollouts per question."""
    learning_rate: LearningRate | Literal["auto"] = 1e-5
    """Peak learning rate of AdamW; auto is one for the model (docs/guides/learning_rate.md), named in the run's
    header."""
    warmup_steps: NonNegative = 10
    """Learning rate warm-up, in steps."""
    warmup_ratio: Fraction | None = None
    """Learning rate warm-up, as a share of all steps; default: WARMUP_STEPS."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate of linear and cosine schedules, as a share of the peak."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta1: Decay = 0.9
    """AdamW's beta1: decay of the gradient's running mean."""
    adam_beta2: Decay = 0.99
    """AdamW's beta2: decay of the squared gradient's running mean."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum gradient norm; 0 disables clipping."""
    num_mini_batches: Positive = 1
    """Mini-batches per step, each with one optimizer update. A step with fewer trajectories has as many as those."""
    update_epochs: Positive = 1
    """Passes over the mini-batches of a step."""
    max_tokens_per_micro_batch: Positive | None = None
    """Tokens per forward pass in training; default: 16384 on a GPU (131072 for models with a hidden size below 1024),
    2048 on a CPU (sized for its caches)."""
    max_rows_per_micro_batch: Positive | None = None
    """Samples per forward pass in training, in addition to the token limit; default: unlimited."""
    packing: bool = True
    """Train without padding: samples share a row, and attention stays within each. Needs SDPA and no sliding window."""
    prefix_sharing: bool = True
    """Compute common prefixes in a micro-batch, such as a group's prompt, only once. Needs packing and no dropout."""
    fused_layers: bool = True
    """Train Llama, Mistral, Qwen2 and Qwen3 models on a GPU with emailrl's own layers; needs packing."""
    nproc: Positive = 1
    """Training processes (ranks) per host, one per GPU; torchrun sets its own number."""
    nnodes: Positive = 1
    """Number of hosts; run the same command on each."""
    rank_timeout: Annotated[float, Field(gt=0, le=YEAR)] = 600
    """Seconds that ranks wait for each other during training, and that rollouts on several ranks or ahead of the
    trainer may go without progress, before the run ends with an error."""
    rank_start_timeout: Annotated[float, Field(gt=0, le=YEAR)] = 1800
    """Seconds that ranks wait for each other until the model is loaded on all of them."""
    gradient_checkpointing: Annotated[Literal["auto", "off", "selective", "on"], Bool] = "auto"
    """Recompute activations in the backward pass: on uses the least memory, off the least time, selective keeps only
    attention; auto recomputes what does not fit on the GPU, and nothing on a CPU. true and false mean on and off."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates per step; fewer if a step has fewer trajectories than mini-batches."""
        return self.num_mini_batches * self.update_epochs

    @property
    def peak_rate(self) -> float:
        """The peak learning rate; ValueError for auto, which `training.algorithms.with_rate` resolves."""
        if self.learning_rate == "auto":
            raise ValueError("LEARNING_RATE=auto is not resolved yet")
        return self.learning_rate


def _listed(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class SftSettings(Section):
    """`emailrl sft`: what to imitate, and for how long."""

    experts: Literal["auto", "questions", "demo", "none"] = "auto"
    """Tasks of scripted experts: the training questions, demo worlds or none. auto: the questions, if a
    question file is named or, without trajectories, lies next to the database; none with trajectories only; else
    demo."""
    trajectories: Annotated[tuple[Path, ...], BeforeValidator(_listed)] = ()
    """Comma-separated trajectory files to imitate, one trajectory per question. They are from `rollout` or `benchmark`,
    or of other programs: ATIF documents, chat messages in OpenAI's form, or folders of these."""
    best_of: Positive | None = None
    """Imitate the highest-reward trajectory among the first N of each question (default: among all)."""
    min_reward: float | None = None
    """Skip trajectories with a lower reward."""
    full_finetuning: Annotated[bool, Flag("--full/--lora")] = False
    """Train all weights of the model, or an adapter (lora, the default)."""
    from_scratch: bool = False
    """Train a new model with 5 million parameters, and its tokenizer, on demo worlds."""
    sft_steps: Annotated[Positive, Flag("--max-steps")] = 300
    """Maximum optimizer steps."""
    sft_batch_size: Annotated[Positive, Flag("--batch-size")] = 32
    """Conversations per step."""
    sft_learning_rate: Annotated[LearningRate | None, Flag("--learning-rate")] = None
    """Peak learning rate, reached after 5% of the steps; default: 2e-4 for an adapter, 5e-5 for full fine-tuning, 2e-3
    from scratch."""
    sft_eval_steps: Annotated[Positive, Flag("--eval-steps")] = 20
    """Steps between validations, each with a checkpoint."""
    sft_patience: Annotated[Positive, Flag("--patience")] = 3
    """Stop after this many validations in a row without a new lowest loss."""


class AlgorithmSettings(Section):
    """Overrides of the named algorithm; None keeps the algorithm's own value."""

    beta: Annotated[float, Field(ge=0), Env("BETA")] = 0.01
    """KL coefficient; 0 skips the reference policy."""
    reference: Annotated[Literal["auto", "base", "start"], Env("REFERENCE")] = "auto"
    """Reference policy of the KL: the base model, or the policy at the start of the run; auto is start with
    `--adapter`, else base."""
    min_group_std: Annotated[float, Field(ge=0)] = 0.05
    """Groups whose rewards have a lower standard deviation are dropped and counted, if the estimator compares rewards
    within a group."""
    advantage_estimator: (
        Literal["group_norm", "dr_grpo", "reinforce_baseline", "rloo", "reinforce", "gae", "teacher"] | None
    ) = None
    """Advantage estimator: rewards compared within a group, the reward itself, gae (PPO, with a critic), or teacher
    (TEACHER's log-probability of each sampled token less the policy's)."""
    whiten_advantages: bool | None = None
    """Normalize advantages to mean 0 and variance 1 over the tokens of a step."""
    ratio_level: Literal["token", "sequence"] | None = None
    """Importance ratio to the old policy, per token or per sequence (GSPO)."""
    surrogate: Literal["ppo", "cispo"] | None = None
    """Policy loss: PPO's clipped objective, or CISPO's, which clips the ratio as a constant weight of the
    log-probability, so that no token loses its gradient."""
    clip_low: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the loss for negative advantages with a large ratio."""
    kl_in: Literal["loss", "reward"] | None = None
    """Add the KL to the loss, or subtract it from the reward of each token."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """KL estimator on the log-probabilities of both policies."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """Aggregation of token losses."""
    constant_length: Positive | None = None
    """Sequence length assumed by `constant` aggregation, in tokens; default: MAX_TOKENS, plus
    MAX_THINKING_TOKENS if set."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Target of an adaptive KL coefficient; default: fixed at BETA."""
    kl_horizon: Positive = 10000
    """Horizon of the adaptive KL coefficient, in trajectories."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Entropy bonus coefficient; 0 disables it."""
    reward_clip_low: float | None = None
    """Minimum reward after subtracting the group baseline; default: off."""
    reward_clip_high: float | None = None
    """Maximum reward after subtracting the group baseline; default: off."""
    importance_correction: Literal["off", "tis", "icepop", "sequence_mask"] | None = None
    """Weight tokens by trainer over sampler probability: clamped (tis), zeroed outside the bounds (icepop), or zeroed
    by whole sequences (sequence_mask). The default is tis when vLLM samples, else off."""
    correction_low: Annotated[float, Field(ge=0)] | None = None
    """Lower bound of importance weights; default: 0 for tis, which then raises no weight, else 0.5."""
    correction_high: Annotated[float, Field(gt=0)] = 5.0
    """Upper bound of importance weights."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per trained token (gae and reinforce)."""
    gae_lambda: Fraction = 1.0
    """GAE lambda: trades bias (0) against variance (1)."""
    value_clip: Annotated[float, Field(gt=0)] | None = None
    """Maximum change of a value from the old one before its error is clipped (gae)."""
    value_coef: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the critic's loss, which also trains the adapter (gae)."""
    critic_learning_rate: LearningRate = 1e-4
    """Peak learning rate of the critic's head (gae)."""
    critic_warmup_steps: NonNegative = 0
    """Initial steps that train only the critic's head (gae)."""
    dynamic_filtering: bool | None = None
    """Train only on questions that are neither too hard nor too easy, and replace those dropped."""
    filter_on: Literal["accuracy", "reward", "spread"] | None = None
    """Metric averaged per group for dynamic filtering: accuracy (answers as 0 or 1; the reward in mode simple) or
    reward; spread sets no range and replaces only groups below MIN_GROUP_STD."""
    filter_low: float = 0.0
    """Groups with a mean not above this are too hard."""
    filter_high: float = 1.0
    """Groups with a mean not below this are too easy."""
    max_refill_rounds: NonNegative = 10
    """Maximum rounds of replacement questions per step in dynamic filtering."""
    overlong_buffer: NonNegative | None = None
    """Tokens before MAX_TOKENS over which the penalty for long completions grows; 0 disables it."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Reward subtracted from a trajectory for a completion of MAX_TOKENS."""
    truncated_trajectories: Literal["train", "mask"] = "train"
    """With mask, trajectories cut off at the token limit count in group statistics, but none of their tokens are
    trained."""


class EvaluationSettings(Section):
    eval_steps: Positive = 10
    """Steps between evaluations."""
    eval_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    """Samples per validation question; more than 1 needs EVAL_TEMPERATURE above 0."""
    target_accuracy: Fraction = 0.95
    """Stop training when an evaluation reaches this accuracy."""
    patience: Annotated[Positive, Env("PATIENCE")] = 5
    """Evaluations without a better accuracy before training stops. It stops only if the last N evaluations are,
    question by question, worse than the N before by three standard errors, or no verdict has changed; a run with fewer
    than 2 N evaluations never does."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """On signs of collapse (docs/reference/rewards.md), warn, or stop, save the state and name the last good
    checkpoint."""
