"""What can be told of the Unsloth backend without a GPU: the model it samples from, and what it refuses."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3 import modeling_qwen3

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines import build_engine
from emailrl.engines.base import Request, SamplingParams
from emailrl.model.policy import Policy
from emailrl.model.shape import FAMILIES, load_config
from emailrl.model.unsloth_backend import check_unsloth, load_unsloth, unpatched
from emailrl.settings import ModelSettings, Settings
from tests.model.test_load import loaded


@pytest.fixture
def patched(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Policy, torch.Tensor]:
    """A policy as Unsloth leaves one, every forward of transformers' classes exchanged; and its base's logits."""
    policy = loaded(tiny_model, trainable=True)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.trainable_parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    with policy.reference() as model, torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("patched")

    for name in ("Attention", "DecoderLayer", "Model", "ForCausalLM", "RMSNorm", "MLP"):
        monkeypatch.setattr(getattr(modeling_qwen3, f"Qwen3{name}"), "forward", refuse)
    base = policy.model.get_base_model()
    base.for_training = partial(refuse, base)
    base.get_input_embeddings().register_forward_hook(refuse)
    base.model.rotary_emb = nn.Identity()
    for layer in base.model.layers:
        layer.mlp.forward = MethodType(refuse, layer.mlp)
    return policy, logits


def test_the_model_to_sample_from_is_transformers_own(patched: tuple[Policy, torch.Tensor]) -> None:
    policy, logits = patched
    base = policy.model.get_base_model()
    with pytest.raises(AssertionError, match="patched"):
        base(input_ids=torch.tensor([[1, 2, 3]]))
    twin = unpatched(policy.model)
    with torch.no_grad():
        torch.testing.assert_close(twin(input_ids=torch.tensor([[1, 2, 3]])).logits, logits, atol=0, rtol=0)
    assert not any("lora" in name for name, _ in twin.named_modules())
    kept = {name.replace(".base_layer", ""): one.data_ptr() for name, one in base.named_parameters()}
    assert {name: one.data_ptr() for name, one in twin.named_parameters()}.items() <= kept.items()
    # The patched model keeps what it had.
    assert "forward" in vars(base.model.layers[0].mlp) and isinstance(base.model.rotary_emb, nn.Identity)
    assert any("lora_A" in name for name, _ in base.named_parameters())


@pytest.mark.parametrize("limit", [10**9, 0])
def test_the_engine_samples_from_the_adapter_of_a_patched_policy(
    patched: tuple[Policy, torch.Tensor], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Merged weights, and (limit 0) the adapter beside the base, as for large models."""
    policy, _ = patched
    monkeypatch.setattr("emailrl.engines.budget.MERGE_LIMIT", limit)
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    policy.save_adapter(tmp_path)
    unsloth = ModelSettings(name=str(tiny_model), backend="unsloth")
    engine = build_engine(Settings(model=unsloth), policy)
    engine.load_adapter(tmp_path, "v1")
    request = Request("t", SamplingParams(max_tokens=6), [1, 2, 3], seed=5)
    (completion,) = engine.generate([request])

    monkeypatch.undo()
    plain = loaded(tiny_model, adapter=tmp_path)
    ids = torch.tensor([[1, 2, 3, *completion.token_ids]])
    with torch.no_grad():
        expected = plain.model(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
    wanted = expected.gather(-1, ids[0, 3:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, atol=1e-5, rtol=0)


def test_every_family_has_one_rotary_embedding() -> None:
    for family in FAMILIES:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        assert [key for key in vars(module) if key.endswith("RotaryEmbedding")] == [
            f"{'Qwen' + family[-1] if 'qwen' in family else family.title()}RotaryEmbedding"
        ]


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="first visible GPU, not on 'cpu'"):
        check_unsloth(ModelSettings(device="cpu"))
    for fields, said in (
        ('"gemma"', "Llama, Mistral, Qwen2 and Qwen3 models, not gemma"),
        ('"qwen3", "_attn_implementation": "stranger/kernel"', "names kernels on the hub"),
    ):
        (tmp_path / "config.json").write_text(f'{{"model_type": {fields}}}')
        config = load_config("theirs", tmp_path)
        with pytest.raises(EmailRLError, match=said):
            load_unsloth(ModelSettings(), tmp_path, config, torch.bfloat16)
