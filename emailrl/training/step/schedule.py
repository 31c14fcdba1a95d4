"""The learning rate, as a function of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from emailrl.settings import TrainingSettings


def learning_rate(step: int, training: TrainingSettings, total_steps: int) -> float:
    """Learning rate of all updates of step ``step`` (from 1): linear warm-up, then constant, linear or cosine decay.

    The last step of the warm-up is the first at full rate; step ``total_steps`` is the last above ``min_lr_ratio`` of
    it.
    """
    warmup = training.warmup_steps
    if training.warmup_ratio is not None:
        warmup = math.ceil(training.warmup_ratio * total_steps)
    if step < warmup:
        return training.learning_rate * step / warmup
    start = max(warmup, 1)
    progress = min((step - start) / max(total_steps + 1 - start, 1), 1.0)
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    left = decay[training.lr_scheduler]
    return training.learning_rate * (training.min_lr_ratio + (1 - training.min_lr_ratio) * left)
