"""Peak memory and seconds of the train step with the frozen base sharded over the GPUs of a host, and with it whole.

    torchrun --standalone --nproc-per-node 2 tests/gpu/shard_memory.py --shape 14B          # 2 GPUs, under 60 s
    torchrun --standalone --nproc-per-node 2 tests/gpu/shard_memory.py --shape 32B          # under 110 s
    torchrun --standalone --nproc-per-node 2 tests/gpu/shard_memory.py --shape 32B --no-check --offload
    torchrun --standalone --nproc-per-node 2 tests/gpu/shard_memory.py --smoke      # a rehearsal on CPUs

First the check: on a small shape in float32 every adapter's gradient must be that of the whole base to 1e-5, relative,
or the script fails. Then, for each shape, one step of 6 trajectories (``--questions`` x 6, some 23 thousand tokens) per
rank, forward and backward, LoRA of rank 16, bf16, GRADIENT_CHECKPOINTING=on, micro-batches of 8,192 tokens. Weights are
random and drawn on the GPU: parts of one buffer, copied for the whole base and cut up for the sharded one, so that
65 GB are neither drawn nor read. Nothing begins after ``--seconds``; rows are written as they come.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured import markdown
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from train_step_sides import Side, config_of, lora_settings, make_samples, model_side, timed

from emailrl.model.load import prepare_training
from emailrl.model.lora import with_fresh_adapter
from emailrl.model.shard import shard_base
from emailrl.settings import Settings

TOKENS = 8192
GIB = 2**30


def main() -> None:
    """Check, measure, and print one table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["14B", "32B"])
    parser.add_argument("--offload", action="store_true", help="also with SHARD_OFFLOAD")
    parser.add_argument("--no-check", dest="check", action="store_false")
    parser.add_argument("--questions", type=int, default=1, help="of 6 trajectories each")
    parser.add_argument("--seconds", type=float, default=240, help="after which nothing further begins")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for shard_memory.json"
    )
    given = parser.parse_args()
    begun = time.monotonic()
    device = meet(on_gpu=not given.smoke)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    if given.check:
        check(mesh, device)
    rows: list[dict[str, Any]] = []
    for shape in ["smoke"] if given.smoke else given.shape:
        if late(begun + given.seconds, f"{shape}: no time left"):
            break
        whole = measure(shape, None, device, given.questions)
        for offload in [False, True] if given.offload else [False]:
            if late(begun + given.seconds, f"{shape}, sharded: no time left"):
                break
            sharded = measure(shape, mesh, device, given.questions, offload=offload)
            rows.append(compare(shape, whole, sharded, offload=offload))
            if dist.get_rank() == 0:
                given.out.mkdir(parents=True, exist_ok=True)
                name = f"shard_memory-{'-'.join(given.shape)}.json"
                (given.out / name).write_text(json.dumps(rows, indent=1))
    if dist.get_rank() == 0 and rows:
        print_table(rows, device)
    dist.destroy_process_group()


def late(deadline: float, what: str) -> bool:
    """Whether rank 0's clock is past the deadline; it then says what is left out."""
    box = [time.monotonic() > deadline]
    dist.broadcast_object_list(box, src=0)
    if box[0] and dist.get_rank() == 0:
        print(what, flush=True)
    return box[0]


def meet(*, on_gpu: bool) -> torch.device:
    """Join the other ranks, each on its own GPU."""
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def check(mesh: DeviceMesh, device: torch.device) -> None:
    """Gradients on a small shape in float32, sharded, offloaded and whole."""
    samples = make_samples("smoke", questions=2, seed=dist.get_rank())
    settings = lora_settings(Path("unused"), dtype="fp32", gradient_checkpointing="on")
    ways = [None, False] if device.type == "cpu" else [None, False, True]
    expected, *others = (gradients_of(settings, mesh, device, samples, offload) for offload in ways)
    for name, gradient in expected.items():
        for found in others:
            gap = float((found[name] - gradient).abs().max() / gradient.abs().max())
            assert gap <= 1e-5, f"gradient of {name}: off by {gap:.2g}"
    if dist.get_rank() == 0:
        print(f"{len(expected)} gradients equal in {len(others)} way(s) of sharding", flush=True)


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


def measure(
    shape: str, mesh: DeviceMesh | None, device: torch.device, questions: int, *, offload: bool = False
) -> dict[str, Any]:
    """Peaks of loading and of a step on this rank, and the step's seconds."""
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    dtype = "bf16" if on_gpu else "fp32"
    side = make_side(
        shape, lora_settings(Path("unused"), dtype=dtype, gradient_checkpointing="on"), mesh, device, offload=offload
    )
    loading = {"seconds": time.perf_counter() - begun}
    if on_gpu:
        loading |= {"peak": torch.cuda.max_memory_allocated(), "kept": torch.cuda.memory_allocated()}
    samples = make_samples(shape, questions=questions)
    side.run(samples)  # kernels are compiled here, and memory is taken
    dist.barrier()
    seconds, peak = timed(side, samples, 2)
    gradients = side.gradients()
    tokens = sum(len(one.token_ids) for one in samples)
    return {"loading": loading, "seconds": seconds, "peak": peak * GIB, "tokens": tokens, "gradients": gradients}


def compare(shape: str, whole: dict[str, Any], sharded: dict[str, Any], *, offload: bool) -> dict[str, Any]:
    """Both ways side by side; the worst rank's figures."""
    expected, found = whole["gradients"], sharded["gradients"]
    distance = math.sqrt(sum(float((found[name] - one).square().sum()) for name, one in expected.items()))
    norm = math.sqrt(sum(float(one.square().sum()) for one in expected.values()))
    own = {"distance": distance / norm}
    for name, side in (("whole", whole), ("sharded", sharded)):
        own |= {f"{name}_peak": side["peak"], f"{name}_seconds": side["seconds"]}
        own |= {f"{name}_load_{key}": value for key, value in side["loading"].items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    worst = {key: max(rank[key] for rank in ranks) for key in own}
    return {"shape": shape, "offload": offload, "ranks": len(ranks), "tokens": whole["tokens"]} | worst


def print_table(rows: list[dict[str, Any]], device: torch.device) -> None:
    """A short table, GiB per card."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{rows[0]['ranks']} x {name}, torch {torch.__version__}, {rows[0]['tokens']:,} tokens per rank")
    columns = ["shape", "base", "loaded GiB", "peak loading", "peak of the step", "seconds", "gradient off by"]
    lines = []
    for row in rows:
        for way in ("whole", "sharded"):
            shown = "sharded, in host memory" if way == "sharded" and row["offload"] else way
            memory = [row.get(f"{way}_load_kept", 0), row.get(f"{way}_load_peak", 0), row[f"{way}_peak"]]
            gap = f"{row['distance']:.1e}" if way == "sharded" else "–"
            gib = (f"{one / GIB:.1f}" for one in memory)
            lines.append([row["shape"], shown, *gib, f"{row[f'{way}_seconds']:.2f}", gap])
    print(markdown(columns, lines))


if __name__ == "__main__":
    main()
