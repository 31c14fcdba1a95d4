"""Seconds per forward and backward pass of one GRPO batch: emailrl, TRL and Unsloth's layers side by side.

    python tests/gpu/bench_train_step.py --shape 0.6B 4B --sides fast lean

48 trajectories (8 questions x 6) of 2 to 6 thousand tokens, LoRA of rank 16 on every linear layer, bf16, random weights
of the true shapes. ``selective`` to ``wide`` compute a prefix that trajectories share in a micro-batch once, but for
``apart``, which is ``fast`` without. Tokens a second are those of the trajectories, however often a prefix is computed;
``computed`` says how many went through the layers, and MFU counts these. That sides agree: ``test_layers``.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from runner import Bench, Given, Row

PEAK_TFLOPS = 790
OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "padded": (16384, {"packing": False, "fused_layers": False, "gradient_checkpointing": "on"}),
    "packed": (16384, {"fused_layers": False, "prefix_sharing": False, "gradient_checkpointing": "on"}),
    "unsloth": (16384, {"backend": "unsloth", "gradient_checkpointing": "on"}),
    "selective": (8192, {"gradient_checkpointing": "selective"}),
    "lean": (4096, {"gradient_checkpointing": "on"}),
    "apart": (16384, {"gradient_checkpointing": "auto", "prefix_sharing": False}),
    "fast": (16384, {"gradient_checkpointing": "auto"}),
    "wide": (32768, {"gradient_checkpointing": "auto"}),
}
"""Tokens of a micro-batch, and settings."""
SIDES = ["trl", *OURS]


def measure(given: Given, case: Row) -> Row:
    shape, side = case["shape"], case["side"]
    if side == "unsloth":
        import unsloth  # noqa: F401  before transformers, which it patches
    from shapes import make_samples
    from train_step_sides import lora_settings, policy_side, timed

    folder, samples = given.folder / shape, make_samples(shape)
    trained = sum(one.num_trainable for one in samples)
    row: Row = {"tokens": sum(len(one.token_ids) for one in samples), "trainable": trained}
    if side == "trl":
        ran, row["setting"], row["ways"] = best_trl(folder, samples, given.trl_ways)
    else:
        tokens, settings = OURS[side]
        ran = policy_side(lora_settings(folder, **settings), tokens)
        row["setting"] = ", ".join([f"{tokens} tokens", *(f"{name} {value}" for name, value in settings.items())])
    ran.run(samples[:10])
    seconds, peak = timed(ran, samples, 1 if side in ("trl", "padded") else 2)
    work = ran.work(samples)
    row |= {"seconds": seconds, "peak_gib": peak, "tokens_per_second": row["tokens"] / seconds}
    return row | {"computed": work.tokens, "mfu": flops(shape, work, trained) / seconds / PEAK_TFLOPS / 1e12}


def best_trl(folder: Path, samples: list[Any], ways: str) -> tuple[Any, str, dict[str, float]]:
    """TRL in whichever of ``ways`` is fastest on eight trajectories, and the seconds of those that fit."""
    import torch
    from train_step_sides import timed, trl_side

    choices = {one: (int(one.rstrip("L")), one.endswith("L")) for one in ways.split(",")}
    seconds: dict[str, float] = {}
    for name, (rows, liger) in choices.items() if len(choices) > 1 else ():
        try:
            side = trl_side(folder, rows, liger)
            side.run(samples[:rows])
            seconds[name] = timed(side, samples[8:16], 1)[0]
        except torch.cuda.OutOfMemoryError:
            pass  # it is none of the ways then
        finally:
            side = None
            gc.collect()
            torch.cuda.empty_cache()
    rows, liger = choices[min(choices, key=lambda name: seconds.get(name, float("inf")))]
    return trl_side(folder, rows, liger), f"batches of {rows}{', Liger' if liger else ''}", seconds


def flops(shape: str, work: Any, trained: int) -> float:
    """Operations of a side's ``work``: no recomputation, no gradient of frozen weights."""
    from shapes import config_of

    config = config_of(shape)
    inner, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * inner + 2 * keys + 3 * config.intermediate_size)
    attention, linear = work.pairs * inner * 2 * 3, 4 * work.tokens * layer
    return float(config.num_hidden_layers * (linear + attention) + 4 * trained * config.hidden_size * config.vocab_size)


def add_ratios(rows: list[Row]) -> None:
    seconds = {(row["shape"], row["side"]): row["seconds"] for row in rows if "seconds" in row}
    for row in rows:
        for peer in ("trl", "unsloth"):
            if "seconds" in row and (row["shape"], peer) in seconds:
                row[f"x_{peer}"] = seconds[row["shape"], peer] / row["seconds"]


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "shape": "shape", "side": "side", "setting": "setting", "computed": "computed:,.0f", "seconds": "seconds:.2f",
        "tokens/s": "tokens_per_second:,.0f", "x TRL": "x_trl:.2f", "x Unsloth": "x_unsloth:.2f",
        "peak GiB": "peak_gib:.1f", "MFU": "mfu:.1%",
    },
    {
        "--shape": {"nargs": "+", "default": ["4B"]},
        "--sides": {"nargs": "+", "default": SIDES, "choices": SIDES},
        "--trl-ways": {"default": "8,8L,4,4L", "help": "batch sizes TRL may choose from, L with Liger"},
    },
    smoke={"shape": ["smoke"], "sides": ["padded", "fast"]},
    add=add_ratios,
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
