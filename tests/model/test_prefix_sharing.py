"""Prefixes computed once against separate forwards, in value and in gradient: any tree of prefixes, any layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from emailrl.model.fused.model import enable_fused
from emailrl.model.logprobs import token_logprobs
from emailrl.model.packing import SharedKeys, enable_packing, pack, shares_prefixes
from tests.model.test_fused import scored, with_lora
from tests.model.test_packing import Tree, grow, random_model, separate


def test_pack_by_hand() -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5, 0], [1, 2, 3, 6, 7, 8], [1, 2, 3, 6, 9, 0], [1, 2, 3, 6, 9, 0]])
    mask = torch.tensor([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0]]).bool()
    packed = pack(ids, mask, torch.tensor([0, 3, 4, 5]))
    # Each row ends before its last trained token: 4, 5, 4 and 1 tokens are needed. The second row has 6 and 7 of its
    # own; the third and the fourth have none, and no queries.
    assert packed.token_ids.tolist() == [[1, 2, 3, 4, 6, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 3, 4]]
    segments = packed.segments
    assert (segments.query_bounds, segments.key_bounds) == ((0, 4, 6), (0, 4, 9))
    assert (segments.cu_queries.tolist(), segments.cu_keys.tolist()) == ([0, 4, 6], [0, 4, 9])
    assert segments.keys is not None and segments.keys.index.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5]
    assert (segments.keys.own.tolist(), segments.keys.borrowed.tolist()) == ([0, 1, 2, 3, 7, 8], [4, 5, 6])
    assert (segments.keys.lent.tolist(), segments.keys.lender.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert (segments.most_queries, segments.most_keys) == (4, 5)
    # 3 and 5 of the first row; 7 and 8 of the second; 6 and 9 of the third, which follow 3 and 6; 2 of the fourth.
    assert packed.gather.tolist() == [1, 3, 4, 5, 2, 4, 0]


def test_a_row_shares_no_more_than_the_row_before_it_computes() -> None:
    ids = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 4], [1, 2, 3, 5]])
    mask = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]]).bool()
    packed = pack(ids, mask, torch.tensor([0, 3, 3]))
    assert packed.token_ids.tolist() == [[1, 2, 3]] and packed.position_ids.tolist() == [[0, 1, 2]]
    assert packed.segments.keys is not None and packed.segments.keys.index.tolist() == [0, 1, 0, 1, 2]
    mask[1] = False  # a row that trains nothing is not computed
    assert pack(ids, mask, torch.tensor([0, 3, 3])).token_ids.tolist() == [[1, 2, 1, 2, 3]]


@cache
def packed_model() -> Any:
    model = random_model("Qwen3", head_dim=8)
    assert enable_packing(model) is None
    return model


@cache
def fused_model() -> Any:
    """In float64: what remains between two orders of the same sums is then far below any mistake."""
    peft = with_lora(random_model("Qwen3", head_dim=8)).double()
    assert enable_packing(peft) is None and enable_fused(peft, "off") is None
    return peft


LENGTHS = st.tuples(st.integers(0, 12), st.integers(2, 12))


@settings(max_examples=30, deadline=None)
@given(drawn=st.lists(LENGTHS, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_tree_equals_separate_forwards(drawn: Tree, seed: int) -> None:
    limits = [0, *(length for _, length in drawn)]
    tree = [(min(shared, length, last), length) for (shared, length), last in zip(drawn, limits, strict=False)]
    ids, mask, shared = grow(tree, seed)
    with torch.no_grad():
        actual = token_logprobs(packed_model(), ids, mask, shared=shared).logprobs
        torch.testing.assert_close(actual, separate(packed_model(), ids, mask), atol=1e-5, rtol=0)
    apart, together = scored(fused_model(), ids, mask), scored(fused_model(), ids, mask, shared=shared)
    torch.testing.assert_close(together[:2], apart[:2], atol=1e-9, rtol=0)
    for name, reference in apart[2].items():
        torch.testing.assert_close(together[2][name], reference, atol=1e-9, rtol=1e-9, msg=name)


def test_gradients_of_shared_keys_are_summed_in_float32() -> None:
    keys = SharedKeys.of(torch.tensor([0, 1, *[1] * 1000]), torch.tensor([True, True, *[False] * 1000]))
    # In bfloat16 256 + 1 is 256, where the sum would stay; 1000 is 1000, and 1000 + 8 is 1008.
    grad = torch.tensor([3.0, 8.0, *[1.0] * 1000], dtype=torch.bfloat16)
    assert keys.gathered(grad).tolist() == [3.0, 1008.0]


def test_with_dropout_nothing_is_shared() -> None:
    def shares(model: Any) -> bool:
        assert enable_packing(model) is None
        return shares_prefixes(model)

    def adapted(**others: Any) -> Any:
        return get_peft_model(random_model("Qwen3", head_dim=8), LoraConfig(target_modules=["q_proj"], **others))

    assert shares(adapted()) and not shares(adapted(lora_dropout=0.1))
    assert not shares(random_model("Qwen3", head_dim=8, attention_dropout=0.1))
    padded = random_model("Mistral", sliding_window=4)
    assert enable_packing(padded) is not None and not shares_prefixes(padded)
    dropping = random_model("Qwen3", head_dim=8)
    dropping.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    assert not shares(dropping)
