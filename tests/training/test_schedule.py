"""The learning rate by step, worked out by hand."""

from __future__ import annotations

import pytest

from emailrl.settings import Settings
from emailrl.training.update import learning_rate


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        # Warm-up over 4 steps, 8 in all; the decay runs from step 4 to step 9, where it would be 0.
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1, 0.9045085, 0.6545085, 0.3454915, 0.0954915]),
    ],
)
def test_learning_rate(scheduler: str, rates: list[float]) -> None:
    training = Settings.model_validate(
        {"training": {"learning_rate": 0.5, "warmup_steps": 4, "lr_scheduler": scheduler}}
    ).training
    assert [learning_rate(step, training, 8) / 0.5 for step in range(1, 9)] == pytest.approx(rates, abs=1e-6)
    no_warmup = training.model_copy(update={"warmup_steps": 0})
    assert learning_rate(1, no_warmup, 8) == 0.5
