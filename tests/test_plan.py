"""The plan: parameters and bytes worked out by hand, tensors counted in real models, peaks measured on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emailrl import checkpoints
from emailrl.checkpoints import Metadata
from emailrl.cli.app import app
from emailrl.errors import EmailRLError, UsageError
from emailrl.plan import Plan, find_device, make_plan, measure_run, this_machine
from emailrl.plan.activations import Layout, head_bytes, kept_bytes, work_bytes
from emailrl.plan.gpus import GIB, Device
from emailrl.plan.memory import keep_of, training_bytes
from emailrl.plan.time import prefix_share, scoring_passes, training_flops
from emailrl.plan.tokens import Tokens
from emailrl.policy.layout import Keep
from emailrl.policy.shape import KNOWN, Shape, find_shape, read_shape
from emailrl.settings import Settings, load_settings

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
H200 = find_device("H200")


def settings_with(tmp_path: Path, **values: Any) -> Settings:
    return load_settings(values, cwd=tmp_path, environ={})


def plan_for(tmp_path: Path, gpu: str = "H200", **values: Any) -> Plan:
    return make_plan(settings_with(tmp_path, **values), find_device(gpu))


# -- parameters


def test_parameters_of_qwen3_0_6b_by_hand() -> None:
    """q and o 1024·2048 each, k and v 1024·1024, three of 1024·3072, norms 2·1024 + 2·128; 28 times; one embedding."""
    shape = KNOWN["qwen3-0.6b"]
    assert shape.layer_matrix == 2 * 2_097_152 + 2 * 1_048_576 + 3 * 3_145_728 == 15_728_640
    assert shape.parameters == 28 * (15_728_640 + 2304) + 155_582_464 + 1024 == 596_049_920
    # 28 layers · rank 16 · (q 3072 + k 2048 + v 2048 + o 3072 + gate 4096 + up 4096 + down 4096)
    assert shape.lora_parameters(16, "all-linear") == 28 * 16 * 22_528 == 10_092_544
    assert shape.lora_parameters(8, "q_proj, v_proj") == 28 * 8 * (3072 + 2048) == 1_146_880
    assert shape.cache_bytes(2) == 114_688  # 28 layers · (8 · 128 keys + as many values) · 2 bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
    ],
)
def test_parameters_are_those_that_the_hub_states(name: str, parameters: int) -> None:
    assert KNOWN[name].parameters == parameters


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_parameters_are_those_of_the_model_that_transformers_builds(tmp_path: Path, family: str) -> None:
    import torch
    import transformers

    sizes = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 20, "vocab_size": 90, "tie_word_embeddings": family == "Llama",
    }  # fmt: skip
    biased = {"attention_bias": True} if family == "Llama" else {}
    if family == "Qwen2":  # which has no head_dim of its own
        sizes["hidden_size"] = 80
    config = getattr(transformers, f"{family}Config")(**sizes, **biased)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    assert read_shape(tmp_path / "config.json").parameters == sum(one.numel() for one in model.parameters())


def test_four_bits_are_for_the_projections_alone() -> None:
    """0.5 byte and 1/64 + 1/4096 of scales for 440,401,920 weights; 155,648,000 others stay at 2 bytes."""
    shape = KNOWN["qwen3-0.6b"]
    assert shape.weight_bytes(2) == 1_192_099_840
    assert shape.weight_bytes(2, four_bit=True) == 220_200_960 + 6_881_280 + 107_520 + 2 * 155_648_000 == 538_485_760


# -- names


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("OpenPipe/Qwen3-14B-Instruct", "qwen3-14b"),
        ("unsloth/Qwen3-14B-Base", "qwen3-14b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ],
)
def test_common_names_need_no_config(monkeypatch: pytest.MonkeyPatch, name: str, known: str) -> None:
    monkeypatch.setattr("emailrl.policy.shape._cached_config", lambda _: None)
    assert find_shape(name) == KNOWN[known]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-VL-4B", "Qwen/Qwen3-14B-AWQ", "Qwen/Qwen2.5-9B"])
def test_other_names_are_not_taken_for_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = []
    monkeypatch.setattr("emailrl.policy.shape._cached_config", lambda _: None)
    monkeypatch.setattr("emailrl.policy.shape._fetch_config", lambda one: asked.append(one) or Path("none.json"))
    with pytest.raises(EmailRLError, match="cannot be read"):
        find_shape(name)
    assert asked == [name]


def test_nano_and_folders_are_read(tmp_path: Path) -> None:
    nano = find_shape("nano")
    assert (nano.parameters, nano.cache_bytes(4)) == (5_640_192, 12_288)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(EmailRLError, match="of type mixtral"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 4}))
    with pytest.raises(EmailRLError, match="hidden_size"):
        find_shape(str(tmp_path))


# -- what a layer keeps, counted

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

    from emailrl.policy.packing import pack

    ids = torch.arange(2 * (tokens // 2 + 1)).view(2, -1) % TINY.vocab
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -1] = True
    return pack(ids, mask)


def saved_bytes(layers: int, dtype: Any, tokens: int, dropout: float) -> int:
    """Bytes of the storages that autograd saves in a forward pass, weights left out."""
    import torch

    from emailrl.policy.packing import enable_packing, packed_inputs

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

    from emailrl.policy.fused.layer import FusedLayer, LayerWeights

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


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "qwen3-14b"])
def test_what_is_kept_is_what_the_trainer_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """At every eighth of the memory that keeping all takes, and somewhat more than is kept is reckoned with."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from emailrl.policy.fused.model import FusedBackbone

    shape, settings, layout = KNOWN[name], settings_with(tmp_path), Layout("fused", 2, 16, ALL)
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
        assert keep_of(shape, settings, layout, 1000, free) == backbone.keep_for(1000, torch.device("cuda"))
    assert chosen == set(Keep)
    for keep in Keep:
        counted = shape.layers * kept_bytes(shape, layout, keep) + work_bytes(shape, layout, keep)
        assert 0.85 * backbone.bytes_for(1, keep) < counted < 0.98 * backbone.bytes_for(1, keep)


def test_auto_keeps_what_fits(tmp_path: Path) -> None:
    shape, settings, layout = KNOWN["qwen3-4b"], settings_with(tmp_path), Layout("fused", 2, 16, ALL)
    # 36 layers of 34,816 numbers and 69,632 at work make 2,646,016 bytes a token; nine tenths of the free memory count.
    enough = int(1000 * 2_646_016 / 0.9) + 1
    assert keep_of(shape, settings, layout, 1000, enough) == Keep.ALL
    assert keep_of(shape, settings, layout, 1000, enough - 1000) == Keep.HIDDEN
    assert keep_of(shape, settings, layout, 1000, 0) == Keep.INPUT
    off = settings_with(tmp_path, gradient_checkpointing="off")
    assert keep_of(shape, off, layout, 1000, 0) == Keep.ALL


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
def test_a_policy_is_loaded_as_it_is_planned(tmp_path: Path, values: dict[str, Any]) -> None:
    from emailrl.policy.fused.model import fused_backbone
    from emailrl.policy.load import load_policy
    from emailrl.policy.packing import shares_prefixes
    from emailrl.training.mix import resolve
    from emailrl.training.step.update import Updater

    settings = settings_with(tmp_path, model_name="nano", emailrl_device="cpu", **values)
    policy = load_policy(settings, trainable=True)
    memory = make_plan(settings, Device("CPU", 64.0, 0.1, 2e10, is_gpu=False)).memory
    assert (memory.layout.layers == "fused") is (fused_backbone(policy.model) is not None)
    assert (memory.keep == Keep.INPUT) is policy.model.get_base_model().is_gradient_checkpointing
    assert memory.layout.shares is shares_prefixes(policy.model)
    assert memory.layout.itemsize == policy.dtype.itemsize
    assert memory.micro_batch_tokens == Updater(policy, resolve(settings), settings).scorer.max_tokens


PEAK_ON_A_CPU = """
import re, torch
from emailrl.policy.load import load_policy
from emailrl.policy.logprobs import token_logprobs
from emailrl.settings import Settings

torch.set_num_threads(1)
policy = load_policy(Settings.model_validate({"model": {"name": "nano", "device": "cpu"}}), trainable=True)
policy.model.train()


def step(rows, width):
    ids = torch.randint(0, 2000, (rows, width + 1))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -width // 4 :] = True
    token_logprobs(policy.model, ids, mask, entropy=True).logprobs.sum().backward()
    # Not ru_maxrss: Linux lets a process begin with the peak of the one that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024


before = step(2, 16)
print(step(4, 512) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets glibc's allocator so that freed blocks leave the process")
def test_the_peak_of_nano_on_this_cpu(tmp_path: Path) -> None:
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PEAK_ON_A_CPU], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shape, layout = find_shape("nano"), Layout("transformers", 4, 16, ALL, on_gpu=False, fused_head=False)
    tokens = Tokens(512, 512, 512, 0.25, 4, 1, 1, 1.0, 1, "given")
    planned = training_bytes(shape, layout, Keep.ALL, 2048, tokens)
    assert planned["activations"] == 2048 * 6 * kept_bytes(shape, layout, Keep.ALL)
    assert int(done.stdout) == pytest.approx(planned["activations"] + planned["backward pass"], rel=0.15)


def test_auto_leaves_the_card_its_context(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-4B")
    resident = sum(make_plan(settings, H200).memory.resident.values())
    needed = resident + 0.6 * GIB + 16384 * 2_646_016 / 0.9
    for room, keep in ((1e6, Keep.ALL), (-1e6, Keep.HIDDEN)):
        card = replace(H200, gib=(needed + room) / GIB)
        assert make_plan(settings, card).memory.keep == keep


# -- measured on an H200: docs/gpu.md


@pytest.mark.parametrize(
    ("model", "values", "peak", "seconds"),
    [
        ("Qwen3-0.6B", {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": 16384}, 13.24, 2.33),
        ("Qwen3-0.6B", {"gradient_checkpointing": "on", "max_tokens_per_micro_batch": 4096}, 1.833, 5.56),
        ("Qwen3-0.6B", {"gradient_checkpointing": "on", "packing": False}, 3.856, 9.52),
        ("Qwen3-0.6B", {"backend": "unsloth"}, 2.210, 3.69),
        ("Qwen3-4B", {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": 16384}, 44.38, 8.42),
        ("Qwen3-4B", {"gradient_checkpointing": "selective", "max_tokens_per_micro_batch": 8192}, 12.32, 10.42),
        ("Qwen3-4B", {"gradient_checkpointing": "on", "max_tokens_per_micro_batch": 4096}, 9.334, 11.88),
        ("Qwen3-4B", {"gradient_checkpointing": "on", "fused_layers": False}, 14.73, 23.77),
        ("Qwen3-4B", {"gradient_checkpointing": "on", "packing": False}, 15.00, 24.16),
        ("Qwen3-4B", {"backend": "unsloth"}, 9.827, 12.69),
        ("Qwen3-14B", {"gradient_checkpointing": "auto", "max_tokens_per_micro_batch": 16384}, 94.63, 20.70),
        ("Qwen3-14B", {"gradient_checkpointing": "selective", "max_tokens_per_micro_batch": 8192}, 35.6, 27.00),
        ("Qwen3-14B", {"gradient_checkpointing": "on", "max_tokens_per_micro_batch": 4096}, 30.96, 28.56),
        ("Qwen3-14B", {"gradient_checkpointing": "on", "packing": False}, 41.85, 50.49),
        ("Qwen3-14B", {"backend": "unsloth"}, 31.53, 31.82),
        ("Qwen3-4B", {"gradient_checkpointing": "auto", "prefix_sharing": True}, 46.5, 7.71),
    ],
)
def test_measured_peaks_and_seconds_are_planned(
    tmp_path: Path, model: str, values: dict[str, Any], peak: float, seconds: float
) -> None:
    """48 trajectories of 3,763 tokens on average, 23.6 % trained; the benchmark has neither optimizer nor sampler."""
    given = {"per_device_train_batch_size": 8, "num_generations": 6, "model_name": f"Qwen/{model}"}
    made = make_plan(
        settings_with(tmp_path, **(given | {"prefix_sharing": False} | values)),
        H200,
        tokens_per_trajectory=3763,
        trainable_share=0.236,
    )
    resident = made.memory.resident
    planned = made.memory.training_peak - resident["optimizer"] - resident["sampler's copy"]
    assert planned / GIB == pytest.approx(peak, rel=0.08)
    assert made.seconds.train == pytest.approx(seconds, rel=0.08)


# -- the whole of it


def test_resident_memory_by_hand(tmp_path: Path) -> None:
    memory = plan_for(tmp_path, model_name="Qwen/Qwen3-0.6B").memory
    assert memory.resident["weights"] == 1_192_099_840
    assert memory.resident["adapter"] == 10 * 10_092_544  # float32 weights and gradients, a bf16 copy
    assert memory.resident["optimizer"] == 8 * 10_092_544
    # Below a billion parameters the engine samples from merged projections of its own.
    assert memory.resident["sampler's copy"] == 2 * 28 * 15_728_640
    assert plan_for(tmp_path).memory.resident["sampler's copy"] == 4 * 64_225_280  # the 14B shape: the adapter again


def test_the_cache_of_the_in_process_engine(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, max_batch_trajectories=10)
    memory = make_plan(settings, H200, tokens_per_trajectory=1000).memory
    # Ten trajectories of 32 blocks of 32 tokens, a quarter more for its growth.
    assert memory.sampling["KV cache"] == 10 * 1024 * 163_840 * 5 // 4
    assert memory.at_once == 10
    # 79.1 GiB less 0.6 of CUDA's and what stays, of which the cache takes four fifths: 41 trajectories of 3,800.
    full = plan_for(tmp_path, "H100").memory
    free = int(79.1 * GIB) - int(0.6 * GIB) - sum(full.resident.values())
    room = int(0.8 * free * 80 / (81 * 32 * 163_840)) - 1  # keys and values of 40 layers; a block for the padding
    assert full.cache_tokens == 32 * room and full.at_once == 64 == min(64, 32 * room // 3800)
    few = plan_for(tmp_path, "H100", kv_cache_gib=2).memory
    assert few.sampling["KV cache"] == 2 * GIB and few.at_once == 3
    none = plan_for(tmp_path, "H100", kv_cache_gib=0.5)
    assert "does not fit: the key-value cache has room for 3,200 tokens of 5,320" in none.verdict
    assert none.verdict.endswith("; try KV_CACHE_GIB=1")


def test_the_cache_leaves_room_for_the_forward_pass(tmp_path: Path) -> None:
    memory = plan_for(tmp_path, "4090", model_name="Qwen/Qwen3-8B").memory
    assert memory.sampling_peak == pytest.approx(memory.usable, abs=1)
    assert 0 < memory.at_once < 10


def test_vllm_shares_the_gpu(tmp_path: Path) -> None:
    made = plan_for(tmp_path, engine="vllm", model_name="Qwen/Qwen3-4B")
    share = int(0.45 * 139.8 * GIB)
    assert made.memory.sampling == {"vLLM": share}
    assert made.memory.cache_tokens == (share - 8_044_936_192 - 2 * GIB) // 147_456
    assert made.memory.training["vLLM"] < 2 * GIB
    awake = plan_for(tmp_path, engine="vllm", model_name="Qwen/Qwen3-4B", vllm_enable_sleep=False)
    assert awake.memory.training["vLLM"] == share
    servers = plan_for(tmp_path, engine="vllm", vllm_urls="http://one:8000")
    assert servers.memory.sampling == {} and servers.memory.cache_tokens is None


def test_vllm_must_hold_its_context_window(tmp_path: Path) -> None:
    made = plan_for(tmp_path, "A100-80", engine="vllm")
    assert not made.memory.fits and made.memory.peak < made.memory.usable
    assert "has room for 40,185 tokens of 40,960; try MAX_MODEL_LEN=39936" in made.verdict
    assert plan_for(tmp_path, "A100-80", engine="vllm", max_model_len=39936).memory.fits
    # 0.45 of 23.5 GiB, less weights of 8,044,936,192 bytes and 2 GiB, at 147,456 bytes a token: 7,883 tokens.
    small = make_plan(settings_with(tmp_path, engine="vllm", model_name="Qwen/Qwen3-4B"), find_device("4090"))
    assert small.memory.cache_tokens == 7883 and small.ways[0].text == "MAX_MODEL_LEN=7168"
    # The longest of 5,120 tokens on average is 1.4 times as long, 7,168; of 5,121 it is 7,169.
    settings = small.settings
    for tokens, offered in ((5120, True), (5121, False)):
        ways = make_plan(settings, find_device("4090"), tokens_per_trajectory=tokens).ways
        assert any("MAX_MODEL_LEN" in way.text for way in ways) is offered


def test_vllm_in_the_same_process_is_noted_where_it_is_faster(tmp_path: Path) -> None:
    made = plan_for(tmp_path)
    other = plan_for(tmp_path, engine="vllm")
    [way] = made.faster
    assert way.text == "vLLM in the same process (--engine vllm)"
    assert way.run_seconds == other.run_seconds < made.run_seconds / 4
    assert way.peak == other.memory.peak
    [note] = [one for one in made.notes if "--engine vllm" in one]
    assert note.endswith("would take 111 min instead of 9.1 h")
    paid = make_plan(made.settings, H200, num_gpus=4, price=3.0)
    assert any("--engine vllm" in one and "and cost 22." in one for one in paid.notes) and len(paid.faster) == 2
    [narrow] = plan_for(tmp_path, "H100").faster
    assert narrow.text == "vLLM in the same process (MAX_MODEL_LEN=38912 --engine vllm)"
    narrowed = plan_for(tmp_path, "H100", engine="vllm", max_model_len=38912)
    assert narrowed.memory.fits and narrow.run_seconds == narrowed.run_seconds
    slower = plan_for(tmp_path, "4090", model_name="Qwen/Qwen3-4B")  # few trajectories at once beside the weights
    assert slower.memory.fits and slower.faster == []
    assert other.faster == plan_for(tmp_path, "CPU", model_name="nano").faster == []


def test_the_changes_named_are_enough(tmp_path: Path) -> None:
    values = {"gradient_checkpointing": "off", "model_name": "Qwen/Qwen3-8B"}
    made = plan_for(tmp_path, "H100", max_tokens_per_micro_batch=32768, **values)
    assert not made.memory.fits and made.verdict.endswith("; try MAX_TOKENS_PER_MICRO_BATCH=16384")
    ways = {way.text: way for way in made.ways}
    assert {"MAX_TOKENS_PER_MICRO_BATCH=16384", "GRADIENT_CHECKPOINTING=selective", "--gpu H200"} <= set(ways)
    turned = plan_for(tmp_path, "H100", max_tokens_per_micro_batch=16384, **values)
    assert turned.memory.fits and ways["MAX_TOKENS_PER_MICRO_BATCH=16384"].peak == turned.memory.peak


def test_changes_that_only_together_are_enough(tmp_path: Path) -> None:
    made = plan_for(tmp_path, "4090", model_name="Qwen/Qwen3-14B")
    values = dict(one.lower().split("=") for one in made.ways[0].text.split())
    assert len(values) > 1 and plan_for(tmp_path, "4090", model_name="Qwen/Qwen3-14B", **values).memory.fits


def test_a_model_that_no_setting_makes_fit(tmp_path: Path) -> None:
    made = plan_for(tmp_path, "T4", model_name="Qwen/Qwen2.5-72B", dtype="fp32")
    assert made.ways == [] and made.verdict.endswith("choose a smaller model")


def test_tokens_and_steps(tmp_path: Path) -> None:
    values = {"per_device_train_batch_size": 8, "num_generations": 6, "max_turns": 4, "max_tokens": 1000}
    tokens = plan_for(tmp_path, **values, max_steps=50, eval_steps=10).tokens
    assert (tokens.trajectories, tokens.per_step, tokens.steps, tokens.evaluations) == (48, 48 * 3800, 50, 6)
    assert tokens.most_per_trajectory == 900 + 4 * 1000 + 3 * 1700
    rollout = plan_for(tmp_path, **values, mode="rollout", train_dataset_size=80, num_train_epochs=2).tokens
    assert rollout.steps == 20
    with pytest.raises(UsageError, match="longer than the model's context of 40960"):
        make_plan(settings_with(tmp_path), H200, tokens_per_trajectory=50_000)


def test_training_operations_by_hand() -> None:
    """One layer of one weight each way: 4 operations a weight, attention 3·2·T, head 4 a trained token's product."""
    shape = Shape("llama", 1, 1, 1, 1, 1, 1, 10, True, 100)
    tokens = Tokens(10, 10, 10, 0.5, 2, 1, 1, 1.0, 1, "given")
    layout = Layout("fused", 2, 16, ALL)
    # 7 weights; 20 tokens: 4·7 + 6·10 a token, and 4·10 for each of the 10 trained.
    assert training_flops(shape, layout, Keep.ALL, tokens) == 20 * (28 + 60) + 10 * 40
    # Again: attention, and all products but the last.
    assert training_flops(shape, layout, Keep.INPUT, tokens) == 20 * (28 + 60 + 12 + 20) + 10 * 40


def test_prompts_that_a_group_shares_by_hand(tmp_path: Path) -> None:
    """Four trajectories of 4,096 tokens in a micro-batch read a fifth of them once instead of four times."""

    def made(**values: Any) -> Plan:
        given = {"per_device_train_batch_size": 8, "num_generations": 6, "model_name": "Qwen/Qwen3-4B"} | values
        return make_plan(settings_with(tmp_path, **given), H200, tokens_per_trajectory=4096, trainable_share=0.25)

    shared, apart = made(), made(prefix_sharing=False)
    assert prefix_share(shared.settings, shared.memory, shared.tokens) == pytest.approx(0.2 * 3 / 4)
    assert shared.seconds.train == pytest.approx(apart.seconds.train * (1 - 0.55 * 0.15))
    assert shared.seconds.score == pytest.approx(apart.seconds.score * (1 - 0.55 * 0.15))
    for other in (
        made(max_tokens_per_micro_batch=4096), made(lora_dropout=0.1), made(packing=False), made(backend="unsloth"),
    ):  # fmt: skip
        assert prefix_share(other.settings, other.memory, other.tokens) == 0
    simple = made(mode="simple", max_tokens_per_micro_batch=65_536)  # a prompt and a quarter of completion
    assert prefix_share(simple.settings, simple.memory, simple.tokens) == pytest.approx(0.75 * 5 / 6)


def test_time_and_cost(tmp_path: Path) -> None:
    settings = settings_with(tmp_path, max_steps=10, eval_steps=100)
    made = make_plan(settings, H200, price=3.6, num_gpus=2)
    seconds = made.seconds
    of_steps = 10 * (seconds.rollout + seconds.score + seconds.train)
    assert seconds.run == pytest.approx(of_steps + 2 * seconds.evaluation)  # before the first step, after the last
    assert made.cost == pytest.approx(seconds.run * 2 * 3.6 / 3600)
    halved = make_plan(settings, H200, utilization=seconds.utilization / 2).seconds
    assert halved.train == pytest.approx(2 * seconds.train) and halved.rollout == pytest.approx(seconds.rollout)
    assert make_plan(settings_with(tmp_path, beta=0), H200).seconds.score == 0


def test_seconds_of_sampling_by_hand(tmp_path: Path) -> None:
    values = {"engine": "vllm", "model_name": "Qwen/Qwen3-4B", "eval_dataset_size": 12}
    made = make_plan(settings_with(tmp_path, **values), H200, tokens_per_trajectory=4000)
    # 12 trajectories read 3,000 tokens each, 2 · 36 · 100,925,440 operations a token, at 791.2 TFLOP/s; a fifth is the
    # prompt, which the three of a group read once. A thousand times 36 layers of 0.53 ms.
    a_token = 7_266_631_680 / 791.2e12
    assert made.seconds.rollout == pytest.approx(36_000 * (13 / 15) * a_token + 1000 * 36 * 0.53e-3, rel=1e-5)
    assert made.seconds.evaluation == pytest.approx(36_000 * a_token + 1000 * 36 * 0.53e-3, rel=1e-5)
    # A card whose memory is slower waits for weights and half-full caches, at 0.7 of its bandwidth.
    slow = replace(H200, bandwidth=0.6e12)
    moving = (8_044_936_192 + 12 * 2000 * 147_456) / (0.7 * 0.6e12)
    waiting = make_plan(settings_with(tmp_path, **values), slow, tokens_per_trajectory=4000).seconds
    assert waiting.evaluation == pytest.approx(36_000 * a_token + 1000 * moving, rel=1e-5)
    servers = settings_with(tmp_path, **values, vllm_urls="http://one:8000,http://two:8000")
    assert make_plan(servers, H200, tokens_per_trajectory=4000, num_gpus=3).seconds.rollout == pytest.approx(
        made.seconds.rollout / 2
    )


@pytest.mark.parametrize(
    ("model", "values", "tokens", "sampled", "seconds"),
    [
        ("Qwen3-0.6B", {"engine": "vllm"}, 3000, 480, 7.36),
        ("Qwen3-0.6B", {"engine": "vllm", "vllm_enforce_eager": True}, 3000, 480, 21.9),
        ("Qwen3-0.6B", {}, 3000, 480, 30.1),
        ("Qwen3-4B", {"engine": "vllm"}, 3000, 480, 10.5),
        ("Qwen3-14B", {"engine": "vllm"}, 3822, 1101, 26.2),
    ],
)
def test_measured_sampling(
    tmp_path: Path, model: str, values: dict[str, Any], tokens: int, sampled: int, seconds: float
) -> None:
    """48 trajectories of five turns on an H200."""
    given = {"per_device_train_batch_size": 8, "num_generations": 6, "model_name": f"Qwen/{model}"} | values
    made = make_plan(
        settings_with(tmp_path, **given), H200, tokens_per_trajectory=tokens, trainable_share=sampled / tokens
    )
    assert made.seconds.rollout == pytest.approx(seconds, rel=0.06)


@pytest.mark.parametrize(
    ("values", "passes"),
    [
        ({}, 1),
        ({"beta": 0}, 0),
        ({"update_epochs": 2}, 2),
        ({"num_mini_batches": 2, "beta": 0}, 1),
        ({"algorithm": "rloo"}, 2),  # the KL in the reward needs the old log-probabilities
        ({"algorithm": "ppo", "beta": 0}, 1),
    ],
)
def test_passes_before_an_update(tmp_path: Path, values: dict[str, Any], passes: int) -> None:
    assert scoring_passes(settings_with(tmp_path, **values)) == passes


# -- a run's own figures, and the command


def write_metrics(run: Path) -> None:
    common = {"seconds": {"rollout": 4.0, "update": 2.0, "total": 8.0}, "num_trajectories": 12}
    dropped = {"groups_low_std": 1, "trajectories_exception": 5}
    records = [
        common | {"total_tokens": 3000, "trainable_tokens": 600, "groups_kept": 3, "dropped": dropped},
        common | {"total_tokens": 0, "trainable_tokens": 0, "groups_kept": 0, "dropped": {"groups_low_std": 4}},
        common | {"total_tokens": 6000, "trainable_tokens": 1200, "groups_kept": 4, "dropped": {}}
        | {"seconds": {"rollout": 6.0, "update": 2.0, "evaluation": 2.0, "total": 12.0}},
    ]  # fmt: skip
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def test_a_run_says_what_its_tokens_and_seconds_were(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run")
    measured = measure_run(tmp_path / "run")
    assert measured.per_trajectory == round(9000 / (9 + 12))  # a quarter of the first step's groups was dropped
    assert measured.trainable_share == 0.2
    assert measured.seconds == {"evaluation": 1.0, "rollout": 5.0, "total": 10.0, "update": 2.0}
    made = make_plan(settings_with(tmp_path, max_steps=30), H200, measured=measured, price=1.0, here=True)
    assert made.tokens.per_trajectory == 429 and made.run_seconds == 300 and made.cost == pytest.approx(300 / 3600)
    with pytest.raises(UsageError, match=r"holds no metrics\.jsonl"):
        measure_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"total_tokens": 5, "seconds": {"total": 1.0}, "groups_kept": 1}\n')
    with pytest.raises(UsageError, match="lacks dropped, num_trajectories, trainable_tokens"):
        measure_run(tmp_path)


def write_checkpoint(run: Path, base_model: str) -> None:
    """A checkpoint that names its base model, and holds nothing else."""
    metadata = Metadata(
        run_id="r", kind="final", step=3, mode="masked", algorithm="grpo", base_model=base_model, lora={}, metrics={},
        settings={}, parent=None, seed=1, versions={}, database_fingerprint="", questions_fingerprint="",
        git_commit=None,
    )  # fmt: skip
    checkpoints.write_checkpoint(run / "final", metadata, lambda folder: None)


def test_a_run_is_planned_as_the_model_it_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    def said(*arguments: str, **environment: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["plan", "--run", "run", "--json", *arguments], env=environment)
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no GPU
    write_metrics(tmp_path / "run")
    bare = said("--max-steps", "30")
    assert bare["model"]["name"] == "OpenPipe/Qwen3-14B-Instruct"
    assert bare["notes"][0] == "no checkpoint of the run names its model: it is taken to be of " + bare["model"]["name"]
    write_checkpoint(tmp_path / "run", "nano")
    own = said("--max-steps", "30")
    assert own["model"]["name"] == "nano" and own["seconds"]["run"] == 300
    assert not any("the run is of" in note for note in own["notes"])
    for other in (said("--model", "Qwen/Qwen3-0.6B"), said(MODEL_NAME="Qwen/Qwen3-0.6B")):
        assert other["model"]["name"] == "Qwen/Qwen3-0.6B" and other["tokens"]["per_trajectory"] == 429
        assert other["seconds"]["measured"] is None  # they were nano's
        assert other["notes"][0] == (
            "the run is of nano, not of Qwen/Qwen3-0.6B: its tokens are taken, its seconds are not"
        )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    fits = CliRunner().invoke(app, ["plan", "--gpu", "H200", "--price", "3", "--json"])
    assert fits.exit_code == 0
    [line] = fits.stdout.splitlines()
    said = json.loads(line)
    assert said["fits"] and said["model"]["parameters"] == 14_768_307_200
    assert said["memory"]["peak"] == pytest.approx(
        max(said["memory"]["training_peak"], said["memory"]["sampling_peak"])
    )
    assert said["cost"] == pytest.approx(said["seconds"]["run"] * 3 / 3600, abs=0.01)
    write_metrics(tmp_path / "run")
    again = CliRunner().invoke(app, ["plan", "--model", "nano", "--run", "run", "--max-steps", "30", "--json"])
    assert json.loads(again.stdout)["seconds"]["run"] == 300
    elsewhere = CliRunner().invoke(app, ["plan", "--model", "nano", "--run", "run", "--gpu", "H200", "--json"])
    said = json.loads(elsewhere.stdout)
    assert said["seconds"]["measured"] is None and said["tokens"]["source"] == "measured"
    table = CliRunner().invoke(app, ["plan", "--gpu", "T4"])
    assert table.exit_code == 1
    assert "does not fit: " in table.stdout and "KV cache (sampling)" in table.stdout


@pytest.mark.parametrize(("gpus", "shown"), [("1", "1 GPU at 3.5 per GPU-hour"), ("8", "8 GPUs at 3.5 per GPU-hour")])
def test_the_cost_is_shown_with_what_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, shown: str
) -> None:
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plan", "--gpu", "H200", "--num-gpus", gpus, "--price", "3.5", "--preset", "quick"])
    [cost] = [line for line in done.stdout.splitlines() if line.startswith("  cost ")]
    assert cost.strip().split(maxsplit=2)[2] == shown


@pytest.mark.parametrize("price", [-1.0, float("inf"), float("nan")])
def test_a_price_is_a_number(tmp_path: Path, price: float) -> None:
    with pytest.raises(UsageError, match="--price"):
        make_plan(settings_with(tmp_path), H200, price=price)


def test_an_unknown_gpu_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Unknown GPU 'H20'") as raised:
        find_device("H20")
    assert "Known are B200, H200, H100, " in raised.value.hint and "did you mean" not in raised.value.hint.lower()
    assert "describe another: --gpu '24 GiB, 125 TFLOP/s, 0.6 TB/s'" in raised.value.hint
    for other in ("A10G", "GH200", "RTX 6000 Ada", "RTX 3090 Ti", "RTX 4090 48GB", "A100-20", ""):
        with pytest.raises(UsageError, match="Unknown GPU"):
            find_device(other)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("a100 80 GB", "A100-80"),
        ("A100", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("RTX4090", "4090"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("Tesla T4", "T4"),
    ],
)
def test_cards_are_known_by_the_names_that_nvidia_smi_prints(name: str, kind: str) -> None:
    assert find_device(name).name == kind


def test_a_card_can_be_described() -> None:
    card = find_device("24 GiB, 125 TFLOP/s, 0.6 TB/s")
    # Of the data sheet's FLOP/s large products reach four fifths.
    assert card == Device("a card of 24 GiB", 24.0, pytest.approx(100.0), pytest.approx(0.6e12))
    other = find_device("600 GB/s,0.125 PFLOPS, 24GB")
    assert (other.gib, other.tflops, other.bandwidth) == pytest.approx((24e9 / 2**30, 100.0, 0.6e12))
    for wrong in ("24 GiB, 125 TFLOP/s", "24 GiB, 125 TFLOP/s, 0 TB/s", "24, 125, 0.6", "24 GiB, 24 GiB, 0.6 TB/s"):
        with pytest.raises(UsageError, match="Unknown GPU"):
            find_device(wrong)


@pytest.mark.parametrize(
    ("driver", "mib", "kind"),
    [
        ("NVIDIA H200", 143_771, "H200"),
        ("NVIDIA H100 80GB HBM3", 81_559, "H100"),
        ("NVIDIA A100-SXM4-80GB", 81_920, "A100-80"),
        ("NVIDIA A100-PCIE-40GB", 40_960, "A100-40"),
        ("NVIDIA GeForce RTX 4090", 24_564, "4090"),
        ("Tesla T4", 15_360, "T4"),
    ],
)
def test_this_machines_gpu_is_known_by_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, mib: int, kind: str
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\necho '{driver}, {mib}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = this_machine()
    assert (found.name, found.gib, found.is_gpu) == (kind, mib / 1024, True)


def test_a_machine_without_a_gpu_is_its_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emailrl.policy.size.available_memory", lambda: 8 * GIB)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (this_machine().name, this_machine().gib) == ("CPU", 8.0)
    made = make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-14B"), this_machine())
    assert made.ways[-1].text == "--gpu L40S"
    odd = tmp_path / "nvidia-smi"
    odd.write_text("#!/bin/sh\necho 'Banana 9000, 1000'\n")
    odd.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UsageError, match="Banana 9000 is not in the table"):
        this_machine()
    odd.write_text("#!/bin/sh\necho 'NVIDIA H200 NVL, 143771'\n")
    kin = this_machine()
    assert (kin.name, kin.gib, kin.tflops) == ("NVIDIA H200 NVL", 143_771 / 1024, H200.tflops)
    assert kin.note == "NVIDIA H200 NVL is not in the table: its times are those of H200"


def test_planning_imports_nothing_heavy(tmp_path: Path) -> None:
    script = "from emailrl.cli.app import main; import sys; sys.argv = ['emailrl', 'plan', '--gpu', 'H200', '--json']\n"
    script += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    script += "print(sorted({'torch', 'transformers', 'peft', 'datasets', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
