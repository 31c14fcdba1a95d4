"""Peak memory and seconds of the train step with the frozen base sharded over the GPUs of a host, and with it whole.

    python tests/gpu/shard_memory.py --ranks 2 --shape 14B 32B          # 2 GPUs, under 60 s and 110 s
    python tests/gpu/shard_memory.py --ranks 2 --shape 32B --no-check --offload

First the check: on a small shape in float32 every adapter's gradient must be that of the whole base to 1e-5, relative,
or the script fails. Then, for each shape, one step of 6 trajectories (``--questions`` x 6, some 23 thousand tokens) per
rank, forward and backward, LoRA of rank 16, bf16, GRADIENT_CHECKPOINTING=on, micro-batches of 8,192 tokens; the worst
rank's figures. Weights are random and drawn on the GPU: parts of one buffer, copied for the whole base and cut up for
the sharded one, so that 65 GB are neither drawn nor read.
"""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runner import Bench, Given, Row, forget_peak, now, peak_gib, torchrun
from shapes import config_of, make_samples
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from train_step_sides import Side, lora_settings, model_side, timed

from emailrl.model.load import prepare_training
from emailrl.model.lora import with_fresh_adapter
from emailrl.model.shard import shard_base

TOKENS = 8192
WHOLE, SHARDED, OFFLOADED = "whole", "sharded", "sharded, in host memory"


def measure(given: Given, case: Row) -> list[Row]:
    if given.smoke:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "gloo" if given.smoke else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    ways = [WHOLE, SHARDED, *([OFFLOADED] if given.offload else [])]
    rows = check(given.smoke) if case["case"] == "check" else steps(case["case"], ways, given.questions)
    dist.destroy_process_group()
    return rows


def check(smoke: bool) -> list[Row]:
    """Gradients on a small shape in float32: whole, sharded and, on GPUs, offloaded."""
    samples, found = make_samples("smoke", questions=2, seed=dist.get_rank()), []
    for way in (WHOLE, SHARDED) if smoke else (WHOLE, SHARDED, OFFLOADED):
        side = make_side("smoke", way, "fp32")
        side.run(samples)
        found.append(side.gradients())
    expected, *others = found
    gaps = [
        float((other[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected.items()
        for other in others
    ]
    assert gaps and max(gaps) <= 1e-5, f"a gradient is off by {max(gaps):.2g}"
    told = f"{len(expected)} gradients equal in {len(others)} way(s) of sharding"
    return [{"base": told, "distance": max(gaps)}]


def steps(shape: str, ways: list[str], questions: int) -> list[Row]:
    """For each way the peaks of loading and of a step, the step's seconds, and how far its gradient is from the
    whole base's, each of the worst rank."""
    samples = make_samples(shape, questions=questions)
    on_gpu, rows, expected = torch.cuda.is_available(), list[Row](), dict[str, Any]()
    for way in ways:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        forget_peak()
        begun = now()
        side = make_side(shape, way, "bf16" if on_gpu else "fp32")
        own: Row = {"load_seconds": now() - begun, "load_peak": peak_gib()}
        own["load_kept"] = torch.cuda.memory_allocated() / 2**30 if on_gpu else 0.0
        side.run(samples)  # kernels are compiled here, and memory is taken
        dist.barrier()
        own["seconds"], own["peak"] = timed(side, samples, 2)
        gradients = side.gradients()
        expected = expected or gradients
        distance, size = (
            sum(float(one.square().sum()) for one in of)
            for of in ((gradients[name] - one for name, one in expected.items()), expected.values())
        )
        own["distance"] = (distance / size) ** 0.5
        del side
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        worst = {key: max(rank[key] for rank in ranks) for key in own}
        rows.append({"base": way, "tokens": sum(len(one.token_ids) for one in samples)} | worst)
    return rows


def make_side(shape: str, way: str, dtype: str) -> Side:
    """A policy of random weights, sharded over all ranks or moved to this one's device, as ``load_policy`` does it."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    settings = lora_settings(Path("unused"), dtype=dtype, gradient_checkpointing="on")
    base = random_base(shape, torch.float32 if dtype == "fp32" else torch.bfloat16, device, copied=way == WHOLE)
    model = with_fresh_adapter(base, settings.lora, seed=settings.training.seed)
    if way != WHOLE:
        mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        shard_base(model, mesh, offload=way == OFFLOADED)
    notes = prepare_training(model, settings.training, "random", device)
    assert not notes, notes
    return model_side(model, settings, device, TOKENS)


def random_base(shape: str, dtype: torch.dtype, device: torch.device, *, copied: bool) -> Any:
    """The frozen model on the device; its parameters are parts of one random buffer, or copies of them."""
    from transformers import AutoModelForCausalLM

    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    generator = torch.Generator(device).manual_seed(0)
    most = max(one.numel() for one in model.parameters())
    buffer = torch.empty(most, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = buffer[: parameter.numel()].view(parameter.shape)
            if parameter.ndim == 1:
                value = torch.ones_like(value)
            setattr(module, name, nn.Parameter(value.clone() if copied else value, requires_grad=False))
    backbone = model.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(config).to(device)  # its buffer is computed, not stored
    model.tie_weights()
    return model.eval()


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "shape": "case", "ranks": "ranks", "base": "base", "tokens per rank": "tokens:,",
        "loaded GiB": "load_kept:.1f", "peak loading": "load_peak:.1f", "peak of the step": "peak:.1f",
        "seconds": "seconds:.2f", "gradient off by": "distance:.1e",
    },
    {
        "--ranks": {"type": int, "default": 2},
        "--shape": {"nargs": "+", "default": ["14B", "32B"]},
        "--offload": {"action": "store_true", "help": "also with SHARD_OFFLOAD"},
        "--no-check": {"dest": "check", "action": "store_false"},
        "--questions": {"type": int, "default": 1, "help": "of 6 trajectories each"},
    },
    lambda given: [{"case": name, "ranks": given.ranks} for name in ["check"] * given.check + given.shape],
    smoke={"shape": ["smoke"]},
    shapes=lambda given: [],
    launcher=torchrun,
    gpus="all",
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
