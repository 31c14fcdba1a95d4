"""Packed rows against separate forwards, in value and in gradient, and which models are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from emailrl.model import packing
from emailrl.model.logprobs import token_logprobs
from emailrl.model.packing import enable_packing, pack, shares_prefixes, takes_packed

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


Tree = list[tuple[int, int]]  # rows of a batch: tokens shared with the row before, and tokens in all

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


def random_model(kind: str, heads: str = "gqa", **others: Any) -> Any:
    """A model whose weights are large enough for attention to matter."""
    num, num_kv = HEADS[heads]
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, num_attention_heads=num, num_key_value_heads=num_kv, pad_token_id=0, **others
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


def batch(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random right-padded rows that share nothing, and their mask."""
    return grow([(0, length) for length in lengths], seed=sum(lengths))[:2]


def separate(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Each row alone, through the model's own logits."""
    logprobs = torch.zeros(ids.shape, dtype=model.dtype)
    for b, t in mask.nonzero().tolist():
        logits = model(input_ids=ids[b : b + 1, :t], use_cache=False).logits[0, -1]
        logprobs[b, t] = logits.log_softmax(-1)[ids[b, t]]
    return logprobs


@pytest.mark.parametrize(
    ("tree", "tokens"),
    [
        ([(0, 2), (0, 9)], 1 + 8),
        ([(0, 13), (0, 5), (0, 5), (0, 1), (0, 8)], 12 + 4 + 4 + 7),
        ([(0, 7)], 7),  # a single row is not packed
        # 8, 6, 11, 1, 4, 4 and 7 tokens are needed, of which 0, 4, 6, 1, 0, 4 and 3 are shared.
        (TREE, 8 + 2 + 5 + 0 + 4 + 0 + 4),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "heads"), [("Qwen3", "gqa"), ("Qwen2", "mha"), ("Llama", "mqa"), ("Qwen3", "mha"), ("Gemma", "mqa")]
)
def test_packed_equals_separate_forwards(kind: str, heads: str, tree: Tree, tokens: int) -> None:
    # In float64: how sums are split over threads must not decide whether 1e-5 holds.
    model = (random_model(kind, heads, head_dim=8) if kind != "Qwen2" else random_model(kind, heads)).double()
    ids, mask, shared = grow(tree)
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    first, second = model.model.layers
    watched = [first.self_attn.k_proj.weight, first.self_attn.v_proj.weight, second.mlp.down_proj.weight]
    watched.append(model.model.embed_tokens.weight)
    expected = separate(model, ids, mask)
    expected_gradient = torch.autograd.grad((weight * expected).sum(), watched)
    assert enable_packing(model) is None and shares_prefixes(model)
    seen: list[tuple[int, ...]] = []
    first.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    packed = token_logprobs(model, ids, mask, shared=shared).logprobs
    assert seen == [(1, tokens, 32)], "not packed, or with padding"
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=0)
    gradient = torch.autograd.grad((weight * packed).sum(), watched)
    for actual, reference in zip(gradient, expected_gradient, strict=True):
        assert reference.abs().max() > 1e-2
        torch.testing.assert_close(actual, reference, atol=1e-5, rtol=1e-4)


def test_recomputed_layers_stay_confined() -> None:
    """The backward pass of gradient checkpointing runs attention again: it must see the same bounds."""
    model = random_model("Qwen3", head_dim=8)
    ids, mask = batch([9, 4, 6])
    weight = model.model.layers[0].self_attn.q_proj.weight
    expected = torch.autograd.grad(separate(model, ids, mask).sum(), weight)[0]
    assert enable_packing(model) is None
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    actual = torch.autograd.grad(token_logprobs(model, ids, mask).logprobs.sum(), weight)[0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_pack_by_hand() -> None:
    ids = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25], [31, 32, 33, 34, 35]])
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]).bool()
    packed = pack(ids, mask)
    # Row 0 is needed up to the token before its last trained one, row 1 not at all, row 2 for one token.
    assert packed.token_ids.tolist() == [[11, 12, 13, 31]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0]]
    assert (packed.segments.query_bounds, packed.segments.cu_queries.tolist()) == ((0, 3, 4), [0, 3, 4])
    assert packed.segments.cu_keys.tolist() == [0, 3, 4] and packed.segments.keys is None
    assert packed.segments.longest == (3, 3)
    assert packed.gather.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="nothing is trained"):
        pack(ids, torch.zeros_like(mask))


def test_a_packed_model_still_samples_with_padding_on_the_left() -> None:
    """Without segment bounds the registered attention is SDPA, masks included."""
    model = random_model("Qwen3", head_dim=8)
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    visible = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    expected = model(input_ids=ids, attention_mask=visible).logits
    assert enable_packing(model) is None and takes_packed(model)
    assert torch.equal(model(input_ids=ids, attention_mask=visible).logits[:, -1], expected[:, -1])


@pytest.mark.parametrize(
    ("kind", "others", "reason"),
    [
        ("Mistral", {"sliding_window": 4}, "not plain causal attention"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "not plain causal"),
        ("Gemma2", {"head_dim": 8, "sliding_window": 4}, "not plain causal attention"),
        ("Qwen3", {"head_dim": 8}, "ATTN_IMPLEMENTATION=sdpa, not eager"),
    ],
)
def test_what_cannot_be_packed_is_padded_and_right(kind: str, others: dict[str, Any], reason: str) -> None:
    model = random_model(kind, **others)
    if kind == "Qwen3":
        model.set_attn_implementation("eager")
    ids, mask = batch([12, 7])
    assert reason in str(enable_packing(model)) and not takes_packed(model)
    expected = separate(model, ids, mask)
    torch.testing.assert_close(token_logprobs(model, ids, mask).logprobs, expected, atol=1e-5, rtol=0)


def test_a_model_whose_layers_ignore_the_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("Qwen3", head_dim=8)
    bound = packing.packed_inputs
    monkeypatch.setattr(packing, "packed_inputs", lambda row: bound(row) | {"segments": None})
    assert enable_packing(model) is not None
    assert model.config._attn_implementation == "sdpa"
