"""Fused layers and head against transformers and PEFT, each written-out backward against autograd; and prefixes
computed once against separate forwards: any tree of prefixes, any layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from emailrl.model import fused as layer
from emailrl.model.fused import FusedBackbone, enable_fused, fused_backbone, why_not_fused
from emailrl.model.layout import Keep
from emailrl.model.logprobs import FrozenHead, token_logprobs
from emailrl.model.packing import SharedKeys, enable_packing, pack, shares_prefixes
from tests.model.test_packing import TREE, Tree, batch, grow, random_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def with_lora(base: Any, targets: list[str] | None = None, **others: Any) -> Any:
    config = {"r": 3, "lora_alpha": 5, "target_modules": targets or ALL} | others
    peft = get_peft_model(base, LoraConfig(**config))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    return peft


def scored(
    peft: Any, ids: Tensor, mask: Tensor, shared: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities, entropies and the adapter's gradients of a weighted sum."""
    weight = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    peft.zero_grad()
    result = token_logprobs(peft, ids, mask, temperature=0.7, entropy=True, shared=shared)
    (weight * result.logprobs).sum().backward()
    assert result.entropy is not None
    gradients = {name: one.grad.clone() for name, one in peft.named_parameters() if one.grad is not None}
    return result.logprobs.detach(), result.entropy, gradients


@pytest.mark.parametrize("keep", list(Keep))
@pytest.mark.parametrize(
    ("kind", "targets", "others", "tree"),
    [
        ("Qwen3", ALL, {"head_dim": 8}, TREE),
        ("Qwen2", ["q_proj", "v_proj", "down_proj"], {}, TREE),
        ("Qwen3", ALL, {"head_dim": 8}, None),
        ("Llama", ["k_proj", "up_proj"], {}, None),
        ("Mistral", ["o_proj"], {"sliding_window": None}, None),
    ],
)
def test_equals_transformers_and_peft(
    kind: str, targets: list[str], others: dict[str, Any], tree: Tree | None, keep: Keep
) -> None:
    peft = with_lora(random_model(kind, **others), targets)
    ids, mask, shared = grow(tree, seed=2) if tree else (*batch([13, 5, 2, 9]), None)
    expected, expected_entropy, expected_gradients = scored(peft, ids, mask)
    assert enable_packing(peft) is None and enable_fused(peft, "auto") is None
    peft.get_base_model().emailrl_fused.keep_for = lambda *given: keep
    logprobs, entropy, gradients = scored(peft, ids, mask, shared)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)
    assert gradients.keys() == expected_gradients.keys() and len(gradients) == 2 * 2 * len(targets)
    for name, reference in expected_gradients.items():
        assert reference.abs().max() > 1e-2
        torch.testing.assert_close(gradients[name], reference, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("keep", list(Keep))
@pytest.mark.parametrize(("kind", "others"), [("Qwen3", {"head_dim": 8}), ("Qwen2", {}), ("Llama", {})])
def test_all_weights(kind: str, others: dict[str, Any], keep: Keep) -> None:
    """Matrices, biases (Qwen2's) and norms (Qwen3's also of heads) have the gradients of transformers' layers."""
    base = random_model(kind, **others).requires_grad_(True)
    ids, mask, shared = grow(TREE, seed=2)
    expected, _, expected_gradients = scored(base, ids, mask)
    assert enable_packing(base) is None and enable_fused(base, "auto") is None
    base.emailrl_fused.keep_for = lambda *given: keep
    logprobs, _, gradients = scored(base, ids, mask, shared)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert gradients.keys() == expected_gradients.keys() == dict(base.named_parameters()).keys()
    for name, reference in expected_gradients.items():
        torch.testing.assert_close(gradients[name], reference, atol=5e-5, rtol=1e-4, msg=name)


def test_one_norm_beside_an_adapter() -> None:
    peft = with_lora(random_model("Qwen3", head_dim=8), ["q_proj"])
    peft.get_base_model().base_model.layers[1].self_attn.k_norm.weight.requires_grad_()
    ids, mask = batch([13, 5])
    _, _, expected = scored(peft, ids, mask)
    assert enable_packing(peft) is None and enable_fused(peft, "auto") is None and len(expected) == 5
    _, _, gradients = scored(peft, ids, mask)
    assert gradients.keys() == expected.keys()
    for name, reference in expected.items():
        torch.testing.assert_close(gradients[name], reference, atol=2e-5, rtol=1e-4, msg=name)


def test_adapter_off_and_adapter_moved() -> None:
    """The reference policy, and a cache of the adapter that an optimizer's step must empty."""
    peft = with_lora(random_model("Qwen3", head_dim=8))
    ids, mask = batch([13, 5])

    def both() -> list[Tensor]:
        with torch.no_grad():
            on = token_logprobs(peft, ids, mask).logprobs
            with peft.disable_adapter():
                return [on, token_logprobs(peft, ids, mask).logprobs]

    parameters = [one for one in peft.parameters() if one.requires_grad]
    expected = both()
    assert enable_packing(peft) is None and enable_fused(peft, "auto") is None
    torch.testing.assert_close(both(), expected, atol=1e-5, rtol=0)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    token_logprobs(peft, ids, mask).logprobs.sum().backward()
    optimizer.step()
    moved = both()
    assert (moved[0] - expected[0]).abs().max() > 0.1
    del peft.get_base_model().emailrl_fused
    torch.testing.assert_close(both(), moved, atol=1e-5, rtol=0)


def _in_place(grad: Tensor, gate: Tensor, up: Tensor) -> list[Tensor]:
    """The product and both gradients, out of the buffers they are written into."""
    buffers = [grad.clone(), gate.clone(), up.clone()]
    layer.swiglu_backward_(*buffers)
    torch.testing.assert_close(buffers[0], layer.swiglu(gate, up), atol=1e-12, rtol=0)
    return buffers


PAIRS: list[tuple[Callable[..., Tensor], list[Tensor], Callable[..., Any]]] = [
    (lambda x: layer.rms_norm(x, draw(6), 1e-3), [draw(4, 6, seed=1)],
     lambda g, x: [layer.rms_norm_backward(g, x, draw(6), 1e-3)]),
    (lambda x: layer.rotate(x, draw(4, 6), draw(4, 6, seed=9)), [draw(4, 2, 6, seed=1)],
     lambda g, x: [layer.rotate_backward(g, draw(4, 6), draw(4, 6, seed=9))]),
    (lambda x: layer.norm_rotate(x, draw(6), draw(4, 6), draw(4, 6, seed=9), 1e-3), [draw(4, 2, 6, seed=1)],
     lambda g, x: [layer.norm_rotate_backward(g, x, draw(6), draw(4, 6), draw(4, 6, seed=9), 1e-3)]),
    (layer.swiglu, [draw(4, 6, seed=1), draw(4, 6, seed=2)],
     lambda g, a, b: _in_place(g, a, b)[1:]),
    (lambda x: layer.log_softmax_at(x, torch.tensor([0, 5, 2, 3]), 0.7)[0], [draw(4, 6, seed=1)],
     lambda g, x: [g[:, None] * layer.log_softmax_at(x, torch.tensor([0, 5, 2, 3]), 0.7)[2]]),
]  # fmt: skip


@pytest.mark.parametrize(("forward", "inputs", "backward"), PAIRS, ids=["norm", "rope", "norm-rope", "swiglu", "head"])
def test_written_out_backward(
    forward: Callable[..., Tensor], inputs: list[Tensor], backward: Callable[..., Any]
) -> None:
    leaves = [one.clone().requires_grad_() for one in inputs]
    output = forward(*leaves)
    grad = draw(*output.shape, seed=4)
    expected = torch.autograd.grad(output, leaves, grad)
    for actual, reference in zip(backward(grad, *inputs), expected, strict=True):
        torch.testing.assert_close(actual, reference, atol=1e-12, rtol=1e-10)


def test_head_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = draw(7, 5, seed=1).requires_grad_(), draw(11, 5, seed=2)
    labels = torch.tensor([0, 10, 3, 3, 7, 1, 5])
    logits = hidden @ weight.T / 0.5
    expected = logits.log_softmax(-1)[torch.arange(7), labels]
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    grad = draw(7, seed=3)
    for elements in (2**27, 33, 1):
        monkeypatch.setattr("emailrl.model.logprobs.CHUNK_ELEMENTS", elements)
        logprobs, entropies = FrozenHead.apply(hidden, weight, labels, 0.5)
        torch.testing.assert_close((logprobs, entropies), (expected, entropy), atol=1e-12, rtol=0)
        assert not entropies.requires_grad
        actual = torch.autograd.grad(logprobs, hidden, grad)[0]
        reference = torch.autograd.grad(expected, hidden, grad, retain_graph=True)[0]
        torch.testing.assert_close(actual, reference, atol=1e-12, rtol=0)


def test_what_is_not_fused() -> None:
    def reason(peft: Any) -> str | None:
        return why_not_fused(peft.get_base_model().base_model)

    def adapted(kind: str = "Qwen3", *, lora: dict[str, Any] | None = None, **config: Any) -> Any:
        return with_lora(random_model(kind, head_dim=8, **config), **(lora or {}))

    assert reason(adapted()) is None
    assert reason(adapted(lora={"lora_dropout": 0.1})) == "its LoRA has dropout"
    assert reason(adapted(lora={"use_dora": True})) == "its adapter is not plain LoRA"
    assert reason(adapted("Gemma")) == "its layers are GemmaDecoderLayer"
    assert reason(adapted(hidden_act="gelu")) == "its activation is gelu"
    assert reason(adapted(attention_dropout=0.1)) == "its attention has dropout"
    merged = adapted()
    merged.merge_adapter()
    assert reason(merged) == "its adapters are merged, or several are active"
    refused = with_lora(random_model("Gemma", head_dim=8))
    assert enable_fused(refused, "auto") and fused_backbone(refused) is None


def test_auto_keeps_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = with_lora(random_model("Qwen3", head_dim=8))
    fused = FusedBackbone(peft.get_base_model().base_model, "auto")
    # hidden 32, queries 32, keys 16, ffn 48; two layers; 4 x 48 + 4 x (32 + 32) + 4 x 16 = 512 numbers at work.
    assert [fused.bytes_for(10, keep) for keep in Keep] == [
        10 * 4 * (2 * 32 + 512),
        10 * 4 * (2 * 64 + 512),
        10 * 4 * (2 * (64 + 32 + 32 + 32) + 512),
        10 * 4 * (2 * (160 + 96) + 512),
    ]
    for free, keep in ((10**6, Keep.ALL), (38_000, Keep.HIDDEN), (29_000, Keep.ATTENTION), (100, Keep.INPUT)):
        monkeypatch.setattr("emailrl.model.fused.free_memory", lambda device, free=free: free)
        assert fused.keep_for(10, torch.device("cuda")) == keep
    assert fused.keep_for(10, torch.device("cpu")) == Keep.ALL
    for setting, keep in (("on", Keep.INPUT), ("selective", Keep.ATTENTION), ("off", Keep.ALL)):
        assert FusedBackbone(fused.backbone, setting).keep_for(10, torch.device("cuda")) == keep


# -- shared prefixes


def test_pack_shared_prefixes_by_hand() -> None:
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
    assert segments.longest == (4, 5)
    # 3 and 5 of the first row; 7 and 8 of the second; 6 and 9 of the third, which follow 3 and 6; 2 of the fourth.
    assert packed.gather.tolist() == [1, 3, 4, 5, 2, 4, 0]
    # A row shares no more than the row before it computes.
    ids = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 4], [1, 2, 3, 5]])
    mask = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]]).bool()
    packed = pack(ids, mask, torch.tensor([0, 3, 3]))
    assert packed.token_ids.tolist() == [[1, 2, 3]] and packed.position_ids.tolist() == [[0, 1, 2]]
    assert packed.segments.keys is not None and packed.segments.keys.index.tolist() == [0, 1, 0, 1, 2]
    mask[1] = False  # a row that trains nothing is not computed
    assert pack(ids, mask, torch.tensor([0, 3, 3])).token_ids.tolist() == [[1, 2, 1, 2, 3]]


@cache
def fused_model() -> Any:
    """In float64: what remains between two orders of the same sums is then far below any mistake."""
    peft = with_lora(random_model("Qwen3", head_dim=8)).double()
    assert enable_packing(peft) is None and enable_fused(peft, "off") is None
    return peft


LENGTHS = st.tuples(st.integers(0, 12), st.integers(2, 12))


@settings(max_examples=30, deadline=None)
@given(drawn=st.lists(LENGTHS, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_tree_equals_rows_that_share_nothing(drawn: Tree, seed: int) -> None:
    limits = [0, *(length for _, length in drawn)]
    tree = [(min(shared, length, last), length) for (shared, length), last in zip(drawn, limits, strict=False)]
    ids, mask, shared = grow(tree, seed)
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
        return enable_packing(model) is None and shares_prefixes(model)

    plain, dropping = random_model("Qwen3", head_dim=8), random_model("Qwen3", head_dim=8)
    assert shares(plain) and not shares(with_lora(plain, ["q_proj"], lora_dropout=0.1))
    assert not shares(random_model("Qwen3", head_dim=8, attention_dropout=0.1))
    dropping.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.1))
    assert not shares(dropping)
