"""What vLLM in this process holds of a GPU awake and asleep, beside what ``emailrl plan`` takes it to hold.

    python tests/gpu/bench_vllm_memory.py --shape 0.6B 4B           # about 75 and 110 seconds

A trainer with an adapter of rank 16 over random weights of the true shapes, vLLM beside it with its default share. Each
shape runs in a process of its own. Figures are what the driver says is taken, less what was before vLLM started.
"""

from __future__ import annotations

import gc
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from runner import Bench, Given, Row

GIB = 2**30


def measure(given: Given, case: Row) -> Row:
    from emailrl.engines import build_engine
    from emailrl.model.load import load_policy
    from emailrl.plan import make_plan, this_machine
    from emailrl.settings import load_settings

    values = {"model_name": str(given.folder / case["shape"]), "engine": "vllm", "lora_rank": 16, "temperature": 1.0}
    values |= {"vllm_enforce_eager": given.eager, "vllm_enable_sleep": True}
    settings = load_settings(values, environ={}, cwd=Path(given.out))
    policy = load_policy(settings, trainable=True)
    planned = make_plan(settings, this_machine())
    adapter = given.out / f"adapter-{case['shape']}"
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
        "asleep": ", ".join(f"{one / GIB:.2f}" for one in asleep),
        "planned_asleep": planned.memory.training["vLLM"] / GIB,
        "cache_tokens": tokens, "planned_cache_tokens": planned.memory.cache_tokens, "work": (share - bytes_of) / GIB,
        "wake": wake,
    }  # fmt: skip


def taken() -> int:
    """Bytes of the GPU that are taken, torch's own reserve given back first."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "shape": "shape", "awake GiB": "awake:.2f", "planned": "planned_awake:.2f", "asleep GiB": "asleep",
        "planned ": "planned_asleep:.2f", "cache tokens": "cache_tokens:,", "planned  ": "planned_cache_tokens:,",
        "not weights or cache GiB": "work:.2f", "wake s": "wake:.2f",
    },
    {
        "--shape": {"nargs": "+", "default": ["0.6B"]},
        "--eager": {"action": "store_true", "help": "without CUDA graphs"},
    },
    lambda given: [{"case": shape, "shape": shape} for shape in given.shape],
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
