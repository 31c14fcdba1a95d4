"""What vLLM in this process is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stand_in import settings_for

from emailrl.engines.vllm.arguments import as_flags, check_vllm, engine_arguments, lora_rank_limit
from emailrl.errors import UsageError
from emailrl.settings import load_settings


def test_arguments_follow_the_settings(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path, vllm_tensor_parallel_size=2, vllm_gpu_memory_utilization=0.3, vllm_enforce_eager=True,
        vllm_enable_prefix_caching=False, max_model_len=8192, max_batch_trajectories=48, seed=7,
    )  # fmt: skip
    made = engine_arguments(settings, model="/models/x", dtype="bfloat16", lora_rank=20, on_gpu=True, sleeps=True)
    assert made == {
        "model": "/models/x", "dtype": "bfloat16", "skip_tokenizer_init": True, "seed": 7, "max_model_len": 8192,
        "max_num_seqs": 48, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.3, "enforce_eager": True,
        "enable_prefix_caching": False, "enable_sleep_mode": True, "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True, "enable_lora": True, "max_loras": 1, "max_lora_rank": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "expected"),
    [
        ({}, False, {"enable_sleep_mode": False, "enable_chunked_prefill": False}),
        ({"top_p": 0.9}, True, {"logprobs_mode": "raw_logprobs"}),
        ({"top_k": 5}, True, {"logprobs_mode": "raw_logprobs"}),
        ({"load_in_4bit": True}, True, {"quantization": "bitsandbytes"}),
        ({"seed": 2**40 + 3}, True, {"seed": 3}),
    ],
)
def test_arguments_depend_on_what_is_possible(
    tmp_path: Path, overrides: dict[str, Any], on_gpu: bool, expected: dict[str, Any]
) -> None:
    made = engine_arguments(
        settings_for(tmp_path, **overrides), model="x", dtype="float32", lora_rank=8, on_gpu=on_gpu, sleeps=True
    )
    assert made | expected == made


def test_among_ranks_it_is_started_by_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    made = engine_arguments(settings_for(tmp_path), model="x", dtype="bfloat16", lora_rank=8, on_gpu=True, sleeps=True)
    assert made["distributed_executor_backend"] == "external_launcher"


def test_ranks_are_those_vllm_takes() -> None:
    assert [lora_rank_limit(rank) for rank in (1, 2, 8, 9, 129, 257, 512)] == [1, 8, 8, 16, 256, 320, 512]
    with pytest.raises(UsageError, match="up to rank 512, not 513"):
        lora_rank_limit(513)


def test_a_given_cache_is_not_derived_from_free_memory(tmp_path: Path) -> None:
    settings = load_settings({"kv_cache_gib": 1.5}, environ={}, cwd=tmp_path)
    made = engine_arguments(settings, model="x", dtype="bfloat16", lora_rank=8, on_gpu=True, sleeps=True)
    assert made["kv_cache_memory_bytes"] == 1_610_612_736  # 1.5 · 2^30
    settings = load_settings({}, environ={}, cwd=tmp_path)
    made = engine_arguments(settings, model="x", dtype="bfloat16", lora_rank=8, on_gpu=True, sleeps=True)
    assert "kv_cache_memory_bytes" not in made


def test_further_arguments_reach_vllm(tmp_path: Path) -> None:
    given = """{"kv_cache_dtype": "fp8", "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}"""
    settings = load_settings({"vllm_engine_args": given}, environ={}, cwd=tmp_path)
    made = engine_arguments(settings, model="x", dtype="bfloat16", lora_rank=8, on_gpu=True, sleeps=True)
    assert made["kv_cache_dtype"] == "fp8" and made["max_lora_rank"] == 8
    assert made["compilation_config"] == {"cudagraph_mode": "FULL_DECODE_ONLY"}


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("fp8", "is not JSON", "Example"),
        ('["fp8"]', "is not a JSON object", "Example"),
        ("[" * 100_000, "is not JSON", "Example"),
        ('{"no_enable_lora": true}', "cannot set no_enable_lora", "emailrl depends on its value"),
        ('{"--quantization": "fp8"}', "'--quantization' is not an argument name", "Example"),
        ('{"dtype": "float16"}', "cannot set dtype", "Set EMAILRL_DTYPE instead"),
        ('{"enforce_e": true}', "cannot set enforce_e", "Set VLLM_ENFORCE_EAGER instead"),
        ('{"max_loras": 4}', "cannot set max_loras", "Set MAX_STALENESS instead"),
        ('{"logprobs_mode": "raw_logits"}', "cannot set logprobs_mode", "emailrl depends on its value"),
    ],
)
def test_further_arguments_are_checked_before_a_model_is_loaded(
    tmp_path: Path, given: str, message: str, hint: str
) -> None:
    settings = load_settings({"vllm_engine_args": given, "vllm_urls": "http://h:1"}, environ={}, cwd=tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        check_vllm(settings, trainable=True)
    assert hint in error.value.hint


def test_a_base_in_4_bits_leaves_no_choice_of_quantization(tmp_path: Path) -> None:
    given = {"load_in_4bit": True, "vllm_engine_args": '{"quantization": "fp8"}'}
    with pytest.raises(UsageError, match="cannot set quantization"):
        engine_arguments(
            load_settings(given, environ={}, cwd=tmp_path),
            model="x",
            dtype="bfloat16",
            lora_rank=8,
            on_gpu=True,
            sleeps=True,
        )


def test_arguments_as_flags() -> None:
    given = {"async_scheduling": False, "enable_dbo": True, "block_size": 32, "compilation_config": {"mode": 3}}
    assert as_flags(given | {"quantization": "fp8", "tokenizer": None}) == [
        "--no-async-scheduling", "--enable-dbo", "--block-size", "32", "--compilation-config", '{"mode": 3}',
        "--quantization", "fp8",
    ]  # fmt: skip
