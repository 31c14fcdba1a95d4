"""GPUs that train and sample in turn, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan.planned import H200, settings_with

from emailrl.cli.app import app
from emailrl.plan import Known, Plan, find_device, make_plan
from emailrl.plan.time import HANDOVER, MOVED, WAKING

A_TOKEN = 7_266_631_680 / 791.2e12
"""Seconds to read one: 2 · 36 · 100,925,440 operations of Qwen3-4B on an H200."""
DECODING = 1000 * 36 * 0.53e-3
"""Seconds of a quarter of 4,000 tokens, one at a time through 36 layers."""
WEIGHTS = 8_044_936_192
GIB = 2**30


def plan_of(tmp_path: Path, num_gpus: int, nodes: int = 1, gpu: str = "H200", **values: Any) -> Plan:
    settings = settings_with(tmp_path, **({"model_name": "Qwen/Qwen3-4B", "engine": "vllm"} | values))
    return make_plan(settings, find_device(gpu), known=Known(4000), num_gpus=num_gpus, nodes=nodes)


def test_every_gpu_trains_and_samples_its_own_trajectories(tmp_path: Path) -> None:
    """Three ranks of 12 trajectories, each with an engine: the sampling of one GPU, and then its training."""
    made, alone = plan_of(tmp_path, 3), plan_of(tmp_path, 1)
    split = made.split
    assert split is not None and split.shared and made.runs
    assert (split.trainers, split.servers, split.tensor_parallel) == (3, 3, 1)
    assert split.tokens.trajectories == 36
    assert split.sampling == pytest.approx(36_000 * (13 / 15) * A_TOKEN + DECODING, rel=1e-5)
    assert split.sampling == pytest.approx(alone.seconds.rollout)
    assert split.playing == pytest.approx(36 * 0.16 / 48)  # rank 0 records all
    seconds = split.seconds
    assert seconds.rollout == pytest.approx(split.sampling + split.playing) and seconds.handover == HANDOVER
    asleep = plan_of(tmp_path, 3, vllm_enable_sleep="on").seconds.handover
    assert asleep == pytest.approx(HANDOVER + WAKING + WEIGHTS / MOVED)
    assert seconds.train == pytest.approx(alone.seconds.train / 0.98)
    assert seconds.reduce == pytest.approx(2 * 2 / 3 * 132_120_576 / 200e9 + 40e-6)
    training = seconds.score + seconds.train + seconds.reduce
    assert seconds.step == pytest.approx(seconds.rollout + HANDOVER + training)
    assert split.tokens_per_second == pytest.approx(36 * 4000 / seconds.step)
    assert made.run_seconds == pytest.approx(200 * seconds.step + 22 * seconds.evaluation)


def test_each_gpu_holds_the_engine_beside_the_trainer(tmp_path: Path) -> None:
    made = plan_of(tmp_path, 8)
    assert made.memory == plan_of(tmp_path, 1).memory
    graphs = int(5.5 * GIB * 36 * 2560 / (40 * 5120))
    assert made.memory.sampling == {"vLLM": int(0.45 * 139.8 * GIB), "CUDA graphs": graphs}
    assert made.memory.training.items() >= made.memory.sampling.items()
    assert plan_of(tmp_path, 8, vllm_enable_sleep="on").memory.training["vLLM"] == int(1.5 * GIB)
    assert made.memory.resident["weights"] == WEIGHTS
    assert made.memory.sampling_peak == sum(made.memory.resident.values()) + int(0.45 * 139.8 * GIB) + graphs


def test_engines_of_two_gpus(tmp_path: Path) -> None:
    """Two engines of 24 trajectories each: they read twice as fast, but launch as many kernels."""
    made = plan_of(tmp_path, 4, vllm_tensor_parallel_size=2)
    split = made.split
    assert split is not None and (split.trainers, split.servers, split.tensor_parallel) == (4, 2, 2)
    assert split.sampling == pytest.approx(72_000 * (13 / 15) * A_TOKEN / 2 + DECODING, rel=1e-5)
    asleep = plan_of(tmp_path, 4, vllm_tensor_parallel_size=2, vllm_enable_sleep="on").seconds.handover
    assert asleep == pytest.approx(HANDOVER + WAKING + WEIGHTS / 2 / MOVED)
    cache = int(0.45 * 139.8 * GIB) - WEIGHTS // 2 - 2 * GIB  # on each of them
    assert made.memory.cache_tokens == 2 * cache // 147_456


def test_evaluations_are_divided_among_the_engines(tmp_path: Path) -> None:
    split = plan_of(tmp_path, 4, eval_dataset_size=12).split
    assert split is not None
    assert split.seconds.evaluation == pytest.approx(3 * 3000 * A_TOKEN + DECODING, rel=1e-5)


def test_a_cache_of_its_own_size_replaces_vllms_share(tmp_path: Path) -> None:
    made = plan_of(tmp_path, 2, kv_cache_gib=10, vllm_enable_sleep=False)
    assert made.memory.cache_tokens == 10 * GIB // 147_456
    assert made.memory.sampling["vLLM"] == made.memory.training["vLLM"] == WEIGHTS + 12 * GIB
    assert made.seconds.handover == HANDOVER  # nobody sleeps


def test_both_uses_of_the_gpus_are_compared(tmp_path: Path) -> None:
    sleeping = {"vllm_enable_sleep": "on"}
    shared, apart = plan_of(tmp_path, 8, **sleeping), plan_of(tmp_path, 8, **sleeping, engine="auto")
    assert shared.split == apart.alternative and apart.split == shared.alternative
    assert shared.split is not None and apart.split is not None
    assert shared.split.shared and not apart.split.shared
    assert apart.split.tokens_per_second > shared.split.tokens_per_second
    (note,) = [note for note in shared.notes if "would reach" in note]
    assert (apart.split.trainers, apart.split.servers) == (7, 1)
    assert note.startswith("7 trainers and 1 server (VLLM_URLS; emailrl serve) would reach")
    assert f"instead of {shared.split.tokens_per_second:,.0f}" in note
    assert not any("would reach" in note for note in apart.notes)


def test_a_slower_use_of_the_gpus_is_not_advised(tmp_path: Path) -> None:
    made = plan_of(tmp_path, 8, 125)
    assert made.split is not None and made.alternative is not None
    assert made.alternative.tokens_per_second < made.split.tokens_per_second
    (note,) = [note for note in made.notes if "would reach" in note]
    assert note.endswith(f"would reach only {made.alternative.tokens_per_second:,.0f} tokens/s")


def test_a_base_too_large_for_two_copies_is_divided_among_neighbors(tmp_path: Path) -> None:
    """Qwen3-32B on H200s: 61 GiB for the trainer, and vLLM's share beside it holds no whole copy."""
    values = {"model_name": "Qwen/Qwen3-32B"}
    made = plan_of(tmp_path, 8, **values)
    assert not made.runs and made.split is None and made.tokens.trajectories == 8 * 12
    assert made.verdict.endswith("; try VLLM_TENSOR_PARALLEL_SIZE=2")
    turned = plan_of(tmp_path, 8, **values, vllm_tensor_parallel_size=2)
    assert turned.runs and turned.split is not None and turned.split.servers == 4
    assert (made.ways[0].peak, made.ways[0].run_seconds) == (turned.memory.peak, turned.run_seconds)
    [larger] = [way for way in made.ways if way.text.startswith("--gpu")]
    assert larger.run_seconds == plan_of(tmp_path, 8, gpu=larger.text.removeprefix("--gpu "), **values).run_seconds
    three = plan_of(tmp_path, 3, **values).ways
    assert "VLLM_TENSOR_PARALLEL_SIZE=3" in [way.text for way in three]  # two do not divide three
    assert not any("PARALLEL" in way.text for way in plan_of(tmp_path, 1, **values).ways)


def test_ranks_in_the_settings_are_planned_as_they_train(tmp_path: Path) -> None:
    def made(**values: Any) -> Plan:
        return make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-4B", **values), H200)

    shared = made(engine="vllm", nproc=4, nnodes=2, vllm_tensor_parallel_size=2)
    assert shared.job.cluster.per_host == 4 and shared.split is not None and shared.split.shared
    assert (shared.split.trainers, shared.split.servers) == (8, 4)
    # Without an engine every rank samples with transformers, as in train.
    split = made(nproc=2).split
    assert split is not None and split.shared and split == made(nproc=2, engine="transformers").split
    served = made(engine="vllm", nproc=2, vllm_urls="http://one:8000")
    assert served.split is not None and not served.split.shared
    assert any(note.startswith("EMAILRL_NPROC counts only trainers") for note in served.notes)
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-4B", engine="vllm", nproc=4)
    assert make_plan(settings, H200, num_gpus=1).split is None
    assert make_plan(settings, find_device("CPU")).split is None


def test_transformers_on_every_rank_neither_wakes_nor_sleeps(tmp_path: Path) -> None:
    split, alone = plan_of(tmp_path, 2, engine="transformers").split, plan_of(tmp_path, 1, engine="transformers")
    assert split is not None and split.shared and split.seconds.handover == 0
    assert split.sampling == pytest.approx(alone.seconds.rollout)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vllm_tensor_parallel_size": 3}, "8 ranks on a host cannot be divided into engines"),
        ({"model_name": "Qwen/Qwen3-32B"}, "a sharded base model needs vLLM servers"),
    ],
)
def test_what_shared_gpus_cannot_do_is_said(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    made = plan_of(tmp_path, 8, gpu="H100", **values)
    assert not made.runs and made.verdict.startswith(f"cannot run: {reason}")
    assert "too few for a trainer and a server" not in made.verdict
    assert made.alternative is not None and any(note.startswith(f"{made.alternative} would fit") for note in made.notes)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["plan", "--gpu", "H200", "--model", "Qwen/Qwen3-14B", "--engine", "vllm", "--num-gpus", "8"]
    app([*asked, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["split"]["shared"] and found["split"]["servers"] == 8 and not found["alternative"]["shared"]
    app(asked, standalone_mode=False)
    said = capsys.readouterr().out
    monkeypatch.setenv("EMAILRL_NPROC", "8")
    app(asked[:-2], standalone_mode=False)
    assert capsys.readouterr().out == said
    assert "in the trainers' processes, 1 GPU each" in said and "then training" in said
    assert H200.name in said
