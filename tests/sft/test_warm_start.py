"""Warm start: the tokens experts leave behind, the small model's tokenizer, and that imitation learns."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emailrl.engines.renderer import ChatRenderer
from emailrl.environment.tools import tool_schemas
from emailrl.errors import UsageError
from emailrl.settings import load_settings
from emailrl.sft import small_model
from emailrl.sft.expert import Habits
from emailrl.sft.imitation import SHOWN_WEIGHT, fit
from emailrl.sft.warm_start import corpus, samples_of, shuffled, transcripts, warm_start


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]
    return small_model.train_tokenizer(corpus(6, seed=3))


@pytest.fixture(scope="module")
def renderer(tokenizer) -> ChatRenderer:  # type: ignore[no-untyped-def]
    return ChatRenderer(tokenizer, tool_schemas())


def test_fixed_phrases_and_digits_are_single_tokens(tokenizer) -> None:  # type: ignore[no-untyped-def]
    for phrase in small_model.phrases():
        assert len(tokenizer.encode(phrase, add_special_tokens=False)) == 1, phrase
    assert [tokenizer.decode([i]) for i in tokenizer.encode("$48,210", add_special_tokens=False)] == list("$48,210")


def test_a_name_has_the_same_ids_wherever_it_stands(tokenizer) -> None:  # type: ignore[no-untyped-def]
    name = tokenizer.encode("Velmora", add_special_tokens=False)
    for text in ("for Velmora.", '["Velmora"', "<b>Velmora</b>", "Team,\\nVelmora is"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert any(ids[i : i + len(name)] == name for i in range(len(ids))), text


@given(st.text(max_size=200))
def test_any_text_survives(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_samples_mark_the_experts_words_and_nothing_else(renderer: ChatRenderer) -> None:
    messages = transcripts(0, seed=3, times=1, habits=Habits())[0]
    (sample,) = samples_of(messages, renderer)
    said = renderer.text_of([i for i, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m])
    assert said == "".join(f"{m.content}<|im_end|>" for m in messages if m.role == "assistant")
    whole = renderer.render(messages, add_generation_prompt=False)
    assert whole.startswith(renderer.text_of(sample.token_ids))
    assert renderer.text_of(sample.token_ids).endswith("</tool_call><|im_end|>")


def test_worlds_are_mixed_and_none_is_lost() -> None:
    examples = [[(np.array([world, i]), np.array([False, True])) for i in range(10)] for world in range(5)]
    out = [tuple(ids) for ids, _ in shuffled(iter(examples), seed=1, size=12)]
    assert sorted(out) == [(world, i) for world in range(5) for i in range(10)]
    assert out != sorted(out)
    assert out == [tuple(ids) for ids, _ in shuffled(iter(examples), seed=1, size=12)]


def test_loss_is_the_mean_over_sampled_tokens_and_shown_ones_weigh_little() -> None:
    """A model of two constant logits over 4 ids: every token costs ln Z − logit, whatever came before."""

    class Constant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor([0.0, math.log(2), math.log(4), 0.0]))
            self.device = torch.device("cpu")

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
            return type("Output", (), {"logits": self.logits.expand(*input_ids.shape, 4)})

    model = Constant()
    before = model.logits.detach().clone()
    losses: list[float] = []
    example = (np.array([0, 1, 2, 2]), np.array([False, True, False, True]))
    fit(model, iter([example]), steps=1, batch_size=1, learning_rate=1.0, report=lambda _, loss: losses.append(loss))  # type: ignore[arg-type]
    # Z = 1 + 2 + 4 + 1 = 8; sampled ids 1 and 2: (ln 8 − ln 2 + ln 8 − ln 4) / 2 = (ln 4 + ln 2) / 2 = 1.5 ln 2.
    assert losses == [pytest.approx(1.5 * math.log(2), abs=1e-6)]
    # p = (1/8, 1/4, 1/2, 1/8). The two sampled ids 1 and 2 give (1/8, 1/4 − 1/2, 1/2 − 1/2, 1/8); the shown id 2 gives
    # 0.1 / 2 of (1/8, 1/4, 1/2 − 1, 1/8). The norm is below 1, so nothing is clipped.
    assert SHOWN_WEIGHT == 0.1
    assert model.logits.grad is not None
    assert model.logits.grad.tolist() == pytest.approx([0.13125, -0.2375, -0.025, 0.13125], abs=1e-6)
    assert not torch.equal(model.logits, before)


def test_imitation_lowers_the_loss_and_writes_a_model_that_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses: list[float] = []
    out = tmp_path / "small"
    settings = load_settings({"seed": 5}, cwd=tmp_path, environ={})

    def note(_: int, value: float) -> None:
        losses.append(value)

    loss = warm_start(settings, out, from_scratch=True, steps=12, batch_size=8, workers=1, report=note)
    assert losses[-1] < losses[0] - 0.5
    assert loss == pytest.approx(losses[-1])
    model = AutoModelForCausalLM.from_pretrained(out)
    assert sum(p.numel() for p in model.parameters()) == 5_640_192
    assert len(AutoTokenizer.from_pretrained(out)) == small_model.VOCAB_SIZE
    with pytest.raises(UsageError, match="exists"):
        warm_start(settings, out, from_scratch=True, steps=1, batch_size=1)
