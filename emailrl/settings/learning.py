"""The sections of the tree about learning: training, the algorithm's overrides, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from emailrl.settings.fields import Env, Flag, Fraction, NonNegative, Positive, Section


def _on_or_off(value: object) -> object:
    words = {"true": "on", "1": "on", "yes": "on", "false": "off", "0": "off", "no": "off"}
    return words.get(str(value).lower(), value)


class TrainingSettings(Section):
    mode: Literal["simple", "rollout", "masked"] = "masked"
    """simple trains one completion on a static prompt, rollout all that follows the prompt, masked sampled tokens."""
    algorithm: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp, reinforce_pp_baseline or ppo: a set of advantage, clipping,
    aggregation and KL."""
    seed: Annotated[int, Field(ge=0, lt=2**63), Env("SEED")] = 42
    """Seed of everything random."""
    adapter: Annotated[Path | None, Env("ADAPTER_PATH")] = None
    """Begin from the adapter in this folder (PEFT's, a checkpoint, a run of `sft`), with its rank and targets; None
    begins from a fresh one."""
    max_steps: Positive = 200
    """Most steps of a run, in every mode; a step is one round of rollouts and the updates made from them."""
    num_train_epochs: Annotated[Positive, Env("NUM_TRAIN_EPOCHS", "NUM_EPOCHS"), Flag("--epochs")] = 2
    """Passes over the questions; bounds the modes simple and rollout only."""
    rest_epochs: NonNegative = 0
    """Passes that leave a question out after all its rollouts were right, or all were wrong; 0 asks every question in
    every pass."""
    per_device_train_batch_size: Annotated[
        Positive, Env("PER_DEVICE_TRAIN_BATCH_SIZE", "GROUPS_PER_STEP"), Flag("--batch-size")
    ] = 4
    """Questions per step, before GRADIENT_ACCUMULATION_STEPS multiplies them."""
    gradient_accumulation_steps: Positive = 1
    """Multiplies the questions of a step; the memory of its updates follows MAX_TOKENS_PER_MICRO_BATCH instead."""
    num_generations: Annotated[Positive, Env("NUM_GENERATIONS", "TRAJECTORIES_PER_GROUP")] = 3
    """Rollouts a question."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegative = 10
    """Steps the learning rate climbs from 0."""
    warmup_ratio: Fraction | None = None
    """Share of all steps that the learning rate climbs from 0; None takes WARMUP_STEPS."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """Share of the peak that a linear or cosine learning rate ends at."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta1: Fraction = 0.9
    """AdamW's decay of the gradient's mean."""
    adam_beta2: Fraction = 0.99
    """AdamW's decay of the gradient's square."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradient clipping by norm; 0 is off."""
    num_mini_batches: Positive = 1
    """Mini-batches that the trajectories of a step are split into; each makes one optimizer update."""
    update_epochs: Positive = 1
    """Passes over the mini-batches of a step."""
    max_tokens_per_micro_batch: Positive | None = None
    """Tokens of one forward pass in training; None is 16384 on a GPU, 2048 on a CPU (what fits its caches)."""
    max_rows_per_micro_batch: Positive | None = None
    """Samples of one forward pass in training, beside the bound on its tokens; None is any number."""
    packing: bool = True
    """Train without padding: samples in one row, attention confined to each. Needs SDPA and no sliding window."""
    prefix_sharing: bool = True
    """Compute once what samples of a micro-batch begin with alike, as a group's prompt. Needs packing, no dropout."""
    fused_layers: bool = True
    """On a GPU, train Llama, Mistral, Qwen2 and Qwen3 models by emailrl's own LoRA layers; needs packing."""
    gradient_checkpointing: Annotated[Literal["auto", "off", "selective", "on"], BeforeValidator(_on_or_off)] = "auto"
    """Recompute activations in the backward pass: on is least memory, off least time, selective keeps attention only;
    auto recomputes what does not fit the GPU, and nothing on a CPU. true and false mean on and off."""


def _listed(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class SftSettings(Section):
    """`emailrl sft`: what is imitated, and how long."""

    experts: Literal["auto", "questions", "demo", "none"] = "auto"
    """Where scripted experts play: on the training questions, on demo worlds, or nowhere; auto is the questions where a
    file of them is named, else nowhere beside trajectories, else demo worlds."""
    trajectories: Annotated[tuple[Path, ...], BeforeValidator(_listed)] = ()
    """Files of trajectories to imitate (`rollout`, `benchmark`), separated by commas: one of each question."""
    best_of: Positive | None = None
    """Look at the first so many trajectories of a question and imitate the one of the highest reward; None looks at
    all."""
    min_reward: float | None = None
    """Trajectories with less reward are not imitated."""
    full_finetuning: Annotated[bool, Flag("--full/--lora")] = False
    """Train all weights of the model, or (lora, the default) an adapter."""
    from_scratch: bool = False
    """Train a new model of 5 million parameters, and its tokenizer, on demo worlds."""
    sft_steps: Annotated[Positive, Flag("--steps")] = 300
    """Most optimizer steps."""
    sft_batch_size: Annotated[Positive, Flag("--batch-size")] = 32
    """Conversations a step."""
    sft_learning_rate: Annotated[Annotated[float, Field(gt=0)] | None, Flag("--learning-rate")] = None
    """Peak learning rate, reached after 5 % of the steps; None is 2e-4 for an adapter, 5e-5 for all weights, 2e-3 from
    scratch."""
    sft_eval_steps: Annotated[Positive, Flag("--eval-steps")] = 20
    """Steps from one validation loss, and checkpoint, to the next."""
    sft_patience: Annotated[Positive, Flag("--patience")] = 3
    """Validation losses in a row that are no lower than the lowest before training stops."""


class AlgorithmSettings(Section):
    """Overrides of the named algorithm; None takes what the algorithm says."""

    beta: Annotated[float, Field(ge=0), Env("BETA")] = 0.01
    """Weight of the KL to the reference policy; 0 computes no reference."""
    reference: Annotated[Literal["base", "start"], Env("REFERENCE")] = "base"
    """What the KL is measured to: the base model, or the policy as the run began (of use with `--adapter`)."""
    min_group_std: Annotated[float, Field(ge=0)] = 0.05
    """Groups whose rewards vary less are dropped and counted, where the estimator compares the rewards of a group."""
    advantage_estimator: Literal["group_norm", "dr_grpo", "reinforce_baseline", "rloo", "reinforce", "gae"] | None = (
        None
    )
    """What an action is worth: rewards compared in a group, the reward itself, or gae (PPO, with a critic)."""
    whiten_advantages: bool | None = None
    """Shift and scale the advantages to mean 0 and variance 1 over the tokens of a step."""
    ratio_level: Literal["token", "sequence"] | None = None
    """Whether each token has a ratio to the old policy, or each sequence one (GSPO)."""
    clip_low: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the loss of bad actions whose ratio grew."""
    kl_in: Literal["loss", "reward"] | None = None
    """Whether the KL is added to the loss or taken from the reward, token by token."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """How the KL is estimated from two log-probabilities."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """How token losses become one number."""
    constant_length: Positive | None = None
    """Tokens a sequence counts as under `constant` aggregation; None takes MAX_TOKENS."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """The KL that an adaptive weight steers to; None keeps the weight at BETA."""
    kl_horizon: Positive = 10000
    """Trajectories over which an adaptive KL weight moves."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the policy's entropy in the objective; 0 is off."""
    reward_clip_low: float | None = None
    """A lower reward, its group baseline subtracted, counts as this; None is off."""
    reward_clip_high: float | None = None
    """A higher reward, its group baseline subtracted, counts as this; None is off."""
    importance_correction: Literal["off", "tis", "icepop", "sequence_mask"] | None = None
    """Weighs tokens by trainer over sampler probability: clamped (tis), zeroed outside bounds (icepop), or whole
    sequences zeroed. None is tis where vLLM samples, else off."""
    correction_low: Annotated[float, Field(ge=0)] = 0.5
    """Lower bound of an importance weight."""
    correction_high: Annotated[float, Field(gt=0)] = 5.0
    """Upper bound of an importance weight."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount from one trained token to the next (gae and reinforce)."""
    gae_lambda: Fraction = 1.0
    """gae's trade of bias (0) against variance (1)."""
    value_clip: Annotated[float, Field(gt=0)] | None = None
    """How far a value may move from the old one before its error counts as clipped (gae)."""
    value_coef: Annotated[float, Field(gt=0)] = 0.1
    """Weight of the critic's loss, which also moves the adapter (gae)."""
    critic_learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate of the critic's head (gae)."""
    critic_warmup_steps: NonNegative = 0
    """First steps of a run in which the critic's head alone learns (gae)."""
    dynamic_filtering: bool | None = None
    """Train only on questions that are neither too hard nor too easy, and ask others in place of those dropped."""
    filter_on: Literal["accuracy", "reward"] | None = None
    """What dynamic filtering takes a group's mean of: the answer as 0 or 1 (mode simple: the reward), or the reward."""
    filter_low: float = 0.0
    """Groups whose mean is not above it are too hard."""
    filter_high: float = 1.0
    """Groups whose mean is not below it are too easy."""
    max_refill_rounds: NonNegative = 10
    """Times in a step that dynamic filtering asks further questions in place of those dropped."""
    overlong_buffer: NonNegative | None = None
    """Tokens before MAX_TOKENS over which a long completion is charged more and more; 0 is off."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """What a completion of MAX_TOKENS loses of its trajectory's reward."""
    truncated_trajectories: Literal["train", "mask"] = "train"
    """mask: a trajectory cut off at the token limit counts in its group's statistics, but none of its tokens train."""


class EvaluationSettings(Section):
    eval_steps: Positive = 10
    """Steps from one evaluation to the next."""
    eval_samples: Positive = 1
    """Samples of each validation question; above 1 needs EVAL_TEMPERATURE above 0."""
    target_accuracy: Fraction = 0.95
    """Training stops when an evaluation reaches it."""
    patience: Annotated[Positive, Env("PATIENCE")] = 5
    """Evaluations without a better accuracy before training stops. It stops only where the last so many evaluations
    are, question by question, no better than the so many before (upper end of a 95 % interval at most 0)."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """At signs of collapse (docs/rewards.md): warn, or stop with the state saved and name the last good checkpoint."""
