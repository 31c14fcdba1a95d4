"""What vLLM is started with: its arguments, whether it sleeps, and the CUDA graphs it captures; sizes by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stand_in import settings_for
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
from emailrl.model.fused.model import enable_fused
from emailrl.model.load import load_policy
from emailrl.settings import Settings, load_settings

GIB = 2**30


def arguments(settings: Settings, **changes: Any) -> dict[str, Any]:
    given = {"model": "x", "dtype": "bfloat16", "lora_rank": 8, "on_gpu": True, "sleeps": True}
    return engine_arguments(settings, **(given | changes))


def test_arguments_follow_the_settings(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path, vllm_tensor_parallel_size=2, vllm_gpu_memory_utilization=0.3, vllm_enforce_eager=True,
        vllm_enable_prefix_caching=False, max_model_len=8192, max_batch_trajectories=48, seed=7,
    )  # fmt: skip
    made = arguments(settings, model="/models/x", lora_rank=20)
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
    made = arguments(settings_for(tmp_path, **overrides), on_gpu=on_gpu)
    assert made | expected == made


def test_among_ranks_it_is_started_by_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    made = arguments(settings_for(tmp_path))
    assert made["distributed_executor_backend"] == "external_launcher"


def test_ranks_are_those_vllm_takes() -> None:
    assert [lora_rank_limit(rank) for rank in (1, 2, 8, 9, 129, 257, 512)] == [1, 8, 8, 16, 256, 320, 512]
    with pytest.raises(UsageError, match="up to rank 512, not 513"):
        lora_rank_limit(513)


def test_a_given_cache_is_not_derived_from_free_memory(tmp_path: Path) -> None:
    settings = load_settings({"kv_cache_gib": 1.5}, environ={}, cwd=tmp_path)
    made = arguments(settings)
    assert made["kv_cache_memory_bytes"] == 1_610_612_736  # 1.5 · 2^30
    settings = load_settings({}, environ={}, cwd=tmp_path)
    made = arguments(settings)
    assert "kv_cache_memory_bytes" not in made


def test_further_arguments_reach_vllm(tmp_path: Path) -> None:
    given = """{"kv_cache_dtype": "fp8", "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}"""
    settings = load_settings({"vllm_engine_args": given}, environ={}, cwd=tmp_path)
    made = arguments(settings)
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
        arguments(load_settings(given, environ={}, cwd=tmp_path))


def test_arguments_as_flags() -> None:
    given = {"async_scheduling": False, "enable_dbo": True, "block_size": 32, "compilation_config": {"mode": 3}}
    assert as_flags(given | {"quantization": "fp8", "tokenizer": None}) == [
        "--no-async-scheduling", "--enable-dbo", "--block-size", "32", "--compilation-config", '{"mode": 3}',
        "--quantization", "fp8",
    ]  # fmt: skip


# -- sleep


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


# -- CUDA graphs


def test_every_number_of_conversations_and_a_few_long_steps(tmp_path: Path) -> None:
    long = [96, 128, 256, 384, 512, 768, 1024, 1536, 2048]
    assert capture_sizes(settings_for(tmp_path, max_batch_trajectories=20), 64 * GIB) == [1, 2, 4, 8, 16, 20, *long]
    sizes = capture_sizes(settings_for(tmp_path, max_batch_trajectories=300), 140 * GIB)
    assert sizes == [1, 2, 4, *range(8, 300, 8), 300, 384, 512, 768, 1024, 1536, 2048]
    assert capture_sizes(settings_for(tmp_path, max_batch_trajectories=3), 140 * GIB) == [1, 2, 3, 4, *long]


@pytest.mark.parametrize(
    ("overrides", "card"),
    [
        ({}, 63 * GIB),
        ({"vllm_enforce_eager": True}, 140 * GIB),
        ({}, math.inf),  # a CPU
        ({"vllm_tensor_parallel_size": 2}, 140 * GIB),
        ({"vllm_engine_args": '{"cudagraph_capture_sizes": [1, 2]}'}, 140 * GIB),
        ({"vllm_engine_args": '{"max_num_batched_tokens": 1024}'}, 140 * GIB),
    ],
)
def test_vllm_chooses_where_they_cost_too_much_or_something_else_decides(
    tmp_path: Path, overrides: dict[str, Any], card: float
) -> None:
    assert capture_sizes(settings_for(tmp_path, **overrides), card) == []


def test_the_engine_asks_for_them_only_if_there_are_any(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": "x", "dtype": "bfloat16", "lora_rank": 8, "on_gpu": True, "sleeps": True}
    made = engine_arguments(settings_for(tmp_path), **given, graphs=[1, 2, 2048])
    assert made["cudagraph_capture_sizes"] == [1, 2, 2048]
    assert "cudagraph_capture_sizes" not in engine_arguments(settings_for(tmp_path), **given)


def test_their_memory_counts_where_trainer_and_sampler_share_a_gpu(tmp_path: Path) -> None:
    assert graph_bytes(layers=40, hidden=5120) == 5.5 * GIB and graph_bytes(layers=20, hidden=2560) == 1.375 * GIB
    # 10 + 1 + 33 of the trainer and 45 for vLLM: 89 of the 90 GiB that both may take of 100.
    for graphs, asleep in ((1, False), (2, True)):
        trainer = Trainer(weights=10 * GIB, adapter=GIB, activations=33 * GIB, graphs=graphs * GIB)
        assert sleeps(settings_for(tmp_path), trainer, 100 * GIB) is asleep
        eager = settings_for(tmp_path, vllm_enforce_eager=True)
        assert not sleeps(eager, trainer, 100 * GIB)
