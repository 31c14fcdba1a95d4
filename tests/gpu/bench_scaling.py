"""Tokens per second and GPU of the 14B train step on 1, 2, 4, 8 ranks: weak and strong scaling.

    python tests/gpu/bench_scaling.py --ranks 1 2 --out results    # GPUs of its own: --gpus 4,5,6,7

A step is ``Updater.train``: reference pass, forward and backward pass, one sum over the ranks, AdamW. Weak: 24
trajectories (4 questions x 6) of 2 to 6 thousand tokens per rank; strong: 24 for all of them. LoRA of rank 16, bf16,
random weights of the true shape. Two steps each, after a warm-up; the faster one counts. Checked: adapters have the
same hash on all ranks before and after, and the norm of the gradient of the same 24 trajectories is that of one rank
to 1 %. Numbers of ranks may run at once on GPUs of their own: the table has all rows in ``--out``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from runner import Bench, Given, Row, now, torchrun
from shapes import advantage, config_of, make_samples, set_lora

MEMBERS = 6


def measure(given: Given, case: Row) -> list[Row]:
    from emailrl.model.lora import checksum
    from emailrl.ranks import RankGroup, joined
    from emailrl.settings import load_settings

    # The defaults, at a rate at which steps stay comparable.
    changes = {"learning_rate": 1e-7, "warmup_steps": 0, "temperature": 1.0, "rank_timeout": 120}
    changes |= {"emailrl_device": "cpu", "max_tokens_per_micro_batch": 512} if given.smoke else {}
    settings = load_settings(changes, environ={}, cwd=given.out)
    with joined(settings.training, device=settings.model.device) as ranks:
        updater = make_updater(given.shape, settings, ranks)
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
        rows = list(steps(updater, given))
        with ranks.at_work():
            verify()
        return [row | {"hash": checksum(updater.parameters)[:12]} for row in rows]


def make_updater(shape: str, settings: Any, ranks: Any) -> Any:
    """An updater on random weights, drawn alike on every rank, with an adapter that has moved."""
    import torch
    from transformers import AutoModelForCausalLM

    from emailrl.model.load import choose_device, choose_dtype, prepare_training
    from emailrl.model.lora import with_fresh_adapter
    from emailrl.model.policy import Policy
    from emailrl.training.team import build_updater

    device = choose_device(settings.model.device)
    dtype = choose_dtype(settings.model.dtype, device)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype, attn_implementation="sdpa")
    model.requires_grad_(False)
    model = with_fresh_adapter(model, settings.lora, seed=settings.training.seed)
    set_lora(model)
    model.eval()
    if notes := prepare_training(model, settings.training, "random", device):
        raise SystemExit(f"not trained as the 14B step is: {notes}")
    tokenizer: Any = SimpleNamespace(pad_token_id=257)
    lora = {"rank": settings.lora.lora_rank}
    policy = Policy(model, tokenizer, "random", "random", device, dtype, trainable=True, lora=lora)
    return build_updater(policy, settings, ranks=ranks)


def steps(updater: Any, given: Given) -> Iterator[Row]:
    """Warm up, then time the weak and the strong case (the same on one rank)."""
    world = updater.across.world
    strong = make_samples(given.shape, questions=given.questions)
    weak = make_samples(given.shape, questions=given.questions * world)
    timed(updater, make_samples(given.shape, questions=max(2, world), seed=1)[: MEMBERS * 2 * world])
    for kind, samples in (("weak", weak), ("strong", strong)) if world > 1 else (("strong", strong),):
        times = [timed(updater, samples) for _ in range(given.repeats)]
        seconds, metrics = min(times, key=lambda one: one[0])
        tokens = sum(len(sample.token_ids) for sample in samples)
        yield {
            "ranks": world, "case": f"{world} ranks",
            "kind": kind, "trajectories": len(samples), "tokens": tokens, "seconds": seconds,
            "all_seconds": [one for one, _ in times], "tokens_per_second_per_gpu": tokens / seconds / world,
            "rank_tokens_mean": metrics.get("rank_tokens_mean"), "rank_tokens_max": metrics.get("rank_tokens_max"),
            "all_reduce_seconds": metrics.get("all_reduce_seconds", 0.0), "grad_norm": times[0][1]["grad_norm"],
        }  # fmt: skip


def timed(updater: Any, samples: list[Any]) -> tuple[float, dict[str, float]]:
    begun = now()
    result = updater.train(samples, {one.trajectory_id: advantage(one) for one in samples}, step=1)
    return now() - begun, result.metrics


def compare(rows: list[Row]) -> None:
    """Add the share of one rank's speed; a gradient that is not one rank's is an error."""
    rows.sort(key=lambda row: row["ranks"])
    one = next((row for row in rows if row["ranks"] == 1 and "error" not in row), None)
    for row in rows if one else ():
        if "error" not in row:
            row["of_one"] = row["tokens_per_second_per_gpu"] / one["tokens_per_second_per_gpu"]
            if row["kind"] == "strong" and abs(row["grad_norm"] / one["grad_norm"] - 1) > 0.01:
                row["error"] = f"the gradient's norm is {row['grad_norm']:.6g}, with one rank {one['grad_norm']:.6g}"


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "ranks": "ranks", "scaling": "kind", "trajectories": "trajectories", "tokens": "tokens:,",
        "seconds": "seconds:.2f", "tokens/s per GPU": "tokens_per_second_per_gpu:,.0f", "of one rank": "of_one:.3f",
        "tokens per rank, mean": "rank_tokens_mean:,.0f", "max": "rank_tokens_max:,.0f",
        "all-reduce s": "all_reduce_seconds:.4f", "gradient norm": "grad_norm:.5g", "adapter": "hash",
    },
    {
        "--ranks": {"nargs": "*", "type": int, "default": [1, 2]},
        "--shape": {"default": "14B"},
        "--questions": {"type": int, "default": 4, "help": "per rank in the weak case, in all in the strong one"},
        "--repeats": {"type": int, "default": 2},
    },
    lambda given: [{"case": f"{number} ranks", "ranks": number} for number in given.ranks],
    smoke={"shape": "smoke"},
    shapes=lambda given: [],
    launcher=torchrun,
    add=compare,
    gpus="all",
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
