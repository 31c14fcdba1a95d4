"""What vLLM in this process holds of a GPU awake and asleep, beside what ``emailrl plan`` takes it to hold.

    python tests/gpu/bench_vllm_memory.py --shape 0.6B 4B           # about 75 and 110 seconds

A trainer with an adapter of rank 16 over random weights of the true shapes, vLLM beside it with its default share. Each
shape runs in a process of its own. Figures are what the driver says is taken, less what was before vLLM started.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from measured import markdown, note
from processes import itself, row_of

GIB = 2**30


def main() -> None:
    """Measure each shape and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["0.6B"])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--limit", type=int, default=300, help="seconds a shape may take")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, eager=given.eager)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in given.shape:
            row = row_of(itself("--one", shape), log=Path(folder) / f"{shape}.log", limit=given.limit)
            rows.append({"shape": shape} | row)
            note(rows[-1], None)
    columns = ["shape", "awake", "planned", "asleep", "planned", "cache tokens", "planned", "not weights or cache",
               "wake s"]  # fmt: skip
    cells = [
        [row["shape"], row["error"]] if "error" in row else [
            row["shape"], f"{row['awake']:.2f} GiB", f"{row['planned_awake']:.2f}",
            ", ".join(f"{one:.2f} GiB" for one in row["asleep"]), f"{row['planned_asleep']:.2f}",
            f"{row['cache_tokens']:,}", f"{row['planned_cache_tokens']:,}", f"{row['work']:.2f} GiB",
            f"{row['wake']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    print(markdown(columns, cells))


def measure(shape: str, *, eager: bool) -> dict[str, Any]:
    """Start vLLM beside a trainer, let it sleep and wake, and say what it holds."""
    import torch
    from train_step_sides import save_model

    from emailrl.engines import build_engine
    from emailrl.model.load import load_policy
    from emailrl.plan import make_plan, this_machine
    from emailrl.settings import load_settings

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / shape
        save_model(shape, model)
        torch.cuda.empty_cache()
        values = {"model_name": str(model), "engine": "vllm", "lora_rank": 16, "temperature": 1.0}
        settings = load_settings(
            values | {"vllm_enforce_eager": eager, "vllm_enable_sleep": True}, environ={}, cwd=Path(folder)
        )
        policy = load_policy(settings, trainable=True)
        planned = make_plan(settings, this_machine())
        adapter = Path(folder) / "adapter"
        policy.save_adapter(adapter)
        with closing(build_engine(settings, policy)) as engine:
            before = taken()
            engine.load_adapter(adapter, "v-1")
            awake = taken() - before
            config: Any = engine._engine.vllm_config  # type: ignore[attr-defined]
            tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
            asleep = []
            for _ in range(2):
                engine.release()
                asleep.append(taken() - before)
                start = time.perf_counter()
                engine.resume()
                wake = time.perf_counter() - start
    share = settings.vllm.vllm_gpu_memory_utilization * planned.memory.device_bytes
    bytes_of = planned.job.shape.weight_bytes(2) + tokens * planned.job.shape.cache_bytes(2)
    return {
        "awake": awake / GIB, "planned_awake": planned.memory.sampling["vLLM"] / GIB,
        "asleep": [one / GIB for one in asleep], "planned_asleep": planned.memory.training["vLLM"] / GIB,
        "cache_tokens": tokens, "planned_cache_tokens": planned.memory.cache_tokens, "work": (share - bytes_of) / GIB,
        "wake": wake,
    }  # fmt: skip


def taken() -> int:
    """Bytes of the GPU that are taken, torch's own reserve given back first."""
    import gc

    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    main()
