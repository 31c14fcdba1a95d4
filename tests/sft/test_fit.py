"""The supervised update: its loss and gradient against a plain padded cross-entropy, and what is not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sft.talk import settings_for
from torch import Tensor

from emailrl.base.errors import UsageError
from emailrl.model.logprobs import token_logprobs
from emailrl.model.policy import load_policy
from emailrl.settings import SftSettings
from emailrl.sft.examples import Example
from emailrl.sft.fit import Fitter

LENGTHS = (9, 14, 6, 11)


def make_examples() -> list[Example]:
    generator = np.random.default_rng(3)
    made = []
    for n, length in enumerate(LENGTHS):
        spoken = np.array([t > 2 and t % 4 != 0 for t in range(length)])
        ids = generator.integers(1, 257, length).astype(np.uint32)
        ids[:4] = 7  # what all begin with is computed once
        made.append(Example(f"c{n}", f"i{n}", ids, spoken))
    return made


def make_fitter(folder: Path, model: Path, *, full: bool = False, **changes: Any) -> Fitter:
    settings = settings_for(folder, model, full_finetuning=full, max_grad_norm=0, **changes)
    policy = load_policy(settings, trainable=True, full=full)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in policy.trainable_parameters():
        if "lora_" in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return Fitter(policy, settings.training, settings.sft, settings.agent.temperature)


def plain_loss(fitter: Fitter, examples: list[Example], shown_weight: float) -> tuple[Tensor, float]:
    """Cross-entropy over all logits of right-padded rows: what is minimised, and the spoken tokens' mean."""
    width = max(len(example.token_ids) for example in examples)
    ids, weights = torch.zeros(len(examples), width, dtype=torch.long), torch.zeros(len(examples), width)
    for row, example in enumerate(examples):
        ids[row, : len(example.token_ids)] = torch.from_numpy(example.token_ids.astype("int64"))
        weights[row, : len(example.token_ids)] = torch.from_numpy(np.where(example.spoken, 1.0, shown_weight))
    logits = fitter.policy.model(input_ids=ids).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    weights = weights[:, 1:]
    num = float((weights == 1.0).sum())
    return (losses * weights).sum() / num, float((losses * (weights == 1.0)).sum().detach()) / num


@pytest.mark.parametrize("shown_weight", [0.0, 0.1])
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_the_packed_gradient_is_that_of_a_padded_cross_entropy(
    model: Path, tmp_path: Path, full: bool, shown_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitter = make_fitter(tmp_path, model, full=full, max_tokens_per_micro_batch=20)
    fitter.shown_weight = shown_weight
    examples = make_examples()
    parameters = [parameter for _, parameter in fitter.policy.trainable_parameters()]
    wanted, spoken = plain_loss(fitter, examples, shown_weight)
    gradients = torch.autograd.grad(wanted, parameters)
    monkeypatch.setattr(fitter.optimizer, "step", lambda: None)
    metrics = fitter.step(examples, step=1)
    assert metrics["loss"] == pytest.approx(spoken, abs=1e-5)
    assert max(gradient.abs().max() for gradient in gradients) > 1e-2
    for found, gradient in zip(parameters, gradients, strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, gradient, atol=1e-5, rtol=1e-4)


def test_only_spoken_tokens_are_scored(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head of zeros every token of the vocabulary is equally likely: ln V a token, however few are scored."""
    fitter = make_fitter(tmp_path, model, full=True)
    head = fitter.policy.model.get_output_embeddings()
    rows: list[int] = []
    whole = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, states: Tensor) -> Tensor:
        if self is head:
            rows.append(states.shape[0])
        return whole(self, states)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    with torch.no_grad():
        head.weight.zero_()
    vocabulary = head.weight.shape[0]
    assert fitter.loss(make_examples()) == pytest.approx(math.log(vocabulary), abs=1e-5)
    assert sum(rows) == sum(int(example.spoken.sum()) for example in make_examples()) == 20


def test_an_update_that_is_not_finite_is_skipped_and_counted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitter = make_fitter(tmp_path, model)
    before = [parameter.detach().clone() for parameter in fitter.weights]
    norm = fitter.policy.model.get_base_model().model.norm
    kept = norm.weight.detach().clone()
    with torch.no_grad():
        norm.weight.fill_(math.inf)
    for step in (1, 2, 3):
        assert fitter.step(make_examples(), step=step)["updates_skipped"] == 1.0 and fitter.skipped_in_a_row == step
    assert all(torch.equal(old, new) for old, new in zip(before, fitter.weights, strict=True))
    with torch.no_grad():
        norm.weight.copy_(kept)
    assert fitter.step(make_examples(), step=4)["updates_skipped"] == 0.0 and fitter.skipped_in_a_row == 0


def test_weights_in_16_bits_learn_by_steps_that_they_are_too_coarse_for(model: Path, tmp_path: Path) -> None:
    """AdamW moves by the learning rate at first; 1e-6 is lost on bf16, but not on the float32 it is a rounding of."""
    fitter = make_fitter(tmp_path, model, full=True, dtype="bf16", sft_learning_rate=1e-6)
    before = [master.detach().clone() for master in fitter.masters]
    fitter.step(make_examples(), step=1)
    moved = [float((new.detach() - old).abs().max()) for old, new in zip(before, fitter.masters, strict=True)]
    assert max(moved) == pytest.approx(1e-6, rel=0.1)
    assert all(torch.equal(w, m.to(torch.bfloat16)) for w, m in zip(fitter.weights, fitter.masters, strict=True))


def test_every_seed_that_the_settings_take_and_not_float16(model: Path, tmp_path: Path) -> None:
    fitter = make_fitter(tmp_path, model, seed=2**63 - 1)
    assert fitter.step(make_examples(), step=1)["updates_skipped"] == 0
    with pytest.raises(UsageError, match="not in fp16"):
        Fitter(replace(fitter.policy, dtype=torch.float16), fitter.training, SftSettings(), 1.0)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_where_memory_runs_out_the_same_loss_comes_of_smaller_batches(
    model: Path, tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_fitter(tmp_path, model, full=full).step(make_examples(), step=1)
    fitter, rows = make_fitter(tmp_path, model, full=full), []

    def short_of_memory(policy: Any, token_ids: Tensor, *arguments: Any, **named: Any) -> Any:
        rows.append(len(token_ids))
        if len(token_ids) > 2:
            raise torch.OutOfMemoryError("too much")
        return token_logprobs(policy, token_ids, *arguments, **named)

    monkeypatch.setattr("emailrl.sft.fit.token_logprobs", short_of_memory)
    metrics = fitter.step(make_examples(), step=1)
    assert rows[0] == 4 and max(rows[-2:]) <= 2
    assert metrics["loss"] == pytest.approx(whole["loss"], abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(whole["grad_norm"], abs=1e-5)
