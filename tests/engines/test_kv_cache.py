"""What the key-value cache holds, by hand and counted, and what is shared in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines.cache_requests import TOKEN, bytes_for, prompt, requests, same
from transformers import Qwen3ForCausalLM

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.budget import BLOCK, blocks_of, blocks_within, default_budget, gib_for, token_bytes_of
from emailrl.engines.local.cache import BlockCache, BlockLayer, groups_of, new_table
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.passes import Conversation, Schedule


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Qwen3ForCausalLM]) -> Qwen3ForCausalLM:
    """A model that says more: only id 39 stops it."""
    return make_model(eos_token_id=None)


def test_bytes_and_blocks_by_hand(model: Qwen3ForCausalLM) -> None:
    assert token_bytes_of(model.config, torch.float32) == TOKEN
    assert token_bytes_of(model.config, torch.bfloat16) == TOKEN / 2
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


def test_the_default_is_half_of_what_a_cpu_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emailrl.model.layout.available_memory", lambda: 1000)
    assert default_budget(torch.device("cpu")) == 500


def test_the_default_on_a_gpu_counts_what_torch_keeps_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 900)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    assert default_budget(torch.device("cuda")) == 800  # 80 % of 600 + 900 - 500


def test_blocks_are_taken_shared_and_given_back() -> None:
    cache = BlockCache(1, 1)
    cache.most = 4
    one, other = new_table(), new_table()
    assert cache.is_empty
    assert cache.extend(one, 65)
    assert list(one) == [1, 2, 3] and not cache.is_empty
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
    schedule = Schedule(cache, 4)
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
    assert groups_of([10, 10, 11, 12, 40], on_cpu=True) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert groups_of([16, 16, 16], on_cpu=True) == [slice(0, 2), slice(2, 3)]
    assert groups_of([3], on_cpu=True) == [slice(0, 1)]
    # On a GPU up to 8,192 tokens of padding, 256 blocks.
    assert groups_of([100, 200, 250], on_cpu=False) == [slice(0, 3)]  # 150 + 50
    assert groups_of([100, 200, 250, 270], on_cpu=False) == [slice(0, 3), slice(3, 4)]  # 170 + 70 + 20


def counted_peak(engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the cache's tensors, at every moment when one of them grows, the old one and the new."""
    peaks = [0]

    def held() -> int:
        layers = [layer for layer in engine.cache.layers if layer.is_initialized]
        return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))

    def growing(self: BlockLayer, tensor: torch.Tensor) -> torch.Tensor:
        grown = original(self, tensor)
        peaks.append(held() + grown.nbytes)
        return grown

    original = BlockLayer.grown
    place = engine.cache.place

    def placing(*args: object, **kwargs: object) -> torch.Tensor:
        peaks.append(held())
        return place(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockLayer, "grown", growing)
    monkeypatch.setattr(engine.cache, "place", placing)
    return peaks


def test_one_long_trajectory_takes_no_more_than_it_holds(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [*requests(*[10] * 7, max_tokens=20), Request("long", SamplingParams(60), prompt(9, 180), seed=9)]
    engine = TransformersEngine(model, [39], max_rows=8)
    peaks = counted_peak(engine, monkeypatch)
    unbounded = engine.generate(asked)
    longest = max(180 + len(unbounded[-1].token_ids), 181)
    # Seven of at most 30 tokens, one block each; the long one; block 0; half as much again where it grew.
    blocks = 7 + blocks_of(longest) + 1
    assert 0 < max(peaks) <= 1.5 * blocks * BLOCK * TOKEN * 5 / 4
    assert max(peaks) < 8 * longest * TOKEN / 2  # what slots as long as the longest would take, by far

    budget = bytes_for(9)
    tight = TransformersEngine(model, [39], max_rows=8, cache_bytes=budget)
    peaks = counted_peak(tight, monkeypatch)
    same(tight.generate(asked), unbounded)
    assert 0.6 * budget < max(peaks) <= budget


def test_a_group_holds_its_prompt_once(model: Qwen3ForCausalLM) -> None:
    engine = TransformersEngine(model, [39], max_rows=8)
    users = users_when_one_ends(engine, [Request(str(i), SamplingParams(1), prompt(0, 100), seed=i) for i in range(6)])
    # Three whole blocks in all six tables; the fourth, with the last token and what is sampled, is each one's own.
    assert sorted(filter(None, users)) == [1] * 6 + [6] * 3
    assert not any(engine.cache.users)


def users_when_one_ends(engine: TransformersEngine, asked: list[Request]) -> list[int]:
    """How many tables every block is in, when the first conversation ends."""
    seen: list[list[int]] = []

    def advance(completion: Completion) -> None:
        seen.append(list(engine.cache.users))

    engine.generate(asked, advance)
    return seen[0]


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
    engine = TransformersEngine(model, [39], max_rows=4)
    first = Request("a", SamplingParams(4), prompt(0, 70))
    second = Request("b", SamplingParams(20, 0.0), prompt(0, 70), seed=1)
    changed = prompt(0, 70)
    changed[10] = (changed[10] - 1) % 38 + 2
    turns = {"a": Request("a", SamplingParams(4), changed)}
    done = engine.generate([first, second], lambda completion: turns.pop(completion.trajectory_id, None))
    [last] = [each for each in done if each.trajectory_id == "b"]
    same([last], TransformersEngine(model, [39], max_rows=1).generate([second]))
