"""Results do not depend on how much the cache may hold: where it is full, and where memory runs out before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from engines.cache_requests import bytes_for, prompt, requests, same, sampled
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from emailrl.base.errors import EmailRLError
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.budget import GIB
from emailrl.engines.local import passes
from emailrl.engines.local.cache import BlockLayer
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.passes import Conversation

LENGTHS = (70, 5, 33, 100, 64, 20, 31, 90)
"""With up to 100 sampled tokens the longest needs 200: 7 blocks."""


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Qwen3ForCausalLM]) -> Qwen3ForCausalLM:
    """A model that says more: only id 39 stops it."""
    return make_model(eos_token_id=None)


@pytest.fixture(scope="module")
def alone(model: Qwen3ForCausalLM) -> list[Completion]:
    """Conversations sampled one by one, with all the memory they like."""
    return TransformersEngine(model, [39], max_rows=1).generate(requests(*LENGTHS))


@settings(max_examples=8, deadline=None)
@given(blocks=st.integers(7, 40), rows=st.integers(1, 8), seed=st.integers(0, 9))
def test_what_is_sampled_does_not_depend_on_the_budget(
    model: Qwen3ForCausalLM, alone: list[Completion], blocks: int, rows: int, seed: int
) -> None:
    engine = TransformersEngine(model, [39], max_rows=rows, cache_bytes=bytes_for(blocks))
    order = random.Random(seed).sample(range(len(LENGTHS)), len(LENGTHS))
    asked = requests(*LENGTHS)
    done = engine.generate([asked[i] for i in order])
    same(done, [alone[i] for i in order])


def test_where_the_cache_is_full_the_latest_wait_and_go_on(
    model: Qwen3ForCausalLM,
    alone: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = TransformersEngine(model, [39], max_rows=8, cache_bytes=bytes_for(12))
    together: list[list[str]] = []
    original = engine.passes.sample_next

    def watched(running: list[Conversation]) -> list[Conversation]:
        together.append([row.request.trajectory_id for row in running])
        return original(running)

    monkeypatch.setattr(engine.passes, "sample_next", watched)
    same(engine.generate(requests(*LENGTHS)), alone)
    # 70, 5 and 33 tokens take 3 + 1 + 2 of 12 blocks; 100 tokens would take 4 more, and leave too few for the three.
    assert together[0] == ["0", "1", "2"]
    seen = {who: [i for i, ids in enumerate(together) if str(who) in ids] for who in range(8)}
    assert all(len(steps) == len(alone[who].token_ids) for who, steps in seen.items())  # no token sampled twice
    paused = [who for who, steps in seen.items() if steps[-1] - steps[0] >= len(steps)]
    assert paused and 0 not in paused
    assert [steps[0] for steps in seen.values()] == sorted(steps[0] for steps in seen.values())  # nobody overtakes
    assert capsys.readouterr().err.count("The KV cache is full") == 1


def test_a_prompt_larger_than_the_cache_is_an_error(model: Qwen3ForCausalLM) -> None:
    engine = TransformersEngine(model, [39], max_rows=4, cache_bytes=bytes_for(2))
    with pytest.raises(EmailRLError, match=r"prompt of 64 tokens does not fit: the KV cache holds 64\.") as caught:
        engine.generate(requests(10, 64))
    assert caught.value.hint is not None and "KV_CACHE_GIB=8.67e-05 holds a context of 256" in caught.value.hint
    enough = TransformersEngine(model, [39], max_rows=4, cache_bytes=int(8.67e-05 * GIB))
    assert enough.window == 0 and len(enough.generate(requests(254))[0].token_ids) == 2 and enough.window == 256
    assert len(engine.generate(requests(10, 63, max_tokens=3))[1].token_ids) == 1  # room for one


def test_what_outgrows_the_whole_cache_is_truncated_and_said(
    model: Qwen3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = TransformersEngine(model, [39], max_rows=4, cache_bytes=bytes_for(2))
    ended: list[Completion] = []

    def advance(completion: Completion) -> Request | None:
        ended.append(completion)
        return Request("0", SamplingParams(2), prompt(0, 80)) if len(ended) == 1 else None

    engine.generate(requests(50, max_tokens=60, temperature=0), advance)
    assert [(len(one.token_ids), one.finish_reason) for one in ended] == [(14, "length"), (0, "length")]
    said = capsys.readouterr().err
    assert said.count("truncated at 64 tokens") == 1 and "KV_CACHE_GIB" in said and "MAX_MODEL_LEN=64" in said
    within = TransformersEngine(model, [39], max_rows=4, max_model_len=64, cache_bytes=bytes_for(2))
    assert sampled(within.generate(requests(50, max_tokens=60, temperature=0))) == [ended[0].token_ids]
    assert capsys.readouterr().err == ""  # the context window's own end needs no word


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make steps over more than so many rows run out of memory, at the worst moment: when numbers have been drawn."""

    def bound(rows: int) -> None:
        def failing(*args: object) -> object:
            drawn = sample(*args)  # type: ignore[arg-type]
            if len(drawn[0]) > rows:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return drawn

        sample = passes.sample
        monkeypatch.setattr(passes, "sample", failing)

    yield bound


def test_out_of_memory_makes_the_cache_smaller_and_goes_on(
    model: Qwen3ForCausalLM,
    alone: list[Completion],
    small_memory: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = TransformersEngine(model, [39], max_rows=8)
    small_memory(3)
    same(engine.generate(requests(*LENGTHS)), alone)
    said = capsys.readouterr().err
    # Of the 3 + 1 + 2 + 4 + 2 + 1 + 1 + 3 blocks three quarters, 12: the first three, and a block for each.
    assert "with 8 concurrent trajectories: the KV cache is now limited to 0.000125 GiB" in said
    assert "Lower KV_CACHE_GIB" in said and "MAX_TOKENS_PER_ROLLOUT_PASS" in said
    same(engine.generate(requests(*LENGTHS)), alone)
    assert "Out of memory" not in capsys.readouterr().err  # it stays at what fits


def test_a_passing_out_of_memory_costs_a_part_of_the_cache_until_that_is_given_back(
    model: Qwen3ForCausalLM, fail_at: Callable[..., None]
) -> None:
    asked = requests(90, 90, *[5] * 6, max_tokens=3)
    asked[:2] = requests(90, 90, max_tokens=100)
    expected = TransformersEngine(model, [], max_rows=8).generate(asked)
    engine = TransformersEngine(model, [], max_rows=8, cache_bytes=bytes_for(14))
    fail_at(60)  # when two are left, of 90 + 59 tokens
    same(engine.generate(asked), expected)
    assert engine.schedule.limit == 8
    assert engine.cache.most == 7  # three quarters of 10, the longer one's 189 tokens take 6
    engine.generate(requests(*[5] * 6, max_tokens=3))
    assert engine.cache.most == 7
    engine.release()
    engine.generate(requests(5))
    assert engine.cache.most == 14


@pytest.mark.parametrize("room", [30, 16, 9])
def test_a_device_smaller_than_the_budget_ends_with_the_same_results(
    model: Qwen3ForCausalLM, alone: list[Completion], monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    original = BlockLayer.grown

    def growing(self: BlockLayer, tensor: torch.Tensor) -> torch.Tensor:
        if len(self.cache.users) > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, tensor)

    monkeypatch.setattr(BlockLayer, "grown", growing)
    engine = TransformersEngine(model, [39], max_rows=8)
    for _ in range(2):
        same(engine.generate(requests(*LENGTHS)), alone)
        engine.release()


def test_out_of_memory_with_one_trajectory_is_an_error(
    model: Qwen3ForCausalLM, small_memory: Callable[[int], None]
) -> None:
    engine = TransformersEngine(model, [39], max_rows=8)
    small_memory(0)
    with pytest.raises(EmailRLError, match="one trajectory of 9 tokens") as caught:
        engine.generate(requests(9, 9))
    assert caught.value.hint is not None and "MAX_MODEL_LEN" in caught.value.hint


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the steps of these numbers run out of memory when numbers have been drawn."""

    def fail(*numbers: int) -> None:
        sample, steps = passes.sample, []

        def failing(*args: object) -> object:
            steps.append(1)
            drawn = sample(*args)  # type: ignore[arg-type]
            if len(steps) in numbers:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return drawn

        monkeypatch.setattr(passes, "sample", failing)

    return fail


def test_an_out_of_memory_later_on_loses_no_number(
    model: Qwen3ForCausalLM, alone: list[Completion], fail_at: Callable[..., None]
) -> None:
    engine = TransformersEngine(model, [39], max_rows=8)
    fail_at(5, 9)
    same(engine.generate(requests(*LENGTHS)), alone)
    assert engine.cache.most < 17


def test_a_cache_that_others_had_filled_is_given_back_first(
    model: Qwen3ForCausalLM, fail_at: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*requests(*[90] * 7, max_tokens=3), Request("last", SamplingParams(30), prompt(0, 9), seed=1)]
    expected = TransformersEngine(model, [], max_rows=8).generate(asked)
    engine = TransformersEngine(model, [], max_rows=8)
    fail_at(20)
    same(engine.generate(asked), expected)
    assert engine.schedule.limit == 8
    assert "Out of memory: releasing the unused part of the KV cache" in capsys.readouterr().err
    assert len(engine.cache.users) == 1 + 2  # block 0, and those of the last: 9 + 30 tokens
