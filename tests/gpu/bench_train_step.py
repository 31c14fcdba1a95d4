"""Seconds per forward and backward pass of one GRPO batch: emailrl, TRL and Unsloth's layers side by side.

    python tests/gpu/bench_train_step.py --shape 4B                     # every side, each in a process of its own
    python tests/gpu/bench_train_step.py --shape 0.6B 4B --sides fast lean
    python tests/gpu/bench_train_step.py --smoke                        # a rehearsal on the CPU, figures mean nothing

48 trajectories (8 questions x 6) of 2 to 6 thousand tokens, LoRA of rank 16 on every linear layer, bf16, random weights
of the true shapes. Agreement is measured on two trajectories: the largest difference of a log-probability and the
relative distance ||g - g'|| / ||g'|| of the adapter's whole gradient, against transformers' own layers (padded, in
bf16) and against the same in float32, where bf16 itself shows how far rounding goes.

``lean`` to ``exact`` compute a prefix that trajectories share in a micro-batch once, but for ``apart``, which is
``fast`` without. Tokens a second are those of the trajectories, however often a prefix is computed; ``computed`` says
how many went through the layers, and MFU counts these.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from measured import Row, markdown, note
from processes import itself, row_of

PEAK_TFLOPS = 790
SIDES = ["float32", "padded", "packed", "trl", "unsloth", "lean", "leanest", "apart", "fast", "wide", "exact"]
UNTIMED = ("float32", "exact")


def main() -> None:
    """Run the sides and print one table a shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["4B"])
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--folder", type=Path, default=None, help="where weights are written; default a temporary one")
    parser.add_argument("--out", type=Path, default=None, help="results as JSON lines")
    parser.add_argument("--limit", type=int, default=300, help="seconds a side may take")
    parser.add_argument("--trl-ways", default="8,8L,4,4L", help="batch sizes TRL may choose from, L with Liger")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(json.dumps(measure(given.shape[0], given.side, given.folder, given.trl_ways)))
        return
    for shape in ["smoke"] if given.smoke else given.shape:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (given.folder or Path(temporary)) / shape
            table = []
            for side in ["save", *given.sides]:
                command = itself("--shape", shape, "--side", side, "--folder", folder)
                row = row_of(command, log=Path(temporary) / f"{side}.log", limit=given.limit)
                table.append({"shape": shape, "side": side} | row)
                note(table[-1], given.out)
        print_table(shape, table[1:])


def measure(shape: str, side: str, folder: Path, trl_ways: str) -> dict[str, Any]:
    """What a side's process does: warm up, agree, and take the time."""
    if side == "unsloth":
        import unsloth  # noqa: F401  before transformers, which it patches
    import torch
    from train_step_sides import make_samples, save_model, timed

    if side == "save":
        save_model(shape, folder)
        return {}
    samples = make_samples(shape)
    result: Row = {"tokens": sum(len(one.token_ids) for one in samples)}
    result["trainable"] = sum(one.num_trainable for one in samples)
    pair = samples[:2]
    if side == "trl":
        ran, result["setting"], result["ways"] = best_trl(folder, samples, trl_ways)
    else:
        ran, result["setting"] = make_side(side, folder)
    logprobs = ran.run(pair)
    gradients = ran.gradients()
    result |= agreement(folder, side, logprobs, gradients)
    ran.run(samples[2:10])
    if side not in UNTIMED:
        seconds, peak = timed(ran, samples, 1 if side in ("trl", "padded") else 2)
        result |= {"seconds": seconds, "peak_gib": peak, "tokens_per_second": result["tokens"] / seconds}
        work = ran.work(samples)
        result["computed"] = work.tokens
        result["mfu"] = flops(shape, work, result["trainable"]) / seconds / PEAK_TFLOPS / 1e12
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name()
    return result


def make_side(side: str, folder: Path) -> tuple[Any, str]:
    """Load one of emailrl's sides, or Unsloth's layers under emailrl's head."""
    from train_step_sides import lora_settings, policy_side

    if side in ("float32", "padded"):
        dtype = "fp32" if side == "float32" else "bf16"
        settings = lora_settings(folder, dtype=dtype, packing=False, fused_layers=False, gradient_checkpointing="on")
        return policy_side(settings, 16384), f"transformers' layers, padded, {dtype}"
    if side == "packed":
        settings = lora_settings(folder, fused_layers=False, prefix_sharing=False, gradient_checkpointing="on")
        return policy_side(settings, 16384), "transformers' layers, packed"
    if side == "unsloth":
        settings = lora_settings(folder, backend="unsloth", gradient_checkpointing="on")
        return policy_side(settings, 16384), "masked head, padded, checkpointing"
    checkpointing, dtype, max_tokens = {
        "fast": ("auto", "bf16", 16384),
        "apart": ("auto", "bf16", 16384),
        "wide": ("auto", "bf16", 32768),
        "lean": ("selective", "bf16", 8192),
        "leanest": ("on", "bf16", 4096),
        "exact": ("on", "fp32", 16384),
    }[side]
    shares = side != "apart"
    settings = lora_settings(folder, dtype=dtype, gradient_checkpointing=checkpointing, prefix_sharing=shares)
    setting = f"{checkpointing}, {max_tokens} tokens, {dtype}{'' if shares else ', no prefix sharing'}"
    return policy_side(settings, max_tokens), setting


def best_trl(folder: Path, samples: list[Any], ways: str) -> tuple[Any, str, dict[str, float | None]]:
    """TRL in whichever of ``ways`` is fastest on eight trajectories, and the seconds of each; None does not fit."""
    import gc

    import torch
    from train_step_sides import timed, trl_side

    choices = {one: (int(one.rstrip("L")), one.endswith("L")) for one in ways.split(",")}
    seconds: dict[str, float | None] = {}
    for name, (rows, liger) in choices.items() if len(choices) > 1 else ():
        try:
            side = trl_side(folder, rows, liger)
            side.run(samples[:rows])
            seconds[name] = timed(side, samples[8:16], 1)[0]
        except torch.cuda.OutOfMemoryError:
            seconds[name] = None
        finally:
            side = None
            gc.collect()
            torch.cuda.empty_cache()
    rows, liger = choices[min(choices, key=lambda name: seconds.get(name) or float("inf"))]
    return trl_side(folder, rows, liger), f"batches of {rows}{', Liger' if liger else ''}", seconds


def agreement(folder: Path, side: str, logprobs: list[Any], gradients: dict[str, Any]) -> dict[str, float]:
    """Keep what the reference sides found, and compare every other side with it."""
    import torch

    flat = torch.cat([one.float().cpu() for one in logprobs])
    if side in ("float32", "padded"):
        torch.save((flat, gradients), folder.parent / f"{folder.name}-{side}.pt")
    found = {}
    for reference in ("padded", "float32"):
        path = folder.parent / f"{folder.name}-{reference}.pt"
        if side == reference or not path.exists():
            continue
        other, other_gradients = torch.load(path)
        distance = sum(float((gradients[name] - one).square().sum()) for name, one in other_gradients.items())
        size = sum(float(one.square().sum()) for one in other_gradients.values())
        found[f"logprob_{reference}"] = float((flat - other).abs().max())
        found[f"logprob_mean_{reference}"] = float((flat - other).abs().mean())
        found[f"gradient_{reference}"] = (distance / size) ** 0.5
    return found


def flops(shape: str, work: Any, trained: int) -> float:
    """Operations of a side's ``work``: no recomputation, no gradient of frozen weights."""
    from train_step_sides import config_of

    config = config_of(shape)
    inner = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * inner + 2 * keys + 3 * config.intermediate_size)
    attention = work.pairs * inner * 2 * 3
    linear = 4 * work.tokens * layer
    return float(config.num_hidden_layers * (linear + attention) + 4 * trained * config.hidden_size * config.vocab_size)


def print_table(shape: str, rows: list[dict[str, Any]]) -> None:
    """Print Markdown: one row a side."""
    by_side = {row["side"]: row for row in rows if "seconds" in row}
    if by_side:
        one = next(iter(by_side.values()))
        share = one["trainable"] / one["tokens"]
        print(f"\n{shape}: {one['tokens']:,} tokens, {share:.1%} trainable, {one.get('device', 'CPU')}\n")
    columns = ["side", "setting", "computed", "seconds", "tokens/s", "x TRL", "x Unsloth", "peak GiB", "MFU"]
    columns += ["log-prob vs bf16, fp32 (max)", "gradient vs bf16, fp32"]
    print(markdown(columns, [cells(row, by_side) for row in rows]))


def cells(row: Row, by_side: dict[str, Row]) -> list[str]:
    """A row of the table."""
    if "error" in row:
        return [row["side"], row["error"]]
    if "seconds" not in row:
        row |= dict.fromkeys(("computed", "seconds", "tokens_per_second", "peak_gib", "mfu"), float("nan"))
    ratios = [by_side[peer]["seconds"] / row["seconds"] if peer in by_side else None for peer in ("trl", "unsloth")]
    return [
        row["side"], row["setting"], f"{row['computed']:,.0f}", f"{row['seconds']:.2f}",
        f"{row['tokens_per_second']:,.0f}",
        *(f"{ratio:.2f}" if ratio else "-" for ratio in ratios),
        f"{row['peak_gib']:.1f}", f"{row['mfu']:.1%}",
        ", ".join(f"{row[key]:.2g}" for key in ("logprob_padded", "logprob_float32") if key in row) or "-",
        ", ".join(f"{row[key]:.2g}" for key in ("gradient_padded", "gradient_float32") if key in row) or "-",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
