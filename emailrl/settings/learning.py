"""The sections of the tree about learning: training, the algorithm's overrides, evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from emailrl.settings.fields import Env, Fraction, NonNegative, Positive, Section


class TrainingSettings(Section):
    mode: Literal["simple", "rollout", "masked"] = "masked"
    """simple trains one completion on a static prompt, rollout all that follows the prompt, masked sampled tokens."""
    algorithm: str = "grpo"
    """A named set of advantage, clipping, aggregation and KL."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1), Env("SEED")] = 42
    """Seed of everything random."""
    max_steps: Positive = 200
    """Most optimizer steps of a run, in every mode."""
    num_train_epochs: Annotated[Positive, Env("NUM_TRAIN_EPOCHS", "NUM_EPOCHS")] = 2
    """Passes over the questions; bounds the modes simple and rollout only."""
    per_device_train_batch_size: Annotated[Positive, Env("PER_DEVICE_TRAIN_BATCH_SIZE", "GROUPS_PER_STEP")] = 4
    """Questions a rank a micro-step."""
    gradient_accumulation_steps: Positive = 1
    """Micro-steps to one optimizer step."""
    num_generations: Annotated[Positive, Env("NUM_GENERATIONS", "TRAJECTORIES_PER_GROUP")] = 3
    """Rollouts a question."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of AdamW."""
    warmup_steps: NonNegative = 10
    """Steps the learning rate climbs from 0."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta1: Fraction = 0.9
    """AdamW's decay of the gradient's mean."""
    adam_beta2: Fraction = 0.99
    """AdamW's decay of the gradient's square."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradient clipping by norm; 0 is off."""
    num_mini_batches: Positive = 1
    """Optimizer updates the trajectories of one step are split into."""
    update_epochs: Positive = 1
    """Passes over the trajectories of one step."""
    max_tokens_per_micro_batch: Positive | None = None
    """Tokens of one forward pass, padding included; None is 16384 on a GPU, 2048 on a CPU (what fits its caches)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


class AlgorithmSettings(Section):
    """Overrides of the named algorithm; None takes what the algorithm says."""

    beta: Annotated[float, Field(ge=0), Env("BETA")] = 0.01
    """Weight of the KL to the reference policy; 0 computes no reference."""
    min_group_std: Annotated[float, Field(ge=0)] = 0.05
    """Groups whose rewards vary less are dropped and counted."""
    clip_low: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] | None = None
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the loss of bad actions whose ratio grew."""
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
    dynamic_filtering: bool | None = None
    """Train only on questions that are neither too hard nor too easy, and ask others in place of those dropped."""
    filter_on: Literal["accuracy", "reward"] = "accuracy"
    """What dynamic filtering takes a group's mean of: the answer's 0 or 1, or the reward."""
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
    target_accuracy: Fraction = 0.95
    """Training stops when an evaluation reaches it."""
    patience: Annotated[Positive, Env("PATIENCE")] = 5
    """Evaluations without a better accuracy before training stops."""
