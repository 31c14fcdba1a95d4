"""Which CUDA graphs in-process vLLM captures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stand_in import settings_for

from emailrl.engines.vllm.arguments import Trainer, capture_sizes, engine_arguments, graph_bytes, sleeps

GIB = 2**30


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
