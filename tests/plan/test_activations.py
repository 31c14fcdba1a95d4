"""What a layer keeps: bytes worked out by hand, and counted in real models."""

from __future__ import annotations

from typing import Any

import pytest
from plan.planned import ALL

from emailrl.model.layout import Keep
from emailrl.model.shape import KNOWN, Shape
from emailrl.plan.memory import Layout, head_bytes, kept_bytes, work_bytes

TINY = Shape("qwen3", 64, 96, 2, 4, 2, 16, 128, True, 4096)


def tiny_model(layers: int, dtype: Any, shape: Shape = TINY, dropout: float = 0.0) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=layers, vocab_size=shape.vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(dtype).requires_grad_(False)
    lora = LoraConfig(r=3, lora_dropout=dropout, target_modules=list(ALL), task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def packed_row(tokens: int) -> Any:
    import torch

    from emailrl.model.packing import pack

    ids = torch.arange(2 * (tokens // 2 + 1)).view(2, -1) % TINY.vocab
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -1] = True
    return pack(ids, mask)


def saved_bytes(layers: int, dtype: Any, tokens: int, dropout: float) -> int:
    """Bytes of the storages that autograd saves in a forward pass, weights left out."""
    import torch

    from emailrl.model.packing import enable_packing, packed_inputs

    model = tiny_model(layers, dtype, dropout=dropout)
    assert enable_packing(model) is None
    weights = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.get_base_model().base_model(**packed_inputs(packed_row(tokens)))
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize(("name", "itemsize"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformers_layers_keep_what_is_planned(name: str, itemsize: int, dropout: float) -> None:
    import torch

    dtype = getattr(torch, name)
    of_a_layer = saved_bytes(3, dtype, 64, dropout) - saved_bytes(2, dtype, 64, dropout)
    layout = Layout("transformers", itemsize, 3, ALL, dropout=dropout > 0, on_gpu=False)
    assert of_a_layer == 64 * kept_bytes(TINY, layout, Keep.ALL)
    assert kept_bytes(TINY, layout, Keep.INPUT) == 64 * itemsize


@pytest.mark.parametrize("keep", Keep)
def test_fused_layers_keep_what_is_planned(keep: Keep) -> None:
    import torch

    from emailrl.model.fused import FusedLayer, LayerWeights

    model = tiny_model(1, torch.bfloat16)
    weights = LayerWeights(model.get_base_model().model.layers[0])
    packed = packed_row(64)
    states = torch.randn(64, 64, dtype=torch.bfloat16).requires_grad_()
    rope = (torch.ones(64, 16, dtype=torch.bfloat16), torch.zeros(64, 16, dtype=torch.bfloat16))
    output = FusedLayer.apply(states, weights, rope, packed.segments, keep, *weights.refresh())
    first, made = output.grad_fn.states
    found = [first, *(made.qkv or []), *(made.attended or []), *(made.gate_up or [])]
    found += [one for one in (made.qkv_inner, made.middle, made.gate_up_inner) if one is not None]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in found}
    # FlashAttention's log-sum-exp, a float32 a head, does not exist on a CPU.
    log_sum_exp = 0 if keep == Keep.INPUT else 4 * TINY.heads
    assert sum(storages.values()) == 64 * (kept_bytes(TINY, Layout("fused", 2, 3, ALL), keep) - log_sum_exp)


def test_bytes_of_the_4b_shape_by_hand() -> None:
    shape, layout = KNOWN["qwen3-4b"], Layout("fused", 2, 16, ALL)
    # Input 2560, attention 4096 (and 32 float32), q 4096, k and v 1024, middle 2560, gate and up 9728; LoRA 5·16.
    assert kept_bytes(shape, layout, Keep.INPUT) == 5120
    assert kept_bytes(shape, layout, Keep.ATTENTION) == 5120 + 8192 + 128
    assert kept_bytes(shape, layout, Keep.ALL) == 2 * (2560 + 4096 + 4096 + 2048 + 2560 + 19_456 + 80) + 128 == 69_920
    # 2 gradients of 2560, 3 of 4096, 3 of 1024, float32 4096, two of 4096 for shared heads; gate and up are gone.
    assert work_bytes(shape, layout, Keep.ALL) == 2 * (5120 + 12_288 + 3072 + 8192 + 8192 - 19_456) == 34_816


def test_bytes_of_the_head_by_hand() -> None:
    shape, fused = KNOWN["qwen3-0.6b"], Layout("fused", 2, 16, ALL)
    # 1,000 states of 1,024 numbers, 2 + 4 + 2 + 2 bytes each; a chunk of 2²⁵ logits and their gradient in bf16.
    assert head_bytes(shape, fused, 1000) == 10_240_000 + 4 * 33_554_432
    assert head_bytes(shape, fused, 10) == 102_400 + 4 * 1_519_360
    assert head_bytes(shape, Layout("transformers", 2, 16, ALL, fused_head=False), 1000) == 10_240_000 + 22 * 33_554_432
