"""Shapes: parameters worked out by hand, stated by the hub, and counted in models that transformers builds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from emailrl.base.errors import EmailRLError
from emailrl.model.layout import (
    Keep,
    attends_fully,
    choose_keep,
    micro_batch_cap,
    recomputes,
    wants_fused,
    why_not_packed,
)
from emailrl.model.shape import KNOWN, find_shape, read_shape
from emailrl.settings import TrainingSettings


def test_parameters_of_qwen3_0_6b_by_hand() -> None:
    """q and o 1024·2048 each, k and v 1024·1024, three of 1024·3072, norms 2·1024 + 2·128; 28 times; one embedding."""
    shape = KNOWN["qwen3-0.6b"]
    assert shape.layer_matrix == 2 * 2_097_152 + 2 * 1_048_576 + 3 * 3_145_728 == 15_728_640
    assert shape.parameters == 28 * (15_728_640 + 2304) + 155_582_464 + 1024 == 596_049_920
    # 28 layers · rank 16 · (q 3072 + k 2048 + v 2048 + o 3072 + gate 4096 + up 4096 + down 4096)
    assert shape.lora_parameters(16, "all-linear") == 28 * 16 * 22_528 == 10_092_544
    assert shape.lora_parameters(8, "q_proj, v_proj") == 28 * 8 * (3072 + 2048) == 1_146_880
    assert shape.cache_bytes(2) == 114_688  # 28 layers · (8 · 128 keys + as many values) · 2 bytes


def test_parameters_are_those_that_the_hub_states() -> None:
    assert {name: shape.parameters for name, shape in KNOWN.items()} == {
        "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
        "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    }  # fmt: skip


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_parameters_are_those_of_the_model_that_transformers_builds(tmp_path: Path, family: str) -> None:
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


def test_common_names_need_no_config_and_others_are_not_taken_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("emailrl.model.shape.check_hub", lambda _: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda one, *_, **__: asked.append(one) or "none.json")
    for name, known in (
        ("OpenPipe/Qwen3-14B-Instruct", "qwen3-14b"), ("unsloth/Qwen3-14B-Base", "qwen3-14b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"), ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ):  # fmt: skip
        assert find_shape(name) == KNOWN[known]
    others = ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-VL-4B", "Qwen/Qwen3-14B-AWQ", "Qwen/Qwen2.5-9B"]
    for name in others:
        with pytest.raises(EmailRLError, match="cannot be read"):
            find_shape(name)
    assert asked == others


def test_nano_and_folders_are_read(tmp_path: Path) -> None:
    nano = find_shape("nano")
    assert (nano.parameters, nano.cache_bytes(4)) == (5_640_192, 12_288)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(EmailRLError, match="describes a mixtral model"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 4}))
    with pytest.raises(EmailRLError, match="hidden_size"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": -16}, "head_dim is -16"),
        ({"vocab_size": 0}, "vocab is 0"),
        ({"num_key_value_heads": 3}, "4 heads over 3 of keys"),
        ({"hidden_size": "wide"}, "wide"),
    ],
)
def test_sizes_that_no_model_has(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    sizes = {
        "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    }  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizes))
    assert read_shape(config).parameters > 0
    config.write_text(json.dumps(sizes | changes))
    with pytest.raises(EmailRLError, match=f"has a missing or invalid size: .*{reason}"):
        read_shape(config)


def test_the_cap_of_a_micro_batch() -> None:
    assert micro_batch_cap(TrainingSettings(), on_gpu=True, hidden=1024) == 16384
    assert micro_batch_cap(TrainingSettings(), on_gpu=True, hidden=1023) == 131072
    for hidden in (64, 5120):
        assert micro_batch_cap(TrainingSettings(), on_gpu=False, hidden=hidden) == 2048
        assert micro_batch_cap(TrainingSettings(max_tokens_per_micro_batch=100), on_gpu=True, hidden=hidden) == 100


def test_windows_and_recurrence_are_seen_in_the_config() -> None:
    full, window = "full_attention", {"sliding_window": 4096}
    for config in (
        {},
        {"sliding_window": None},
        window | {"use_sliding_window": False},
        window | {"layer_types": [full]},
    ):
        assert attends_fully(config)
    for config in window, {"layer_types": [full, "sliding_attention"]}, {"layer_types": ["linear_attention"]}:
        assert not attends_fully(config)


def test_what_packs_is_fused_on_a_gpu_and_other_layers_know_no_middle() -> None:
    assert why_not_packed("sdpa", fully=True) is None
    assert "not eager" in str(why_not_packed("eager", fully=True)) and why_not_packed("sdpa", fully=False)
    for packs, on_gpu, wanted in ((True, True, True), (True, False, False), (False, True, False)):
        assert wants_fused(TrainingSettings(), packs=packs, on_gpu=on_gpu) is wanted
    assert not wants_fused(TrainingSettings(fused_layers=False), packs=True, on_gpu=True)
    for setting, on_cpu, on_gpu in (("on", 1, 1), ("selective", 1, 1), ("auto", 0, 1), ("off", 0, 0)):
        assert [recomputes(setting, on_gpu=place) for place in (False, True)] == [on_cpu, on_gpu]


def test_auto_keeps_the_most_that_nine_tenths_of_the_free_memory_hold() -> None:
    sizes = {Keep.INPUT: 100, Keep.ATTENTION: 200, Keep.HIDDEN: 500, Keep.ALL: 900}
    found = [choose_keep("auto", free, sizes) for free in (0, 222, 223, 556, 1000, math.inf)]
    assert found == [Keep.INPUT, Keep.INPUT, Keep.ATTENTION, Keep.HIDDEN, Keep.ALL, Keep.ALL]
    always = [choose_keep(one, 0, sizes) for one in ("on", "selective", "off")]
    assert always == [Keep.INPUT, Keep.ATTENTION, Keep.ALL]


def test_deciding_needs_no_torch() -> None:
    modules = "emailrl.model.layout, emailrl.engines.budget, emailrl.training.algorithms"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
