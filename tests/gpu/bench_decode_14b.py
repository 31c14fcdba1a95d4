"""What a decode step of the 14B shape costs in vLLM, setting by setting, and what each does to the log-probabilities.

    python tests/gpu/bench_decode_14b.py --gpus 0 1 --seconds 500 --out results       # some 45 s a variant and GPU
    python tests/gpu/bench_decode_14b.py --gpus 0 --variants today dual-stream fp8
    python tests/gpu/bench_decode_14b.py --smoke --variants today merged dual-stream         # a CPU build of vLLM, tiny

The engine is the product's: its own engine arguments (``emailrl.engines.vllm.arguments``), in this process, an adapter
of rank 16 on all linear layers, weights drawn on the GPU (load format ``dummy``, norms set to 1), CUDA graphs for the
batch sizes used. A variant adds engine arguments (as VLLM_ENGINE_ARGS would) or environment variables. ``--rows``
requests with contexts of 1,200 to 4,000 tokens sample ``--tokens`` tokens each, seeded and with log-probabilities, as
in the measured step; figures are medians over the steps in which all of them decode and none reads a prompt. On
the first variant also: requests without seeds, without log-probabilities, short contexts, few rows.

``|d| to today``: mean absolute difference of the log-probabilities that the variant gives a fixed text in prefill, to
those of ``today``; ``|d| own``: of its sampled tokens' log-probabilities while decoding to its own in prefill. The
product's probe allows 0.1 nats in bf16. Rows are written to decode_14b.jsonl as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from decode_variant import CONTEXT, measure
from measured import Row, markdown, note
from processes import environment, hand_out, itself, row_of
from random_adapter import LINEAR, write_adapter

Extra = dict[str, Any]
LEAN: Extra = {"specialize_active_lora": True, "lora_target_modules": LINEAR}
FP8: Extra = {"quantization": "fp8_per_tensor"}
DUAL, IN_TORCH = {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}, {"VLLM_DISABLED_KERNELS": "CutlassFP8ScaledMMLinearKernel"}
VARIANTS: dict[str, tuple[Extra, dict[str, str]]] = {
    "today": ({}, {}),
    "merged": ({"enable_lora": False}, {}),
    "dual-stream": ({}, DUAL),
    "lean-lora": (LEAN, {}),
    "lean-dual": (LEAN, DUAL),
    "fp8": (FP8, IN_TORCH),
    "fp8-weights": (FP8, {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}),
    "kv-fp8": ({"kv_cache_dtype": "fp8"}, {}),
    "fp8-lean-dual": (FP8 | LEAN, IN_TORCH | DUAL),
    "v1-runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "no-async": ({"async_scheduling": False}, {}),
    "full-decode": ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, {}),
    "piecewise": ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {}),
    "two-loras": ({"max_loras": 2}, {}),
    "fp8-cutlass": (FP8, {}),
    "no-sleep": ({"enable_sleep_mode": False}, {}),
}
"""Engine arguments and environment variables of vLLM 0.26, the most telling first."""


def main() -> None:
    """Measure one variant, or hand all of them out to the GPUs and print the table."""
    given = arguments()
    if given.variant:
        print(json.dumps(measure(given, VARIANTS[given.variant][0])), flush=True)
        os._exit(0)  # vLLM's own end may hang
    for folder in (given.work, given.out):
        folder.mkdir(parents=True, exist_ok=True)
    prepare(given)
    deadline = time.monotonic() + given.seconds

    def run(variant: str, gpu: str) -> Row:
        row: Row = {"variant": variant}
        if deadline - time.monotonic() < given.limit:
            return row | {"error": "no time left"}
        cache = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CACHE_ROOT": str(given.work / "cache")}
        row |= row_of(
            itself("--variant", variant), log=given.work / f"{variant}.log",
            limit=given.limit * (1.5 if variant == "today" else 1),  # it has more to measure
            environ=environment(gpu, **VARIANTS[variant][1] | cache),
        )  # fmt: skip
        note(row, given.out / "decode_14b.jsonl", unseen=["fixed"])
        return row

    print_table(given, hand_out(given.variants, given.gpus, run))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="14B")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--rows", type=int, default=38)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=500, help="no variant begins when less than --limit is left")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one variant")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "decode_14b")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="for decode_14b.jsonl")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        given.shape, given.rows, given.tokens, given.gpus = "smoke", 4, 24, [""]
    return given


def prepare(given: argparse.Namespace) -> None:
    """Write the shape's config and a random adapter."""
    from train_step_sides import config_of

    config = config_of(given.shape)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "float32" if given.smoke else "bfloat16"
    if given.smoke:
        config.head_dim = 64  # vLLM's least on a CPU
    config.save_pretrained(given.work / "model")
    write_adapter(given.work / "model", given.work / "adapter")


# -- the table


def print_table(given: argparse.Namespace, rows: list[Row]) -> None:
    """A row a variant; below, what was varied on the first."""
    today = next((row for row in rows if row["variant"] == "today" and "fixed" in row), None)
    print(f"\n{given.shape}, {given.rows} rows, contexts of {CONTEXT[0]:,} to {CONTEXT[1]:,} tokens")
    columns = ["variant", "ms a step", "p90", "tokens/s", "of today", "|d| to today", "|d| own", "start s"]
    print(markdown(columns, [cells(row, today) for row in rows]))
    for row in rows:
        for name, one in row.get("more", {}).items():
            print(
                f"{row['variant']}, {name}: {one.get('ms', one.get('error'))} ms, "
                f"{one.get('tokens_per_second', '–')} tokens/s"
            )


def cells(row: Row, today: Row | None) -> list[object]:
    """A row of the table."""
    if "ms" not in row:
        return [row["variant"], row.get("error", "?").replace("|", "/")[:120]]
    speed = gap = "–"
    if today is not None:
        speed = f"{row['tokens_per_second'] / today['tokens_per_second']:.2f}"
        if row["variant"] != "merged":
            gap = f"{statistics.fmean(abs(a - b) for a, b in zip(row['fixed'], today['fixed'], strict=True)):.4f}"
    return [row["variant"], row["ms"], row["ms_p90"], f"{row['tokens_per_second']:,}", speed,
            gap, f"{row['own']:.4f}", row["start"]]  # fmt: skip


if __name__ == "__main__":
    main()
