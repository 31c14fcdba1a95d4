"""When in-process vLLM sleeps, by hand-computed sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stand_in import settings_for
from tiny import make_model

from emailrl.engines.vllm.arguments import Trainer, graph_bytes, sleeps
from emailrl.policy.fused.model import enable_fused
from emailrl.policy.load import load_policy
from emailrl.settings import load_settings

GIB = 2**30


@pytest.mark.parametrize(
    ("overrides", "card", "asleep"),
    [
        # 10 + 1 + 34 GiB of the trainer, and 45 of 100 for vLLM: 90 in all, which may be 90 % of the GPU.
        ({}, 100 * GIB, False),
        ({}, 99 * GIB, True),
        ({"vllm_gpu_memory_utilization": 0.46}, 100 * GIB, True),
        # vLLM takes 10 GiB of weights, 2 of work and its cache: 45 with 33.
        ({"kv_cache_gib": 33}, 100 * GIB, False),
        ({"kv_cache_gib": 34}, 100 * GIB, True),
        ({"kv_cache_gib": 38, "vllm_tensor_parallel_size": 2}, 100 * GIB, False),
        ({"vllm_enable_sleep": True}, 1000 * GIB, True),
        ({"vllm_enable_sleep": "off"}, 10 * GIB, False),
    ],
)
def test_auto_sleeps_unless_both_fit(tmp_path: Path, overrides: dict[str, Any], card: int, asleep: bool) -> None:
    trainer = Trainer(weights=10 * GIB, adapter=GIB, activations=34 * GIB)
    assert sleeps(settings_for(tmp_path, **overrides), trainer, card) is asleep


def test_a_trainer_whose_needs_are_unknown_gets_the_gpu(tmp_path: Path) -> None:
    assert sleeps(settings_for(tmp_path), None, 1000 * GIB)
    assert not sleeps(settings_for(tmp_path, vllm_enable_sleep="off"), None, 1000 * GIB)


def test_a_trainer_is_counted_from_its_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    given = {"model_name": str(folder), "lora_rank": 4, "max_tokens_per_micro_batch": 100, "dtype": "fp32"}
    settings = load_settings(given, environ={}, cwd=tmp_path)
    policy = load_policy(settings, trainable=True)
    assert Trainer.of(policy, settings) is None  # its layers are not fused on a CPU
    assert enable_fused(policy.model, "auto") is None
    trainer = Trainer.of(policy, settings)
    assert trainer is not None
    config = policy.model.config
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    attention = (hidden + queries) + 2 * (hidden + keys) + (queries + hidden)
    adapter = config.num_hidden_layers * 4 * (attention + 3 * (hidden + ffn))
    base = sum(value.numel() for name, value in policy.model.named_parameters() if "lora_" not in name)
    # Everything kept: the state twice, queries twice, keys, values, gate and up; and one layer at work.
    kept = config.num_hidden_layers * (2 * hidden + 2 * queries + 2 * keys + 2 * ffn)
    at_work = 4 * ffn + 4 * (queries + hidden) + 4 * keys
    assert trainer == Trainer(
        4 * base, 24 * adapter, 100 * 4 * (kept + at_work), graph_bytes(layers=config.num_hidden_layers, hidden=hidden)
    )
