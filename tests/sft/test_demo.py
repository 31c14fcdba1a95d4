"""Demo worlds: the tokens experts leave behind, their order, and the small model's tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emailrl.agent.tools import tool_schemas
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail.demo import make_world
from emailrl.sft import demo, small_model
from emailrl.sft.demo import Habits, corpus, shuffled, transcripts
from emailrl.sft.examples import Example, samples_of


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
    nothing = np.array([])
    examples = [[Example(f"{world}{i}", "", nothing, nothing) for i in range(10)] for world in range(5)]
    out = [example.conversation for example in shuffled(iter(examples), seed=1, size=12)]
    assert sorted(out) == [f"{world}{i}" for world in range(5) for i in range(10)]
    assert out != sorted(out)
    assert out == [example.conversation for example in shuffled(iter(examples), seed=1, size=12)]


def test_batches_are_the_same_from_any_start_and_few_worlds_start_few_processes(
    renderer: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, processes = [], demo.worker_processes
    monkeypatch.setattr(
        demo, "worker_processes", lambda count, **named: started.append(count) or processes(count, **named)
    )

    def made(start: int, workers: int) -> list[list[str]]:
        batches = demo.batches(renderer, steps=3, batch_size=4, start=start, seed=3, workers=workers)
        return [[example.conversation for example in batch] for batch in batches]

    whole = made(0, workers=1)
    assert [len(batch) for batch in whole] == [4, 4, 4] and made(2, workers=8) == whole[2:]
    assert started == [1, 2]  # there are two worlds to play


def test_held_out_worlds_share_no_inbox_with_those_trained_on(renderer: ChatRenderer) -> None:
    val = demo.held_out(60, 3, renderer)
    assert len(val) == 60 and {example.inbox.split("-")[0] for example in val} == {"val"}
    names = {make_world(3, split, demo.FIRST_WORLD).inbox for split in ("train", "val")}
    assert len(names) == 2
