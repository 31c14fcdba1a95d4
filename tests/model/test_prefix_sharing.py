"""Prefixes computed once against separate forwards, in value and in gradient: any tree of prefixes, any layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tests.policy.test_fused import scored, with_lora
from tests.policy.test_packing import random_model, separate
from torch import Tensor, nn

from emailrl.model import packing
from emailrl.model.fused.model import enable_fused
from emailrl.model.layout import Keep
from emailrl.model.logprobs import token_logprobs
from emailrl.model.packing import enable_packing, pack, shares_prefixes
from emailrl.model.segments import Segments, SharedKeys

Tree = list[tuple[int, int]]
"""Rows of a batch: tokens shared with the row before, and tokens in all."""

TREE: Tree = [(0, 9), (4, 7), (6, 12), (2, 2), (0, 5), (5, 5), (3, 8)]
"""A branch off a branch; a row that is the beginning of another; a second root; the same row twice."""


def grow(tree: Tree, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, mask (a third of the tokens, shared ones too, and the last) and shared lengths of a tree."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(tree), max(length for _, length in tree), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (shared, length) in enumerate(tree):
        ids[row, :length] = torch.randint(1, 97, (length,), generator=generator)
        mask[row, :length] = torch.rand(length, generator=generator) < 0.3
        if shared:
            ids[row, :shared] = ids[row - 1, :shared]
        mask[row, length - 1] = True
    mask[:, 0] = False
    return ids, mask, torch.tensor([shared for shared, _ in tree])


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


@pytest.mark.parametrize(("kind", "heads"), [("Qwen3", "gqa"), ("Llama", "mqa"), ("Qwen2", "mha")])
def test_equals_separate_forwards(kind: str, heads: str) -> None:
    model = random_model(kind, heads, **({} if kind == "Qwen2" else {"head_dim": 8}))
    ids, mask, shared = grow(TREE)
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    watched = [model.model.layers[0].self_attn.k_proj.weight, model.model.layers[0].self_attn.v_proj.weight]
    watched += [model.model.embed_tokens.weight, model.model.layers[1].mlp.down_proj.weight]
    expected = separate(model, ids, mask)
    expected_gradient = torch.autograd.grad((weight * expected).sum(), watched)
    assert enable_packing(model) is None and shares_prefixes(model)
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    actual = token_logprobs(model, ids, mask, shared=shared).logprobs
    # 8, 6, 11, 1, 4, 4 and 7 tokens are needed, of which 0, 4, 6, 1, 0, 4 and 3 are shared.
    assert seen == [8 + 2 + 5 + 0 + 4 + 0 + 4]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    for gradient, reference in zip(
        torch.autograd.grad((weight * actual).sum(), watched), expected_gradient, strict=True
    ):
        assert reference.abs().max() > 1e-2
        torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("keep", list(Keep))
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2"])
def test_fused_layers_equal_transformers_and_peft(kind: str, keep: Keep) -> None:
    peft = with_lora(random_model(kind, **({"head_dim": 8} if kind == "Qwen3" else {})))
    ids, mask, shared = grow(TREE, seed=2)
    expected, expected_entropy, expected_gradients = scored(peft, ids, mask)
    assert enable_packing(peft) is None and enable_fused(peft, "auto") is None
    peft.get_base_model().emailrl_fused.keep_for = lambda *given: keep
    logprobs, entropy, gradients = scored(peft, ids, mask, shared=shared)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    assert gradients.keys() == expected_gradients.keys()
    for name, reference in expected_gradients.items():
        assert reference.abs().max() > 1e-2
        torch.testing.assert_close(gradients[name], reference, atol=2e-5, rtol=1e-4, msg=name)


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


@pytest.mark.parametrize("wrong", ["positions", "one key too many", "one key too few", "top left"])
def test_the_comparison_sees_a_shift_by_one(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model()
    ids, mask, shared = grow([(0, 9), (4, 12)])
    expected = separate(model, ids, mask)
    honest, bound = Segments.parts, packing.packed_inputs

    def shifted(segments: Segments) -> Any:
        by = {"one key too many": 1, "one key too few": -1, "top left": -4}[wrong]
        for queries, keys, visible in honest(segments):
            rows, columns = queries.stop - queries.start, keys.stop - keys.start
            ones = torch.ones(rows, columns, dtype=torch.bool)
            yield queries, keys, None if visible is None else ones.tril(columns - rows + by)

    def moved(row: Any) -> Any:
        inputs = bound(row)
        return inputs | {"position_ids": inputs["position_ids"] + (torch.arange(len(row.token_ids[0])) >= 8)}

    if wrong == "positions":
        monkeypatch.setattr("emailrl.model.logprobs.packed_inputs", moved)
    else:
        monkeypatch.setattr(Segments, "parts", shifted)
    with torch.no_grad():
        actual = token_logprobs(model, ids, mask, shared=shared).logprobs
    assert (actual - expected)[1].abs().max() > 1e-2


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
