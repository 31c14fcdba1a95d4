"""Tokens per second and GPU of the train step on 1, 2, 4, 8 ranks, weak and strong scaling; the base whole or sharded.

    python tests/gpu/bench_scaling.py --ranks 1 2 --out results    # GPUs of its own: --gpus 4,5,6,7
    python tests/gpu/bench_scaling.py --ranks 2 --shape 14B 32B --base whole sharded offloaded --questions 1 \\
        --set gradient_checkpointing=on max_tokens_per_micro_batch=8192

A step is ``Updater.train``: reference pass, forward and backward pass, one sum over the ranks, AdamW. Weak: 24
trajectories (4 questions x 6) of 2 to 6 thousand tokens per rank; strong: 24 for all of them. LoRA of rank 16, bf16,
weights of the true shape: parts of one random buffer, copied for a whole base and cut up for a sharded one, so that
65 GB are neither drawn nor read. Two steps each, after a warm-up; the faster one counts, and rank 0's memory. Checked:
adapters have the same hash on all ranks before and after, and the norm of the gradient of the same trajectories is
that of the fewest ranks with a whole base to 1 %. Cases may run at once on GPUs of their own: the table has all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from runner import Bench, Given, Row, forget_peak, now, peak_gib, torchrun
from shapes import advantage, config_of, make_samples, set_lora
from transformers import AutoModelForCausalLM

from emailrl.model.lora import checksum, with_fresh_adapter
from emailrl.model.policy import Policy, choose_device, choose_dtype, prepare_training
from emailrl.model.shard import shard_base
from emailrl.ranks import RankGroup, joined
from emailrl.settings import load_settings
from emailrl.training.algorithms import resolve
from emailrl.training.team import build_updater

MEMBERS = 6


def cases(given: Given) -> list[Row]:
    return [
        {"case": f"{shape}, {number} ranks, {base}", "shape": shape, "ranks": number, "base": base}
        for shape in given.shape
        for number in given.ranks
        for base in given.base
        if number > 1 or base == "whole"
    ]


def measure(given: Given, case: Row) -> list[Row]:
    # The defaults, at a rate at which steps stay comparable.
    changes = {"learning_rate": 1e-7, "warmup_steps": 0, "temperature": 1.0, "rank_timeout": 120}
    changes |= {"emailrl_device": "cpu", "max_tokens_per_micro_batch": 512} if given.smoke else {}
    settings = load_settings(changes | dict(one.split("=", 1) for one in given.set), environ={}, cwd=given.out)
    with joined(settings.training, device=settings.model.device) as ranks:
        forget_peak()
        updater = make_updater(case["shape"], case["base"], settings, ranks)
        loading = peak_gib()
        updater.synchronize()
        ranks.started()

        def verify() -> None:
            ranks.check_same("The trained adapter", checksum(updater.parameters))

        def follow() -> None:
            updater.take(ranks.scatter(None))

        if not ranks.is_first:
            assert isinstance(ranks, RankGroup)
            calls = iter([follow] * (1 + 2 * given.repeats) + [verify])
            ranks.follow(lambda: next(calls)())
            return []
        rows = list(steps(updater, case["shape"], given))
        with ranks.at_work():
            verify()
        return [row | {"load_peak": loading, "hash": checksum(updater.parameters)[:12]} for row in rows]


def make_updater(shape: str, base: str, settings: Any, ranks: Any) -> Any:
    """An updater on random weights, drawn alike on every rank, with an adapter that has moved."""
    device = choose_device(settings.model.device)
    dtype = choose_dtype(settings.model.dtype, device)
    model = random_base(shape, dtype, device, copied=base == "whole")
    model = with_fresh_adapter(model, settings.lora, seed=settings.training.seed)
    if base != "whole":
        shard_base(model, ranks.host_mesh(), offload=base == "offloaded")
    set_lora(model)
    model.eval()
    if notes := prepare_training(model, settings.training, "random", device):
        raise SystemExit(f"not trained as the step of emailrl train is: {notes}")
    tokenizer: Any = SimpleNamespace(pad_token_id=257)
    facts = {"trainable": True, "lora": {"rank": settings.lora.lora_rank}, "sharded": base != "whole"}
    policy = Policy(model, tokenizer, "random", "random", device, dtype, **facts)
    return build_updater(policy, settings, resolve(settings), ranks=ranks)


def random_base(shape: str, dtype: Any, device: Any, *, copied: bool) -> Any:
    """The frozen model on the device; its parameters are parts of one random buffer, or copies of them."""
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
            setattr(module, name, torch.nn.Parameter(value.clone() if copied else value, requires_grad=False))
    backbone = model.base_model
    backbone.rotary_emb = type(backbone.rotary_emb)(config).to(device)  # its buffer is computed, not stored
    model.tie_weights()
    return model


def steps(updater: Any, shape: str, given: Given) -> Iterator[Row]:
    """Warm up, then time the weak and the strong case (the same on one rank)."""
    world = updater.across.world
    strong = make_samples(shape, questions=given.questions)
    weak = make_samples(shape, questions=given.questions * world)
    timed(updater, make_samples(shape, questions=max(2, world), seed=1)[: MEMBERS * 2 * world])
    for kind, samples in (("weak", weak), ("strong", strong)) if world > 1 else (("strong", strong),):
        forget_peak()
        times = [timed(updater, samples) for _ in range(given.repeats)]
        seconds, metrics = min(times, key=lambda one: one[0])
        tokens = sum(len(sample.token_ids) for sample in samples)
        yield {
            "kind": kind, "trajectories": len(samples), "tokens": tokens, "seconds": seconds, "peak": peak_gib(),
            "all_seconds": [one for one, _ in times], "tokens_per_second_per_gpu": tokens / seconds / world,
            "rank_tokens_mean": metrics.get("rank_tokens_mean"), "rank_tokens_max": metrics.get("rank_tokens_max"),
            "all_reduce_seconds": metrics.get("all_reduce_seconds", 0.0), "grad_norm": times[0][1]["grad_norm"],
        }  # fmt: skip


def timed(updater: Any, samples: list[Any]) -> tuple[float, dict[str, float]]:
    begun = now()
    result = updater.train(samples, {one.trajectory_id: advantage(one) for one in samples}, step=1)
    return now() - begun, result.metrics


def compare(rows: list[Row]) -> None:
    """Add the share of the speed of the fewest ranks with a whole base; a gradient that is not theirs is an error."""
    rows.sort(key=lambda row: (row["shape"], row["ranks"], row["base"] != "whole"))
    firsts: dict[str, Row] = {}
    for row in rows:
        if "error" in row:
            continue
        first = firsts.setdefault(row["shape"], row) if row["kind"] == "strong" else firsts.get(row["shape"], row)
        row["of_one"] = row["tokens_per_second_per_gpu"] / first["tokens_per_second_per_gpu"]
        if row["kind"] == "strong" and abs(row["grad_norm"] / first["grad_norm"] - 1) > 0.01:
            row["error"] = f"the gradient's norm is {row['grad_norm']:.6g}, that of {first['case']} not"


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "shape": "shape", "ranks": "ranks", "base": "base", "scaling": "kind", "trajectories": "trajectories",
        "tokens": "tokens:,", "seconds": "seconds:.2f", "tokens/s per GPU": "tokens_per_second_per_gpu:,.0f",
        "of the first": "of_one:.3f", "peak loading, GiB": "load_peak:.1f", "of the step": "peak:.1f",
        "tokens per rank, mean": "rank_tokens_mean:,.0f", "max": "rank_tokens_max:,.0f",
        "all-reduce s": "all_reduce_seconds:.4f", "gradient norm": "grad_norm:.5g", "adapter": "hash",
    },
    {
        "--ranks": {"nargs": "*", "type": int, "default": [1, 2]},
        "--shape": {"nargs": "+", "default": ["14B"]},
        "--base": {"nargs": "+", "default": ["whole"], "choices": ["whole", "sharded", "offloaded"]},
        "--questions": {"type": int, "default": 4, "help": "per rank in the weak case, in all in the strong one"},
        "--repeats": {"type": int, "default": 2},
        "--set": {"nargs": "*", "default": [], "metavar": "NAME=VALUE", "help": "settings"},
    },
    cases,
    smoke={"shape": ["smoke"]},
    shapes=lambda given: [],
    launcher=torchrun,
    add=compare,
    gpus="all",
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
