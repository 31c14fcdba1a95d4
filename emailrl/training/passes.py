"""Steps of a run, and gradient-free passes of a step before its first update, shared with ``emailrl plan``."""

from __future__ import annotations

import math

from emailrl.settings import TrainingSettings
from emailrl.training.algorithms import Algorithm


def needs_reference(kl_coef: float) -> bool:
    """Whether the reference policy scores the samples."""
    return kl_coef > 0


def needs_old_logprobs(algorithm: Algorithm, *, kl_coef: float, updates: int) -> bool:
    """Whether the policy scores the samples beforehand; otherwise the only update's own pass gives the same numbers.

    ``updates`` is the number per step. Advantages need a critic's values and a KL in the reward beforehand.
    """
    return algorithm.has_critic or (algorithm.kl_in == "reward" and kl_coef > 0) or updates > 1


def questions_per_step(training: TrainingSettings, num_ranks: int = 1) -> int:
    """Questions per step with this many ranks."""
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * num_ranks


def num_epochs(steps: int, per_step: int, num_questions: int) -> float:
    """Passes over the questions in ``steps`` steps; the last step of each pass may be short."""
    return steps / math.ceil(num_questions / per_step)


def count_steps(num_questions: int, per_step: int, max_steps: int, epochs: int | None) -> int:
    """Maximum steps of the run: MAX_STEPS, or fewer if the mode's epochs end first (``epochs`` None: no limit).

    Refills consume questions faster, so the epochs may end earlier still.
    """
    return max_steps if epochs is None else min(max_steps, epochs * math.ceil(num_questions / per_step))
