"""Out of memory in an update: smaller micro-batches, the same result, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from training.updaters import LENGTHS, PAID, Make, Memory, assert_close, gradients, samples

from emailrl.base.errors import EmailRLError
from emailrl.training import forward
from emailrl.training.batch import TrainingSample, micro_batches


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo"])
@pytest.mark.parametrize("only_training", [False, True])
def test_memory_that_runs_out_halves_micro_batches_with_the_same_result(
    make: Make, name: str, only_training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"algorithm": name, "beta": 0.1 if name != "gspo" else 0.0, "update_epochs": 2}
    rich, poor = make(**options), make(**options)
    expected = rich.train(samples(), PAID, step=1).metrics
    memory = Memory(20, training=only_training or None)
    monkeypatch.setattr(forward, "token_logprobs", memory)
    metrics = poor.train(samples(), PAID, step=1).metrics
    assert metrics.pop("micro_batches_halved") == memory.refused > 0 and expected.pop("micro_batches_halved") == 0
    assert metrics == pytest.approx(expected, abs=1e-5, rel=1e-4)
    assert_close(gradients(poor), gradients(rich))
    refused = memory.refused
    poor.train(samples(), PAID, step=2)
    assert memory.refused == refused  # it has learned what fits


def test_half_a_gradient_is_thrown_away(make: Make) -> None:
    """Memory may run out in the middle of a backward pass, with some parameters' gradients already added."""
    rich, poor = make(), make()
    rich.train(samples(), PAID, step=1)
    refused: list[int] = []

    def refuse(gradient: Tensor) -> None:
        if not refused:
            refused.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = poor.parameters[0].register_hook(refuse)  # the first layer's: backward reaches it last
    metrics = poor.train(samples(), PAID, step=1).metrics
    handle.remove()
    assert metrics["micro_batches_halved"] == 1
    assert_close(gradients(poor), gradients(rich))


def test_one_sample_that_does_not_fit_is_an_error_that_says_what_to_do(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = make()
    monkeypatch.setattr(forward, "token_logprobs", Memory(LENGTHS[3]))
    with pytest.raises(EmailRLError, match="Out of memory on a single sample of 14 tokens") as caught:
        updater.train(samples(), PAID, step=1)
    assert "GRADIENT_CHECKPOINTING" in caught.value.hint


def test_the_cap_falls_to_the_halves_that_are_tried_next(make: Make) -> None:
    def alike(first_of_own: list[int]) -> list[TrainingSample]:
        """Samples of ten common tokens and four of their own."""
        rows = [[*range(5, 15), first, 3, 4, 5] for first in first_of_own]
        return [
            TrainingSample(str(n), "group", row, [0] * 10 + [1] * 4, [None] * 10 + [-1.0] * 4)
            for n, row in enumerate(rows)
        ]

    scorer = make(max_tokens_per_micro_batch=100).forward
    (batch,) = micro_batches(alike([20, 21, 22, 23]), scorer.layout())
    assert scorer.size(batch) == 26
    scorer.ran_out(batch)
    assert scorer.max_tokens == 18  # twice ten and eight, where half of 26 would share nothing
    assert [scorer.size(one) for one in micro_batches(alike([20, 21, 22, 23]), scorer.layout())] == [18, 18]
    scorer = make(max_tokens_per_micro_batch=100).forward
    (same,) = micro_batches(alike([20, 20]), scorer.layout())
    assert scorer.size(same) == 14
    scorer.ran_out(same)
    assert scorer.max_tokens == 13  # its halves are as large, and come alone
