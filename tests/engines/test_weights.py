"""Adapters as PEFT writes them, in a model of their own or switched on in the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import cut_matrices
from transformers import Qwen3ForCausalLM

from emailrl.base.errors import EmailRLError
from emailrl.checkpoints import WEIGHTS
from emailrl.engines.base import Request, SamplingParams
from emailrl.engines.local import passes as weights
from emailrl.engines.local.engine import TransformersEngine

IDS = torch.tensor([[5, 9, 11, 30, 2]])


@pytest.fixture
def trainer(make_model: Callable[..., Qwen3ForCausalLM]) -> PeftModel:
    """A model in training, its adapter far from zero."""
    torch.manual_seed(1)
    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(make_model(), config)
    shake(peft)
    return peft.train()


def shake(peft: PeftModel) -> None:
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name and "sampler" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)


@torch.inference_mode()
def logits(model: torch.nn.Module) -> torch.Tensor:
    training = model.training
    model.eval()
    result = model(IDS).logits
    model.train(training)
    return result


def save(peft: PeftModel, path: Path) -> Path:
    peft.save_pretrained(path)
    return path


def test_merged_weights_compute_what_the_adapter_does_and_leave_the_frozen_ones_alone(
    trainer: PeftModel, tmp_path: Path
) -> None:
    before = {name: parameter.detach().clone() for name, parameter in trainer.named_parameters()}
    merged = weights.MergedWeights(trainer.get_base_model())
    with trainer.disable_adapter():
        base = logits(trainer)
    assert torch.equal(logits(merged.model), base)
    merged.load(save(trainer, tmp_path / "1"))
    torch.testing.assert_close(logits(merged.model), logits(trainer), rtol=0, atol=1e-5)
    assert not torch.allclose(logits(merged.model), base, atol=0.1)
    assert merged.model.get_input_embeddings().weight is trainer.get_base_model().get_input_embeddings().weight
    assert all(torch.equal(parameter, before[name]) for name, parameter in trainer.named_parameters())
    assert trainer.training and not merged.model.training
    assert not any("lora" in name for name, _ in merged.model.named_modules())


def test_a_version_is_the_same_bits_whatever_came_before_it(trainer: PeftModel, tmp_path: Path) -> None:
    first = save(trainer, tmp_path / "1")
    shake(trainer)
    second = save(trainer, tmp_path / "2")
    merged = weights.MergedWeights(trainer.get_base_model())
    base = logits(merged.model)
    merged.load(second)
    alone = logits(merged.model)
    for _ in range(3):
        merged.load(first)
        merged.load(second)
    assert torch.equal(logits(merged.model), alone)
    merged.load(None)
    assert torch.equal(logits(merged.model), base)


def test_a_large_model_is_lent_and_given_back_as_it_was(trainer: PeftModel, tmp_path: Path) -> None:
    shared = weights.SharedWeights(trainer)
    first = save(trainer, tmp_path / "1")
    want = logits(trainer)
    shared.load(first)
    shake(trainer)  # the trainer moves on; the version does not
    now = logits(trainer)
    with shared.active():
        assert not trainer.training
        torch.testing.assert_close(logits(shared.model), want, rtol=0, atol=1e-5)
    assert trainer.training
    assert trainer.active_adapter == "default"
    assert torch.equal(logits(trainer), now)
    assert all(p.requires_grad == ("lora" in n) for n, p in trainer.named_parameters() if "sampler" not in n)
    assert not any(p.requires_grad for n, p in trainer.named_parameters() if "sampler" in n)
    shared.load(None)
    with shared.active(), trainer.disable_adapter():
        base = logits(shared.model)
    with shared.active():
        assert torch.equal(logits(shared.model), base)


REQUEST = [Request("a", SamplingParams(8), [5, 9, 11])]


def fresh(trainer: PeftModel, path: Path) -> list[float]:
    """What an engine that knew no other version samples."""
    engine = TransformersEngine(trainer, [1], max_rows=4)
    engine.load_adapter(path, "x")
    return engine.generate(REQUEST)[0].logprobs


def spoil_last(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    save_file(tensors | {max(key for key in tensors if "lora_A" in key): torch.ones(3, 7)}, path / WEIGHTS)


@pytest.mark.parametrize("kind", [weights.MergedWeights, weights.SharedWeights])
@pytest.mark.parametrize(("damage", "error"), [(spoil_last, "7"), (cut_matrices, "have size 1 × 1, but the layer is")])
def test_an_adapter_that_fails_leaves_the_version_before_it(
    trainer: PeftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, damage: Any, error: str
) -> None:
    monkeypatch.setattr("emailrl.engines.budget.MERGE_LIMIT", 0 if kind is weights.SharedWeights else 10**9)
    engine = TransformersEngine(trainer, [1], max_rows=4)
    engine.load_adapter(save(trainer, tmp_path / "1"), "v1")
    assert isinstance(engine.weights, kind)
    before = engine.generate(REQUEST)[0]
    shake(trainer)
    damage(save(trainer, tmp_path / "2"))
    trainer.train()
    with pytest.raises(EmailRLError, match=error):
        engine.load_adapter(tmp_path / "2", "v2")
    assert trainer.training and trainer.active_adapter == "default"
    after = engine.generate(REQUEST)[0]
    assert (after.policy_version, after.adapter_sha256) == ("v1", before.adapter_sha256)
    assert after.logprobs == before.logprobs
    engine.load_adapter(save(trainer, tmp_path / "3"), "v3")
    assert engine.generate(REQUEST)[0].logprobs == fresh(trainer, tmp_path / "3")


def test_a_large_models_next_version_is_copied_into_the_adapter_of_the_last(
    trainer: PeftModel, make_model: Callable[..., Qwen3ForCausalLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building an adapter takes PEFT a second. Another scale is copied too; another rank needs another adapter."""
    built: list[str] = []
    load = PeftModel.load_adapter
    monkeypatch.setattr(PeftModel, "load_adapter", lambda *given, **named: built.append("x") or load(*given, **named))
    shared, merged = weights.SharedWeights(trainer), weights.MergedWeights(trainer.get_base_model())
    for name, alpha in (("1", 6), ("2", 6), ("3", 12)):
        shake(trainer)
        trainer.peft_config["default"].lora_alpha = alpha
        path = save(trainer, tmp_path / name)
        shared.load(path)
        merged.load(path)
        with shared.active():
            torch.testing.assert_close(logits(shared.model), logits(merged.model), rtol=0, atol=1e-4)
    assert len(built) == 1
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"], task_type="CAUSAL_LM")
    shared.load(save(get_peft_model(make_model(), config), tmp_path / "4"))
    assert len(built) == 2
