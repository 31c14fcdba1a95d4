"""The memory of a run: what a layer keeps, as the trainer decides, by hand, and against measured peaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plan.planned import ALL, CPU, H200, plan_for, settings_with
from transformers import Qwen3Config, Qwen3ForCausalLM

from emailrl.model.fused import FusedBackbone, fused_backbone
from emailrl.model.layout import Keep
from emailrl.model.packing import enable_packing, pack, packed_inputs, shares_prefixes
from emailrl.model.policy import load_policy
from emailrl.model.shape import KNOWN, Shape
from emailrl.plan.devices import GIB
from emailrl.plan.memory import Layout, head_bytes, keep_of, kept_bytes, work_bytes
from emailrl.training.algorithms import resolve
from emailrl.training.team import build_updater


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "qwen3-14b"])
def test_what_is_kept_is_what_the_trainer_keeps(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """At every eighth of the memory that keeping all takes, and somewhat more than is kept is reckoned with."""
    shape, layout = KNOWN[name], Layout("fused", 2, 16, ALL)
    config = Qwen3Config(
        hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers, vocab_size=shape.vocab,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=128, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        backbone = FusedBackbone(Qwen3ForCausalLM(config).to(torch.bfloat16).requires_grad_(False).model, "auto")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    chosen = set()
    for eighths in range(10):
        free = backbone.bytes_for(1000, Keep.ALL) * eighths // 8
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        chosen.add(backbone.keep_for(1000, torch.device("cuda")))
        assert keep_of(shape, "auto", layout, 1000, free) == backbone.keep_for(1000, torch.device("cuda"))
    assert chosen == set(Keep)
    for keep in Keep:
        counted = shape.layers * kept_bytes(shape, layout, keep) + work_bytes(shape, layout, keep)
        assert 0.85 * backbone.bytes_for(1, keep) < counted < 0.98 * backbone.bytes_for(1, keep)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"packing": False},
        {"attn_implementation": "eager"},
        {"gradient_checkpointing": "selective"},
        {"gradient_checkpointing": "off"},
        {"lora_dropout": 0.1},
        {"dtype": "bf16"},
        {"max_tokens_per_micro_batch": 512},
    ],
)
def test_a_policy_is_loaded_as_it_is_planned(values: dict[str, Any]) -> None:
    settings = settings_with(model_name="nano", emailrl_device="cpu", **values)
    policy = load_policy(settings, trainable=True)
    memory = plan_for(CPU, model_name="nano", emailrl_device="cpu", **values).memory
    assert (memory.layout.layers == "fused") is (fused_backbone(policy.model) is not None)
    assert (memory.keep == Keep.INPUT) is policy.model.get_base_model().is_gradient_checkpointing
    assert memory.layout.shares is shares_prefixes(policy.model)
    assert memory.layout.itemsize == policy.dtype.itemsize
    assert memory.micro_batch_tokens == build_updater(policy, settings, resolve(settings)).forward.max_tokens


def test_auto_leaves_the_card_its_context() -> None:
    resident = sum(plan_for(model="4B").memory.resident.values())
    needed = resident + 0.6 * GIB + 16384 * 2_646_016 / 0.9
    for room, keep in ((1e6, Keep.ALL), (-1e6, Keep.HIDDEN)):
        card = replace(H200, gib=(needed + room) / GIB)
        assert plan_for(card, model="4B").memory.keep == keep


def test_resident_memory_by_hand() -> None:
    memory = plan_for(model="0.6B").memory
    assert memory.resident["weights"] == 1_192_099_840
    assert memory.resident["adapter"] == 10 * 10_092_544  # float32 weights and gradients, a bf16 copy
    assert memory.resident["optimizer"] == 8 * 10_092_544
    # Below a billion parameters the engine samples from merged projections of its own.
    assert memory.resident["sampler's copy"] == 2 * 28 * 15_728_640
    assert plan_for().memory.resident["sampler's copy"] == 4 * 64_225_280  # the 14B shape: the adapter again


def test_the_cache_of_the_in_process_engine() -> None:
    memory = plan_for(tokens=1000, max_batch_trajectories=10).memory
    # Ten trajectories of 32 blocks of 32 tokens, a quarter more for its growth.
    assert memory.sampling["KV cache"] == 10 * 1024 * 163_840 * 5 // 4
    assert memory.at_once == 10
    # 79.1 GiB less 0.6 of CUDA's and what stays, of which the cache takes four fifths: 41 trajectories of 3,800.
    full = plan_for("H100").memory
    free = int(79.1 * GIB) - int(0.6 * GIB) - sum(full.resident.values())
    room = int(0.8 * free * 80 / (81 * 32 * 163_840)) - 1  # keys and values of 40 layers; a block for the padding
    assert full.cache_tokens == 32 * room and full.at_once == 64 == min(64, 32 * room // 3800)
    few = plan_for("H100", kv_cache_gib=2).memory
    assert few.sampling["KV cache"] == 2 * GIB and few.at_once == 3
    none = plan_for("H100", kv_cache_gib=0.5)
    assert "does not fit: the KV cache has room for 3,200 tokens of 5,320" in none.verdict
    assert none.verdict.endswith("; try KV_CACHE_GIB=1")


def test_the_cache_leaves_room_for_the_forward_pass() -> None:
    memory = plan_for("4090", model="8B").memory
    assert memory.sampling_peak == pytest.approx(memory.usable, abs=1)
    assert 0 < memory.at_once < 10


def test_vllm_shares_the_gpu() -> None:
    made = plan_for(engine="vllm", model="4B")
    share, graphs = int(0.45 * 139.8 * GIB), int(5.5 * GIB * 36 * 2560 / (40 * 5120))
    assert made.memory.sampling == {"vLLM": share, "CUDA graphs": graphs}
    assert made.memory.cache_tokens == (share - 8_044_936_192 - 2 * GIB) // 147_456
    # There is room for both.
    assert made.memory.training.items() >= made.memory.sampling.items() and not made.memory.vllm_sleeps
    asleep = plan_for(engine="vllm", model="4B", vllm_enable_sleep="on")
    assert asleep.memory.training["vLLM"] < 2 * GIB and "CUDA graphs" not in asleep.memory.training
    assert asleep.memory.vllm_sleeps
    assert asleep.memory.keep == made.memory.keep  # vLLM stays awake only where the trainer loses nothing
    assert plan_for(engine="vllm").memory.vllm_sleeps  # 14B
    assert plan_for("A100-80", engine="vllm", model="4B").memory.vllm_sleeps
    awake = plan_for(engine="vllm", model="4B", vllm_enable_sleep=False)
    assert awake.memory.training["vLLM"] == share
    servers = plan_for(engine="vllm", vllm_urls="http://one:8000")
    assert servers.memory.sampling == {} and servers.memory.cache_tokens is None


def test_memory_while_vllm_samples_as_measured() -> None:
    """14B on an H200: 96.9 GiB with the graphs for steps of up to 2,048 tokens, 91.4 without."""
    large = plan_for(engine="vllm").memory
    own = plan_for(engine="vllm", vllm_engine_args='{"max_cudagraph_capture_size": 512}').memory
    assert large.sampling_peak / GIB == pytest.approx(96.9, rel=0.02)
    assert own.sampling_peak / GIB == pytest.approx(91.4, rel=0.02) and own.sampling.keys() == {"vLLM"}
    for gpu, captured in (("A100-80", True), ("L40S", False)):
        memory = plan_for(gpu, engine="vllm", model="4B").memory
        assert ("CUDA graphs" in memory.sampling) is captured


def test_vllm_must_hold_its_context_window() -> None:
    made = plan_for("A100-80", engine="vllm")
    assert not made.memory.fits and made.memory.peak < made.memory.usable
    assert "has room for 40,185 tokens of 40,960; try VLLM_GPU_MEMORY_UTILIZATION=0.5" in made.verdict
    assert plan_for("A100-80", engine="vllm", max_model_len=39936).memory.fits
    # 0.45 of 23.5 GiB, less weights of 8,044,936,192 bytes and 2 GiB, at 147,456 bytes a token: 7,883 tokens.
    small = plan_for("4090", engine="vllm", model="4B")
    assert small.memory.cache_tokens == 7883 and small.ways[0].text == "MAX_MODEL_LEN=7168"
    # The longest of 5,120 tokens on average is 1.4 times as long, 7,168; of 5,121 it is 7,169.
    for tokens, offered in ((5120, True), (5121, False)):
        ways = plan_for("4090", engine="vllm", model="4B", tokens=tokens).ways
        assert any(way.text.startswith("MAX_MODEL_LEN") for way in ways) is offered


TINY = Shape("qwen3", 64, 96, 2, 4, 2, 16, 128, True, 4096)


def saved_bytes(layers: int, dtype: Any, tokens: int, dropout: float) -> int:
    """Bytes of the storages that autograd saves in a forward pass, weights left out."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=TINY.hidden, intermediate_size=TINY.ffn, num_hidden_layers=layers, vocab_size=TINY.vocab,
        num_attention_heads=TINY.heads, num_key_value_heads=TINY.kv_heads, head_dim=TINY.head_dim,
        tie_word_embeddings=True,
    )  # fmt: skip
    lora = LoraConfig(r=3, lora_dropout=dropout, target_modules=list(ALL), task_type="CAUSAL_LM")
    model = get_peft_model(Qwen3ForCausalLM(config).to(dtype).requires_grad_(False), lora).train()
    assert enable_packing(model) is None
    ids = torch.arange(2 * (tokens // 2 + 1)).view(2, -1) % TINY.vocab
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -1] = True
    weights = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.get_base_model().base_model(**packed_inputs(pack(ids, mask)))
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize(("name", "itemsize"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformers_layers_keep_what_is_planned(name: str, itemsize: int, dropout: float) -> None:
    dtype = getattr(torch, name)
    of_a_layer = saved_bytes(3, dtype, 64, dropout) - saved_bytes(2, dtype, 64, dropout)
    layout = Layout("transformers", itemsize, 3, ALL, dropout=dropout > 0, on_gpu=False)
    assert of_a_layer == 64 * kept_bytes(TINY, layout, Keep.ALL)
    assert kept_bytes(TINY, layout, Keep.INPUT) == 64 * itemsize


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
