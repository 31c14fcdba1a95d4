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

import argparse
import gc
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runner import Bench, Given, Row, forget_peak, peak_gib, torchrun
from shapes import config_of, make_samples
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from train_step_sides import Side, lora_settings, model_side, timed

from emailrl.model.load import prepare_training
from emailrl.model.lora import with_fresh_adapter
from emailrl.model.shard import shard_base
from emailrl.settings import Settings

TOKENS = 8192


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", nargs="+", default=["14B", "32B"])
    parser.add_argument("--offload", action="store_true", help="also with SHARD_OFFLOAD")
    parser.add_argument("--no-check", dest="check", action="store_false")
    parser.add_argument("--questions", type=int, default=1, help="of 6 trajectories each")


def cases(given: Given) -> list[Row]:
    named = ["check"] * given.check + list(given.shape)
    return [{"case": name, "ranks": given.ranks} for name in named]


def measure(given: Given, case: Row) -> list[Row]:
    device, shape = meet(on_gpu=not given.smoke), case["case"]
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    if shape == "check":
        rows = [check(mesh, device)]
    else:
        whole, rows = step_of(shape, None, device, given.questions), []
        for offload in [False, True] if given.offload else [False]:
            sharded = step_of(shape, mesh, device, given.questions, offload=offload)
            rows += compare(whole, sharded, offload=offload)[offload:]
    dist.destroy_process_group()
    return rows


def meet(*, on_gpu: bool) -> torch.device:
    """Join the other ranks, each on its own GPU."""
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def check(mesh: DeviceMesh, device: torch.device) -> Row:
    """Gradients on a small shape in float32, sharded, offloaded and whole."""
    samples = make_samples("smoke", questions=2, seed=dist.get_rank())
    settings = lora_settings(Path("unused"), dtype="fp32", gradient_checkpointing="on")
    ways = [None, False] if device.type == "cpu" else [None, False, True]
    expected, *others = (gradients_of(settings, mesh, device, samples, offload) for offload in ways)
    gaps = [
        float((found[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected.items()
        for found in others
    ]
    assert gaps and max(gaps) <= 1e-5, f"a gradient is off by {max(gaps):.2g}"
    return {"base": f"{len(expected)} gradients equal in {len(others)} way(s) of sharding", "distance": max(gaps)}


def gradients_of(
    settings: Settings, mesh: DeviceMesh, device: torch.device, samples: list[Any], offload: bool | None
) -> dict[str, Tensor]:
    """Gradients of the small shape; ``offload`` None: unsharded."""
    side = make_side("smoke", settings, None if offload is None else mesh, device, offload=bool(offload))
    side.run(samples)
    return side.gradients()


def make_side(
    shape: str, settings: Settings, mesh: DeviceMesh | None, device: torch.device, *, offload: bool = False
) -> Side:
    """A policy of random weights, sharded over ``mesh`` or moved to ``device``, as ``load_policy`` does it."""
    dtype = torch.float32 if settings.model.dtype == "fp32" else torch.bfloat16
    base = random_base(shape, dtype, device, copied=mesh is None)
    model = with_fresh_adapter(base, settings.lora, seed=settings.training.seed)
    if mesh is not None:
        shard_base(model, mesh, offload=offload)
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
            if parameter.ndim == 1:
                value = torch.ones(parameter.shape, dtype=dtype, device=device)
            else:
                value = buffer[: parameter.numel()].view(parameter.shape)
                value = value.clone() if copied else value
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    backbone = model.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(config).to(device)  # its buffer is computed, not stored
    model.tie_weights()
    return model.eval()


def step_of(
    shape: str, mesh: DeviceMesh | None, device: torch.device, questions: int, *, offload: bool = False
) -> dict[str, Any]:
    """Peaks of loading and of a step on this rank, and the step's seconds."""
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        forget_peak()
    begun = time.perf_counter()
    dtype = "bf16" if on_gpu else "fp32"
    side = make_side(
        shape, lora_settings(Path("unused"), dtype=dtype, gradient_checkpointing="on"), mesh, device, offload=offload
    )
    loading = {"seconds": time.perf_counter() - begun}
    if on_gpu:
        loading |= {"peak": peak_gib(), "kept": torch.cuda.memory_allocated() / 2**30}
    samples = make_samples(shape, questions=questions)
    side.run(samples)  # kernels are compiled here, and memory is taken
    dist.barrier()
    seconds, peak = timed(side, samples, 2)
    gradients = side.gradients()
    tokens = sum(len(one.token_ids) for one in samples)
    return {"loading": loading, "seconds": seconds, "peak": peak, "tokens": tokens, "gradients": gradients}


def compare(whole: Row, sharded: Row, *, offload: bool) -> list[Row]:
    expected, found = whole["gradients"], sharded["gradients"]
    distance = math.sqrt(sum(float((found[name] - one).square().sum()) for name, one in expected.items()))
    norm = math.sqrt(sum(float(one.square().sum()) for one in expected.values()))
    own: dict[str, float] = {"distance": distance / norm}
    for name, side in (("whole", whole), ("sharded", sharded)):
        own |= {f"{name}_peak": side["peak"], f"{name}_seconds": side["seconds"]}
        own |= {f"{name}_load_{key}": value for key, value in side["loading"].items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    worst = {key: max(rank[key] for rank in ranks) for key in own}
    rows: list[Row] = []
    for name, way in (("whole", "whole"), ("sharded", "sharded, in host memory" if offload else "sharded")):
        of = {key.removeprefix(f"{name}_"): value for key, value in worst.items() if key.startswith(f"{name}_")}
        rows.append({"base": way, "tokens": whole["tokens"]} | of)
    rows[1]["distance"] = worst["distance"]
    return rows


BENCH = Bench(
    __file__,
    __doc__,
    cases,
    measure,
    {
        "shape": "case", "ranks": "ranks", "base": "base", "tokens per rank": "tokens:,",
        "loaded GiB": "load_kept:.1f", "peak loading": "load_peak:.1f", "peak of the step": "peak:.1f",
        "seconds": "seconds:.2f", "gradient off by": "distance:.1e",
    },
    options,
    smoke={"shape": ["smoke"]},
    launcher=torchrun,
    gpus="all",
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
