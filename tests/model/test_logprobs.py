"""Gathered, chunked log-probabilities against the full logits of the model itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from emailrl.base.errors import EmailRLError
from emailrl.model.logprobs import check_projection, hidden_states, token_logprobs
from tests.model.test_load import loaded

IDS = torch.randint(0, 257, (3, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.zeros(3, 12, dtype=torch.bool)
MASK[0, 3:7] = MASK[1, 1] = MASK[1, 9:] = True  # the third row trains nothing
SIZES = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip


def full_logits(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies the plain way: all logits, all tokens."""
    log_softmax = (model(input_ids=IDS).logits.float() / temperature).log_softmax(-1)
    logprobs, entropy = torch.zeros(IDS.shape), torch.zeros(IDS.shape)
    for b, t in MASK.nonzero().tolist():
        logprobs[b, t] = log_softmax[b, t - 1, IDS[b, t]]
        entropy[b, t] = -(log_softmax[b, t - 1].exp() * log_softmax[b, t - 1]).sum()
    return logprobs, entropy


@pytest.fixture
def lora_model(tiny_model: Path) -> Any:
    policy = loaded(tiny_model, trainable=True)
    for name, parameter in policy.trainable_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(2))
    return policy.model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [2**25, 257 * 3, 1])
def test_equals_full_logits_in_value_and_gradient(
    lora_model: Any, temperature: float, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emailrl.model.logprobs.CHUNK_ELEMENTS", chunk_elements)
    parameters = [parameter for parameter in lora_model.parameters() if parameter.requires_grad]
    weight = torch.randn(IDS.shape, generator=torch.Generator().manual_seed(3))
    expected, expected_entropy = full_logits(lora_model, temperature)
    expected_gradient = torch.autograd.grad((weight * (expected + expected_entropy)).sum(), parameters)
    scored = token_logprobs(lora_model, IDS, MASK, temperature=temperature, entropy=True, entropy_grad=True)
    assert scored.entropy is not None
    gradient = torch.autograd.grad((weight * (scored.logprobs + scored.entropy)).sum(), parameters)
    torch.testing.assert_close(scored.logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(scored.entropy, expected_entropy, atol=1e-5, rtol=0)
    assert any(part.abs().max() > 1e-2 for part in expected_gradient)
    for actual, reference in zip(gradient, expected_gradient, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-5, rtol=1e-4)


def test_untied_embeddings_and_a_uniform_head() -> None:
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=False)).eval()
    torch.testing.assert_close(token_logprobs(model, IDS, MASK).logprobs, full_logits(model, 1.0)[0], atol=1e-5, rtol=0)
    nn.init.zeros_(model.lm_head.weight)
    scored = token_logprobs(model, IDS, MASK, entropy=True)
    assert scored.entropy is not None
    torch.testing.assert_close(scored.logprobs[MASK], torch.full((8,), -math.log(257)))
    torch.testing.assert_close(scored.entropy[MASK], torch.full((8,), math.log(257)))


def test_entropy_is_for_the_asking_and_temperature_zero_is_untempered(lora_model: Any) -> None:
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(lora_model, IDS, torch.ones(3, 12))
    scored = token_logprobs(lora_model, IDS, MASK, temperature=0.0, entropy=True)
    assert scored.entropy is not None and not scored.entropy.requires_grad and scored.logprobs.requires_grad
    plain = token_logprobs(lora_model, IDS, MASK, temperature=1.0)
    assert plain.entropy is None and torch.equal(scored.logprobs, plain.logprobs)


def test_padding_and_batch_mates_change_nothing(lora_model: Any) -> None:
    alone = token_logprobs(lora_model, IDS[:1, :7], MASK[:1, :7]).logprobs
    padded = IDS.clone()
    padded[0, 7:] = 5
    beside = token_logprobs(lora_model, padded, MASK).logprobs
    torch.testing.assert_close(beside[:1, :7], alone, atol=1e-6, rtol=0)
    assert not beside[~MASK].any()


def test_only_trainable_positions_reach_the_head(lora_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("emailrl.model.logprobs.CHUNK_ELEMENTS", 257 * 3)
    head = lora_model.get_base_model().get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[0]))
    token_logprobs(lora_model, IDS, MASK)
    hook.remove()
    assert seen == [3, 3, 2]


def test_arithmetic_type(tiny_model: Path) -> None:
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)
        assert token_logprobs(model, IDS, MASK).logprobs.dtype == expected


def test_soft_cap_and_logit_scale_are_respected() -> None:
    torch.manual_seed(0)
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, final_logit_softcapping=0.05)).eval()
    cohere = transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.0625)).eval()
    for model in (gemma, cohere):
        check_projection(model)
        expected, _ = full_logits(model, 1.0)
        torch.testing.assert_close(token_logprobs(model, IDS, MASK).logprobs, expected, atol=1e-5, rtol=0)
    head = cohere.lm_head(hidden_states(cohere, IDS))
    assert (cohere(input_ids=IDS).logits - head).abs().max() > 1e-3  # the scale is really there


def test_a_model_with_an_unknown_way_to_its_logits_is_refused(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    check_projection(model)
    plain = model.forward

    def forward(**inputs: Any) -> Any:
        output = plain(**inputs)
        output.logits = output.logits * 1.01
        return output

    model.forward = forward
    with pytest.raises(EmailRLError, match="computes its logits in a way"):
        check_projection(model)
