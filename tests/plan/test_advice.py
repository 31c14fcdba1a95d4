"""What a plan says beside the figures: what keeps a run from starting, what makes it fit, what other GPUs are for."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from plan.planned import CPU, plan_for
from typer.testing import CliRunner

from emailrl import plan as advice
from emailrl.base.plain import duration
from emailrl.cli.app import app


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU and none of the optional packages."""
    monkeypatch.setattr(advice, "find_spec", lambda name: None)
    monkeypatch.setattr(advice, "driver_gpus", lambda: [("H200", 139.8)])
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("device", "values", "reason"),
    [
        ("H200", {"engine": "vllm"}, "vllm is not installed here"),
        (CPU, {"engine": "vllm"}, "vllm is not installed here"),
        ("H200", {"backend": "unsloth"}, "unsloth is not installed here"),
        ("H200", {"load_in_4bit": True}, "bitsandbytes, which LOAD_IN_4BIT needs, is not installed here"),
        (CPU, {"emailrl_device": "cuda"}, "EMAILRL_DEVICE is cuda, but this machine has no GPU"),
    ],
)
def test_what_this_machine_lacks(device: Any, values: dict[str, Any], reason: str) -> None:
    """And what another one, named with --gpu, need not lack."""
    made = plan_for(device, here=True, model_name="nano", **values)
    assert [one.reason for one in made.obstacles] == [reason] and made.memory.fits and not made.runs
    assert made.verdict.startswith(f"cannot run: {reason} (") and "; its memory fits: " in made.verdict
    assert plan_for(device, model_name="nano", **values).runs


@pytest.mark.usefixtures("bare")
def test_vllm_over_more_gpus_than_there_are_and_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"engine": "vllm", "vllm_tensor_parallel_size": 2, "model_name": "nano"}
    reasons = [one.reason for one in plan_for(here=True, **values).obstacles]
    assert reasons[1:] == ["VLLM_TENSOR_PARALLEL_SIZE is 2, but this machine has 1 GPU"]
    monkeypatch.setattr(advice, "driver_gpus", lambda: 2 * [("H200", 139.8)])
    assert len(plan_for(here=True, **values).obstacles) == 1
    # Servers stand elsewhere: nothing of theirs is needed here.
    assert plan_for(here=True, **values, vllm_urls="http://one:8000").runs
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    made = plan_for(here=True, model_name="nano")
    assert [one.reason for one in made.obstacles] == ["the torch installed here is built for CPUs"]
    assert plan_for(CPU, here=True, model_name="nano").runs


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"engine": "openai"}, "the openai engine cannot train"),
        ({"backend": "unsloth"}, "the unsloth backend needs a CUDA GPU"),
        ({"load_in_4bit": True}, "LOAD_IN_4BIT needs a CUDA GPU"),
        ({"model": "8B"}, "8 billion parameters are too slow to train on a CPU"),
    ],
)
def test_what_no_cpu_takes(values: dict[str, Any], reason: str) -> None:
    made = plan_for(CPU, **({"model_name": "nano"} | values))
    assert [one.reason for one in made.obstacles] == [reason]
    assert plan_for(CPU, model_name="nano").runs
    asked = plan_for(CPU, model="8B", emailrl_device="cpu")
    assert asked.obstacles == []


def test_a_sharded_base_needs_two_ranks_on_a_host() -> None:
    for nodes in (1, 4):
        made = plan_for(model="14B", shard="host", gpus=1, nodes=nodes)
        assert [one.reason for one in made.obstacles] == ["SHARD=host needs at least two ranks per host"]
        assert not made.runs and "--num-gpus 2 or more" in made.verdict
    made = plan_for(model="14B", shard="host", gpus=4)
    assert made.runs and made.split is not None
    assert made.split.trainers == made.split.memory.cards > 1  # one trainer has no other to share the base with


def test_the_command_says_that_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi: a CPU
    monkeypatch.setattr(advice, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["plan", "--model", "nano", "--engine", "vllm", "--json"])
    said = json.loads(done.stdout)
    assert done.exit_code == 1 and said["fits"] and not said["runs"]
    assert said["obstacles"][0]["reason"] == "vllm is not installed here"
    assert CliRunner().invoke(app, ["plan", "--model", "nano", "--engine", "vllm", "--gpu", "H200"]).exit_code == 0


def test_each_way_to_make_it_fit_is_a_plan_of_its_own() -> None:
    values = {"model": "14B", "engine": "vllm"}
    made = plan_for("A100-80", **values)
    assert [way.text for way in made.ways] == [
        "VLLM_GPU_MEMORY_UTILIZATION=0.5", "MAX_MODEL_LEN=39936", "LOAD_IN_4BIT=true", "--engine transformers",
        "--model Qwen/Qwen3-8B", "--gpu H100-NVL",
    ]  # fmt: skip
    for way, changed in (
        (made.ways[0], plan_for("A100-80", **values, vllm_gpu_memory_utilization=0.5)),
        (made.ways[3], plan_for("A100-80", **(values | {"engine": "transformers"}))),
        (made.ways[4], plan_for("A100-80", **(values | {"model": "8B"}))),
        (made.ways[5], plan_for("H100-NVL", **values)),
    ):
        assert changed.memory.fits
        assert (way.peak, way.run_seconds) == (changed.memory.peak, changed.run_seconds)


def test_changes_that_only_together_make_it_fit() -> None:
    made = plan_for("4090", model="14B")
    assert [way.text for way in made.ways] == [
        "LOAD_IN_4BIT=true MAX_TOKENS_PER_MICRO_BATCH=8192",
        "--model Qwen/Qwen3-4B",
        "--gpu L40S",
    ]
    four = {"load_in_4bit": True, "max_tokens_per_micro_batch": 8192}
    turned = plan_for("4090", model="14B", **four)
    assert turned.memory.fits and made.ways[0].peak == turned.memory.peak


def test_vllm_in_the_same_process_is_noted_where_it_is_faster() -> None:
    made = plan_for()
    other = plan_for(engine="vllm")
    [way] = made.faster
    assert way.text == "vLLM in the same process (--engine vllm)"
    assert way.run_seconds == other.run_seconds < made.run_seconds / 4
    assert way.peak == other.memory.peak
    [note] = [one for one in made.notes if "--engine vllm" in one]
    assert note.endswith("would take 119 min instead of 9.2 h")
    paid = plan_for(price=3.0)
    assert any("--engine vllm" in one and "and cost 5.9" in one for one in paid.notes)
    [narrow] = plan_for("H100").faster
    assert narrow.text == "vLLM in the same process (MAX_MODEL_LEN=38912 --engine vllm)"
    narrowed = plan_for("H100", engine="vllm", max_model_len=38912)
    assert narrowed.memory.fits and narrow.run_seconds == narrowed.run_seconds
    slower = plan_for("4090", model="4B")  # few trajectories at once beside the weights
    assert slower.memory.fits and slower.faster == []
    assert other.faster == plan_for("CPU", model_name="nano").faster == []


def test_a_model_that_no_setting_makes_fit_and_recomputation_on_a_cpu() -> None:
    made = plan_for("T4", model_name="Qwen/Qwen2.5-72B", dtype="fp32")
    assert made.ways == [] and made.verdict.endswith("choose a smaller model")
    texts = [way.text for way in plan_for(replace(CPU, gib=20.0), model="0.6B").ways]
    assert "GRADIENT_CHECKPOINTING=on" in texts and texts[-1] == "--gpu T4"


def test_the_packaged_policy_is_planned_as_it_plays() -> None:
    tokens = plan_for(CPU, model_name="nano", max_steps=7, eval_steps=5).tokens
    assert (tokens.per_trajectory, tokens.trainable_share) == (290, 0.14)
    assert tokens.evaluations == 3  # before the first step, after the fifth, after the last


def test_the_advice_to_change_the_engine_changes_the_command_that_got_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["plan", "--gpu", "4090", "--model", "Qwen/Qwen3-14B", "--engine", "vllm"]
    environment = {"LOAD_IN_4BIT": "true", "MAX_TOKENS_PER_MICRO_BATCH": "8192"}
    advised = CliRunner().invoke(app, command, env=environment)
    assert advised.exit_code == 1 and "; try --engine transformers" in advised.stdout
    followed = CliRunner().invoke(app, [*command, "--engine", "transformers"], env=environment)
    assert followed.exit_code == 0, followed.stdout


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2.0 h"), (200_000, "2.3 days")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
