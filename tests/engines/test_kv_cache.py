"""The key-value cache: what it holds by hand and counted, what is shared in it, and where it is full."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from itertools import count

import pytest
import torch
from engines.test_transformers_engine import prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen3ForCausalLM

from emailrl.base.errors import EmailRLError
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.budget import BLOCK, GIB, blocks_of, blocks_within, gib_for
from emailrl.engines.local import passes
from emailrl.engines.local.cache import BlockCache, BlockLayer, causal_mask, groups_of, in_bf16
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.passes import Conversation, Schedule


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Qwen3ForCausalLM]) -> Qwen3ForCausalLM:
    """A model that says more: only id 39 stops it."""
    return make_model(eos_token_id=None)


def test_bytes_and_blocks_by_hand(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(model, [39], max_rows=1)
    monkeypatch.setattr("emailrl.model.layout.available_memory", lambda: 2 * bytes_for(7))
    engine.generate(requests(5, max_tokens=1))
    assert engine.cache.most == 7  # by default half of what is free on a CPU
    assert [blocks_of(tokens) for tokens in (0, 1, 32, 33)] == [0, 1, 1, 2]
    # 1 MiB / (32 · 256 · 5/4) = 102.4; one block takes padding.
    assert blocks_within(1 << 20, 2, TOKEN) == 101
    # Qwen3-14B in bf16: 40 layers · 2 · 8 · 128 · 2 = 163,840 bytes a token; 10 GiB · 80/81 / 5 MiB = 2022.7.
    assert blocks_within(10 << 30, 40, 163_840) == 2021
    assert blocks_within(bytes_for(7), 2, TOKEN) == 7
    assert blocks_within(bytes_for(7) - 1, 2, TOKEN) == 6
    assert blocks_within(1000, 2, TOKEN) == 0
    # 2,022 blocks of 5 MiB, one tensor of 80 twice: 9.9967 GiB, and a hundredth.
    assert gib_for(2021, 40, 163_840) == "10.1"


def test_blocks_are_taken_shared_and_given_back() -> None:
    cache = BlockCache(1, 1)
    cache.most = 4
    one, other = array("q"), array("q")
    assert cache.extend(one, 65)
    assert list(one) == [1, 2, 3]
    assert not cache.extend(other, 33) and not other  # two blocks; one is left
    assert not cache.extend(other, 32, spare=1) and not other
    cache.share(one[:2], other)
    assert cache.extend(other, 96) and list(other) == [1, 2, 4]
    assert cache.users == [0, 2, 2, 1, 1]
    cache.release(one, keep=1)
    assert list(one) == [1] and cache.users == [0, 2, 1, 0, 1]
    assert not cache.extend(one, 96)  # its third block is free, the second still in use
    cache.release(other)
    assert not other and cache.users == [0, 1, 0, 0, 0]
    assert cache.extend(one, 128) and sorted(one) == [1, 2, 3, 4]


def test_who_pauses_goes_on_in_order_before_anyone_new() -> None:
    cache = BlockCache(1, 1)
    cache.most = 7
    schedule = Schedule(cache, 4, keeps=False)
    first, second, third, fourth = (Conversation(request) for request in requests(30, 31, 32, 60))
    assert all(schedule.admit(each) for each in (first, second, third))
    assert not schedule.admit(fourth)  # of the four free blocks it needs two, and the others may soon need three
    assert list(schedule.paused) == [fourth]
    for each in (first, second, third):
        each.tokens += [5] * 40  # three blocks
    assert schedule.make_room() == 1
    assert schedule.running == [first, second] and list(schedule.paused) == [third, fourth]
    assert not third.blocks and cache.taken == 6
    assert not schedule.admit(schedule.paused.popleft())
    assert list(schedule.paused) == [third, fourth]
    schedule.leave(first)
    assert schedule.admit(schedule.paused.popleft())
    assert schedule.running == [second, third] and not first.blocks


def test_rows_of_about_one_length_are_gathered_together() -> None:
    # On a CPU up to 1,024 tokens, 32 blocks, and one block of padding.
    assert groups_of([10, 10, 11, 12, 40], "cpu") == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert groups_of([16, 16, 16], "cpu") == [slice(0, 2), slice(2, 3)]
    assert groups_of([3], "cpu") == [slice(0, 1)]
    # On a GPU up to 8,192 tokens of padding, 256 blocks.
    assert groups_of([100, 200, 250], "cuda") == [slice(0, 3)]  # 150 + 50
    assert groups_of([100, 200, 250, 270], "cuda") == [slice(0, 3), slice(3, 4)]  # 170 + 70 + 20


def test_attention_in_bf16_is_as_exact_as_the_kernel() -> None:
    # Scores 0 and ln 3: weights 1/4 and 3/4 of the values 1 and 3; the third key is masked. 1/4 + 9/4 = 2.5.
    keys, values = (torch.tensor([[[row]]]).mT.bfloat16() for row in ([0.0, math.log(3), 9.0], [1.0, 3.0, 99.0]))
    mask = torch.tensor([[[[0.0, 0.0, float("-inf")]]]]).bfloat16()
    assert in_bf16(torch.ones(1, 1, 1, 1).bfloat16(), keys, values, mask, scale=1.0).item() == pytest.approx(2.5, 0.01)
    draw = torch.Generator().manual_seed(0)
    shapes = (1, 3, 12, 64), (1, 3, 600, 64), (1, 3, 600, 64)
    query, keys, values = (torch.randn(shape, generator=draw).mul(2).bfloat16() for shape in shapes)
    mask = causal_mask(torch.arange(588, 600)[None], 600, torch.bfloat16)
    exact = scaled_dot_product_attention(query.double(), keys.double(), values.double(), mask.double())
    kernel = scaled_dot_product_attention(query, keys, values, mask)
    errors = [
        (found - exact).pow(2).mean().item() for found in (in_bf16(query, keys, values, mask, scale=None), kernel)
    ]
    assert 0 < errors[0] <= 1.1 * errors[1]
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # what follows computes in float32 again


def test_one_long_trajectory_takes_no_more_than_it_holds(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks, original = list[int](), BlockLayer.grown

    def held(cache: BlockCache) -> int:
        layers = [layer for layer in cache.layers if layer.is_initialized]
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))

    def growing(self: BlockLayer, tensor: torch.Tensor) -> torch.Tensor:
        grown = original(self, tensor)
        peaks.append(held(self.cache) + grown.nbytes)  # the old and the new
        return grown

    monkeypatch.setattr(BlockLayer, "grown", growing)
    asked = [*requests(*[10] * 7, max_tokens=20), Request("long", SamplingParams(60), prompt(9, 180), seed=9)]
    engine = TransformersEngine(model, [39], max_rows=8)
    unbounded = engine.generate(asked)
    peak = max([held(engine.cache), *peaks])
    longest = max(180 + len(unbounded[-1].token_ids), 181)
    # Seven of at most 30 tokens, one block each; the long one; block 0; half as much again where it grew.
    blocks = 7 + blocks_of(longest) + 1
    assert 0 < peak <= 1.5 * blocks * BLOCK * TOKEN * 5 / 4
    assert peak < 8 * longest * TOKEN / 2  # what slots as long as the longest would take, by far
    peaks.clear()
    budget = bytes_for(9)
    tight = TransformersEngine(model, [39], max_rows=8, cache_bytes=budget)
    same(tight.generate(asked), unbounded)
    assert 0.6 * budget < max([held(tight.cache), *peaks]) <= budget


def test_what_another_has_no_blocks_for_yet_is_not_shared(model: Qwen3ForCausalLM) -> None:
    first = Request("a", SamplingParams(2, 0.0), prompt(0, 20))
    said = TransformersEngine(model, [], max_rows=1).generate([first])[0].token_ids
    longer = Request("a", SamplingParams(4, 0.0), [*first.prompt_ids, *said, *prompt(1, 80)])
    other = Request("b", SamplingParams(2, 0.0), prompt(2, 20))
    late = Request("c", SamplingParams(4, 0.0), [*longer.prompt_ids, 9, 9])
    turns = iter([longer, None, None, None])
    engine = TransformersEngine(model, [], max_rows=2)
    # b ends when the second turn of a begins, which has one block of the three that c could share.
    done = {one.prompt_tokens: one for one in engine.generate([first, other, late], lambda _: next(turns))}
    for request in (longer, late):
        same([done[len(request.prompt_ids)]], TransformersEngine(model, [], max_rows=1).generate([request]))


def test_a_changed_history_leaves_those_who_share_it_alone(model: Qwen3ForCausalLM) -> None:
    first = Request("a", SamplingParams(4), prompt(0, 70))
    second = Request("b", SamplingParams(20, 0.0), prompt(0, 70), seed=1)
    changed = prompt(0, 70)
    changed[10] = (changed[10] - 1) % 38 + 2
    turns = {"a": Request("a", SamplingParams(4), changed)}
    engine = TransformersEngine(model, [39], max_rows=4)
    done = engine.generate([first, second], lambda completion: turns.pop(completion.trajectory_id, None))
    expected = TransformersEngine(model, [39], max_rows=1).generate([second])
    same([each for each in done if each.trajectory_id == "b"], expected)


TOKEN = 256  # bytes of a token in the tests' model: keys and values, 2 layers, 2 heads of 8, 4 bytes


def bytes_for(blocks: int) -> int:
    """A budget that holds just so many blocks of the tests' model: its four tensors, one of them twice, and block 0."""
    return -(-(blocks + 1) * BLOCK * TOKEN * 5 // 4)


def requests(*lengths: int, max_tokens: int = 100, temperature: float = 1.0) -> list[Request]:
    sampling = SamplingParams(max_tokens, temperature)
    return [Request(str(i), sampling, prompt(i, length), seed=i) for i, length in enumerate(lengths)]


def same(some: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


LENGTHS = (70, 5, 33, 100, 64, 20, 31, 90)  # with up to 100 sampled tokens the longest needs 200: 7 blocks


@pytest.fixture(scope="module")
def alone(model: Qwen3ForCausalLM) -> list[Completion]:
    """Conversations sampled one by one, with all the memory they like."""
    return TransformersEngine(model, [39], max_rows=1).generate(requests(*LENGTHS))


@settings(max_examples=4, deadline=None)
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
    assert within.generate(requests(50, max_tokens=60, temperature=0))[0].token_ids == ended[0].token_ids
    assert capsys.readouterr().err == ""  # the context window's own end needs no word


RunOut = Callable[[Callable[[int, int], bool]], None]


@pytest.fixture
def run_out(monkeypatch: pytest.MonkeyPatch) -> RunOut:
    """Make steps, by number and rows, run out of memory at the worst moment: when numbers have been drawn."""

    def run_out(fails: Callable[[int, int], bool]) -> None:
        sample, steps = passes.sample, count(1)

        def failing(*args: object) -> object:
            drawn = sample(*args)  # type: ignore[arg-type]
            if fails(next(steps), len(drawn[0])):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return drawn

        monkeypatch.setattr(passes, "sample", failing)

    return run_out


def test_out_of_memory_makes_the_cache_smaller_and_goes_on(
    model: Qwen3ForCausalLM, alone: list[Completion], run_out: RunOut, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = TransformersEngine(model, [39], max_rows=8)
    run_out(lambda step, rows: rows > 3)
    same(engine.generate(requests(*LENGTHS)), alone)
    said = capsys.readouterr().err
    # Of the 3 + 1 + 2 + 4 + 2 + 1 + 1 + 3 blocks three quarters, 12: the first three, and a block for each.
    assert "with 8 concurrent trajectories: the KV cache is now limited to 0.000125 GiB" in said
    assert "Lower KV_CACHE_GIB" in said and "MAX_TOKENS_PER_ROLLOUT_PASS" in said
    same(engine.generate(requests(*LENGTHS)), alone)
    assert "Out of memory" not in capsys.readouterr().err  # it stays at what fits


def test_a_passing_out_of_memory_costs_a_part_of_the_cache_until_that_is_given_back(
    model: Qwen3ForCausalLM, run_out: RunOut
) -> None:
    asked = requests(90, 90, *[5] * 6, max_tokens=3)
    asked[:2] = requests(90, 90, max_tokens=100)
    expected = TransformersEngine(model, [], max_rows=8).generate(asked)
    engine = TransformersEngine(model, [], max_rows=8, cache_bytes=bytes_for(14))
    run_out(lambda step, rows: step == 60)  # when two are left, of 90 + 59 tokens
    same(engine.generate(asked), expected)
    assert engine.schedule.limit == 8
    assert engine.cache.most == 7  # three quarters of 10, the longer one's 189 tokens take 6
    engine.generate(requests(*[5] * 6, max_tokens=3))
    assert engine.cache.most == 7
    engine.release()
    engine.generate(requests(5))
    assert engine.cache.most == 14


def test_out_of_memory_with_one_trajectory_is_an_error(model: Qwen3ForCausalLM, run_out: RunOut) -> None:
    engine = TransformersEngine(model, [39], max_rows=8)
    run_out(lambda step, rows: rows > 0)
    with pytest.raises(EmailRLError, match="one trajectory of 9 tokens") as caught:
        engine.generate(requests(9, 9))
    assert caught.value.hint is not None and "MAX_MODEL_LEN" in caught.value.hint


def test_a_cache_that_others_had_filled_is_given_back_first(
    model: Qwen3ForCausalLM, run_out: RunOut, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*requests(*[90] * 7, max_tokens=3), Request("last", SamplingParams(30), prompt(0, 9), seed=1)]
    expected = TransformersEngine(model, [], max_rows=8).generate(asked)
    engine = TransformersEngine(model, [], max_rows=8)
    run_out(lambda step, rows: step == 20)
    same(engine.generate(asked), expected)
    assert engine.schedule.limit == 8
    assert "Out of memory: releasing the unused part of the KV cache" in capsys.readouterr().err
    assert len(engine.cache.users) == 1 + 2  # block 0, and those of the last: 9 + 30 tokens
