"""What vLLM is started with: its arguments, whether it sleeps, and the CUDA graphs it captures; sizes by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stub import settings_for
from tiny import make_model

from emailrl.base.errors import UsageError
from emailrl.engines.vllm.arguments import (
    Trainer,
    as_flags,
    capture_sizes,
    check_vllm,
    engine_arguments,
    graph_bytes,
    lora_rank_limit,
    sleeps,
)
from emailrl.model.fused import enable_fused
from emailrl.model.policy import load_policy
from emailrl.settings import load_settings

GIB = 2**30


def arguments(folder: Path, overrides: dict[str, Any], **changes: Any) -> dict[str, Any]:
    given = {"model": "x", "dtype": "bfloat16", "lora_rank": 8, "on_gpu": True, "sleeps": True, "graphs": []}
    return engine_arguments(settings_for(folder, **overrides), **(given | changes))


def test_arguments_follow_the_settings(tmp_path: Path) -> None:
    overrides = {
        "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.3, "vllm_enforce_eager": True,
        "vllm_enable_prefix_caching": False, "max_model_len": 8192, "max_batch_trajectories": 48, "seed": 7,
    }  # fmt: skip
    assert arguments(tmp_path, overrides, model="/models/x", lora_rank=20) == {
        "model": "/models/x", "dtype": "bfloat16", "skip_tokenizer_init": True,
        "language_model_only": True, "seed": 7, "max_model_len": 8192,
        "max_num_seqs": 48, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.3, "enforce_eager": True,
        "enable_prefix_caching": False, "enable_sleep_mode": True, "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True, "enable_lora": True, "max_loras": 1, "max_lora_rank": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "changes", "expected"),
    [
        ({}, {"on_gpu": False}, {"enable_sleep_mode": False, "enable_chunked_prefill": False}),
        ({}, {"graphs": [1, 2, 2048]}, {"cudagraph_capture_sizes": [1, 2, 2048]}),
        ({"top_p": 0.9}, {}, {"logprobs_mode": "raw_logprobs"}),
        ({"top_k": 5}, {}, {"logprobs_mode": "raw_logprobs"}),
        ({"load_in_4bit": True}, {}, {"quantization": "bitsandbytes"}),
        ({"seed": 2**40 + 3}, {}, {"seed": 3}),
        ({"kv_cache_gib": 1.5}, {}, {"kv_cache_memory_bytes": 1_610_612_736}),  # 1.5 · 2^30
        ({"vllm_engine_args": '{"kv_cache_dtype": "fp8"}'}, {}, {"kv_cache_dtype": "fp8", "max_lora_rank": 8}),
    ],
)
def test_arguments_depend_on_what_is_possible(
    tmp_path: Path, overrides: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = arguments(tmp_path, overrides, **changes)
    assert made | expected == made


def test_among_ranks_it_is_started_by_all_of_them_and_adapter_ranks_are_those_vllm_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert arguments(tmp_path, {})["distributed_executor_backend"] == "external_launcher"
    assert [lora_rank_limit(rank) for rank in (1, 2, 8, 9, 129, 257, 512)] == [1, 8, 8, 16, 256, 320, 512]
    with pytest.raises(UsageError, match="up to rank 512, not 513"):
        lora_rank_limit(513)


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ('["fp8"]', "is not a JSON object", "Example"),
        ("[" * 100_000, "is not JSON", "Example"),
        ('{"no_enable_lora": true}', "cannot set no_enable_lora", "emailrl depends on its value"),
        ('{"--quantization": "fp8"}', "'--quantization' is not an argument name", "Example"),
        ('{"dtype": "float16"}', "cannot set dtype", "Set EMAILRL_DTYPE instead"),
        ('{"enforce_e": true}', "cannot set enforce_e", "Set VLLM_ENFORCE_EAGER instead"),
        ('{"quantization": "fp8"}', "cannot set quantization", "Set LOAD_IN_4BIT instead"),
    ],
)
def test_further_arguments_are_checked_before_a_model_is_loaded(
    tmp_path: Path, given: str, message: str, hint: str
) -> None:
    overrides = {"vllm_engine_args": given, "vllm_urls": "http://h:1", "load_in_4bit": True}
    with pytest.raises(UsageError, match=message) as error:
        check_vllm(load_settings(overrides, environ={}, cwd=tmp_path), trainable=True)
    assert hint in error.value.hint


def test_arguments_as_flags() -> None:
    given = {"async_scheduling": False, "enable_dbo": True, "block_size": 32, "compilation_config": {"mode": 3}}
    assert as_flags(given | {"quantization": "fp8", "tokenizer": None}) == [
        "--no-async-scheduling", "--enable-dbo", "--block-size", "32", "--compilation-config", '{"mode": 3}',
        "--quantization", "fp8",
    ]  # fmt: skip


# -- sleep and CUDA graphs


@pytest.mark.parametrize(
    ("overrides", "trainer", "card", "asleep"),
    [
        # 10 + 1 + 34 GiB of the trainer, and 45 of 100 for vLLM: 90 in all, which may be 90 % of the GPU.
        ({}, (10, 1, 34), 100, False),
        ({}, (10, 1, 34), 99, True),
        ({"vllm_gpu_memory_utilization": 0.46}, (10, 1, 34), 100, True),
        # vLLM takes 10 GiB of weights, 2 of work and its cache: 45 with 33.
        ({"kv_cache_gib": 33}, (10, 1, 34), 100, False),
        ({"kv_cache_gib": 34}, (10, 1, 34), 100, True),
        ({"kv_cache_gib": 38, "vllm_tensor_parallel_size": 2}, (10, 1, 34), 100, False),
        ({"vllm_enable_sleep": True}, (10, 1, 34), 1000, True),
        ({"vllm_enable_sleep": "off"}, (10, 1, 34), 10, False),
        # With graphs: 10 + 1 + 33 of the trainer and 45 for vLLM are 89 of the 90 GiB that both may take.
        ({}, (10, 1, 33, 1), 100, False),
        ({}, (10, 1, 33, 2), 100, True),
        ({"vllm_enforce_eager": True}, (10, 1, 33, 2), 100, False),
        ({}, None, 1000, True),  # a trainer whose needs are unknown gets the GPU
        ({"vllm_enable_sleep": "off"}, None, 1000, False),
    ],
)
def test_auto_sleeps_unless_both_fit(
    tmp_path: Path, overrides: dict[str, Any], trainer: tuple[int, ...] | None, card: int, asleep: bool
) -> None:
    settings = settings_for(tmp_path, **overrides)
    needs = None if trainer is None else Trainer(*(GIB * each for each in trainer))
    assert sleeps(settings.agent, settings.vllm, needs, card * GIB) is asleep


def test_a_trainer_is_counted_from_its_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    given = {"model_name": str(folder), "lora_rank": 4, "max_tokens_per_micro_batch": 100, "dtype": "fp32"}
    settings = load_settings(given, environ={}, cwd=tmp_path)
    policy = load_policy(settings, trainable=True)
    assert Trainer.of(policy, settings.training) is None  # its layers are not fused on a CPU
    assert enable_fused(policy.model, "auto") is None
    config = policy.model.config
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    attention = (hidden + queries) + 2 * (hidden + keys) + (queries + hidden)
    adapter = config.num_hidden_layers * 4 * (attention + 3 * (hidden + ffn))
    base = sum(value.numel() for name, value in policy.model.named_parameters() if "lora_" not in name)
    # Everything kept: the state twice, queries twice, keys, values, gate and up; and one layer at work.
    kept = config.num_hidden_layers * (2 * hidden + 2 * queries + 2 * keys + 2 * ffn)
    at_work = 4 * ffn + 4 * (queries + hidden) + 4 * keys
    graphs = graph_bytes(layers=config.num_hidden_layers, hidden=hidden)
    expected = Trainer(4 * base, 24 * adapter, 100 * 4 * (kept + at_work), graphs)
    assert Trainer.of(policy, settings.training) == expected


LONG = [96, 128, 256, 384, 512, 768, 1024, 1536, 2048]


@pytest.mark.parametrize(
    ("overrides", "card", "sizes"),
    [
        ({"max_batch_trajectories": 20}, 64 * GIB, [1, 2, 4, 8, 16, 20, *LONG]),
        ({"max_batch_trajectories": 300}, 140 * GIB, [1, 2, 4, *range(8, 300, 8), 300, *LONG[3:]]),
        ({"max_batch_trajectories": 3}, 140 * GIB, [1, 2, 3, 4, *LONG]),
        ({}, 63 * GIB, []),
        ({"vllm_enforce_eager": True}, 140 * GIB, []),
        ({}, math.inf, []),  # a CPU
        ({"vllm_tensor_parallel_size": 2}, 140 * GIB, []),
        ({"vllm_engine_args": '{"cudagraph_capture_sizes": [1, 2]}'}, 140 * GIB, []),
        ({"vllm_engine_args": '{"max_num_batched_tokens": 1024}'}, 140 * GIB, []),
    ],
)
def test_graphs_for_conversations_and_a_few_long_steps(
    tmp_path: Path, overrides: dict[str, Any], card: float, sizes: list[int]
) -> None:
    settings = settings_for(tmp_path, **overrides)
    assert capture_sizes(settings.agent, settings.vllm, card) == sizes
    assert graph_bytes(layers=40, hidden=5120) == 5.5 * GIB and graph_bytes(layers=20, hidden=2560) == 1.375 * GIB
