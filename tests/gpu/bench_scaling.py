"""Tokens per second and GPU of the 14B train step on 1, 2, 4, 8 ranks: weak and strong scaling.

    NCCL_NVLS_ENABLE=0 PYTHONPATH=. python tests/gpu/bench_scaling.py --ranks 1 2 --out results
    NCCL_NVLS_ENABLE=0 PYTHONPATH=. torchrun --standalone --nproc-per-node 2 tests/gpu/bench_scaling.py --out results
    PYTHONPATH=. python tests/gpu/bench_scaling.py --ranks 1 2 --smoke            # a rehearsal on the CPU over gloo
    python tests/gpu/bench_scaling.py --ranks --out results --figure scaling.svg  # table and figure of what is there

A step is ``Updater.train``: reference pass, forward and backward pass, one sum over the ranks, AdamW. Weak: 24
trajectories (4 questions x 6) of 2 to 6 thousand tokens per rank; strong: 24 for all of them. LoRA of rank 16, bf16,
random weights of the true shape. Two steps each, after a warm-up; the faster one counts. First the checks: adapters
have the same hash on all ranks before and after, and the norm of the gradient of the same 24 trajectories is that of
one rank to 1 %. Rows are written as they come to scaling-N.json; those that earlier calls left in ``--out`` are in the
table too, so that 1 and 2 ranks may run at once on GPUs of their own. Each number of ranks has ``--limit`` seconds;
what they print is in scaling-N.log.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measured import markdown, now
from processes import in_time, show_end
from scaling_figure import draw

MEMBERS = 6


def main() -> None:
    """Measure as one of torchrun's ranks, or start torchrun once for each number of ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--shape", default="14B")
    parser.add_argument("--questions", type=int, default=4, help="per rank in the weak case, in all in the strong one")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=int, default=240, help="seconds for one number of ranks")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for scaling.json")
    parser.add_argument("--figure", type=Path, help="the picture (SVG or PNG)")
    given = parser.parse_args()
    if given.smoke:
        given.shape = "smoke"
    given.out.mkdir(parents=True, exist_ok=True)
    if "LOCAL_RANK" in os.environ:
        measure(given)
        return
    errors = [row for number in given.ranks for row in start(number, given)]
    files = sorted(given.out.glob("scaling-*.json"), key=lambda file: int(file.stem.partition("-")[2]))
    rows = [row for file in files for row in json.loads(file.read_text())] + errors
    print_table(rows)
    if given.figure:
        draw([row for row in rows if "error" not in row], given.figure)
    if problems := check(rows):
        sys.exit("\n".join(problems))


def start(number: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure with so many ranks, in processes of their own; returns the error as a row, if there is one."""
    rows_file(given, number).unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    command += [__file__, "--shape", given.shape, "--questions", str(given.questions), "--out", str(given.out)]
    command += ["--repeats", str(given.repeats), *(["--smoke"] if given.smoke else [])]
    begun, log = time.perf_counter(), given.out / f"scaling-{number}.log"
    environment = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1"} | os.environ
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        late = not in_time(process, given.limit, by=signal.SIGTERM, grace=60)  # torchrun ends its ranks
    error = f"over {given.limit} s" if late else f"exit code {process.returncode}" if process.returncode else ""
    print(f"{number} ranks: {time.perf_counter() - begun:.0f} s with start", file=sys.stderr)
    if not error:
        return []
    show_end(log, error)
    return [{"ranks": number, "error": error}]


def rows_file(given: argparse.Namespace, number: int) -> Path:
    """Where rank 0 leaves its figures."""
    return given.out / f"scaling-{number}.json"


# -- one of the ranks


def measure(given: argparse.Namespace) -> None:
    """Meet the others, make the updater, take the times; rank 0 writes them."""
    import torch

    from emailrl.model.lora import checksum
    from emailrl.ranks import RankGroup, joined

    settings = settings_of(given)
    with joined(settings) as ranks:
        begun = time.perf_counter()
        updater = make_updater(given.shape, settings, ranks)
        updater.synchronize()
        ranks.started()
        ready = time.perf_counter() - begun
        rows: list[dict[str, Any]] = []

        def verify() -> None:
            ranks.check_same("The trained adapter", checksum(updater.parameters))

        def follow() -> None:
            updater.take(ranks.scatter(None))

        if not ranks.is_first:
            assert isinstance(ranks, RankGroup)
            calls = iter([follow] * (1 + 2 * given.repeats) + [verify])
            ranks.follow(lambda: next(calls)())
            return
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        for row in steps(updater, given):
            rows.append(row | {"ready_seconds": ready, "device": device})
            rows_file(given, ranks.world).write_text(json.dumps(rows))
        with ranks.at_work():
            verify()
        for row in rows:
            row["hash"] = checksum(updater.parameters)[:12]
        rows_file(given, ranks.world).write_text(json.dumps(rows))


def settings_of(given: argparse.Namespace) -> Any:
    """Settings of the 14B step: the defaults, a rate at which steps stay comparable."""
    from emailrl.settings import load_settings

    changes = {"learning_rate": 1e-7, "warmup_steps": 0, "temperature": 1.0, "rank_timeout": 120}
    changes |= {"emailrl_device": "cpu", "max_tokens_per_micro_batch": 512} if given.smoke else {}
    return load_settings(changes, environ={}, cwd=given.out)


def make_updater(shape: str, settings: Any, ranks: Any) -> Any:
    """An updater on random weights, drawn alike on every rank, with an adapter that has moved."""
    import torch
    from train_step_sides import config_of, set_lora
    from transformers import AutoModelForCausalLM

    from emailrl.model.device import choose_device, choose_dtype
    from emailrl.model.load import prepare_training
    from emailrl.model.lora import with_fresh_adapter
    from emailrl.model.policy import Policy
    from emailrl.training.run.follower import build_updater

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


def steps(updater: Any, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Warm up, then time the weak and the strong case (the same on one rank)."""
    from train_step_sides import make_samples

    world = updater.across.world
    strong = make_samples(given.shape, questions=given.questions)
    weak = make_samples(given.shape, questions=given.questions * world)
    timed(updater, make_samples(given.shape, questions=max(2, world), seed=1)[: MEMBERS * 2 * world])
    for kind, samples in (("weak", weak), ("strong", strong)) if world > 1 else (("strong", strong),):
        times = [timed(updater, samples) for _ in range(given.repeats)]
        seconds, metrics = min(times, key=lambda one: one[0])
        tokens = sum(len(sample.token_ids) for sample in samples)
        yield {
            "ranks": world, "kind": kind, "trajectories": len(samples), "tokens": tokens, "seconds": seconds,
            "all_seconds": [one for one, _ in times], "tokens_per_second_per_gpu": tokens / seconds / world,
            "rank_tokens_mean": metrics.get("rank_tokens_mean"), "rank_tokens_max": metrics.get("rank_tokens_max"),
            "all_reduce_seconds": metrics.get("all_reduce_seconds", 0.0), "grad_norm": times[0][1]["grad_norm"],
        }  # fmt: skip


def timed(updater: Any, samples: list[Any]) -> tuple[float, dict[str, float]]:
    """Seconds of one step, and its metrics."""
    from train_step_sides import advantage

    begun = now()
    result = updater.train(samples, {one.trajectory_id: advantage(one) for one in samples}, step=1)
    return now() - begun, result.metrics


# -- what came of it


def check(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as it must be."""
    problems = [f"{row['ranks']} ranks: {row['error']}" for row in rows if "error" in row]
    norms = {row["ranks"]: row["grad_norm"] for row in rows if row.get("kind") == "strong"}
    one = norms.get(1)
    problems += [
        f"{ranks} ranks: the gradient's norm is {norm:.6g}, with one rank {one:.6g}"
        for ranks, norm in norms.items()
        if one is not None and abs(norm / one - 1) > 0.01
    ]
    return problems


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print Markdown: a row for each number of ranks and case."""
    done = [row for row in rows if "error" not in row]
    base = next((row["tokens_per_second_per_gpu"] for row in done if row["ranks"] == 1), None)
    columns = ["ranks", "case", "trajectories", "tokens", "seconds", "tokens/s per GPU", "of one rank"]
    columns += ["tokens per rank, mean / max", "all-reduce s", "gradient norm", "adapter"]
    print(f"\n{done[0]['device'] if done else 'nothing measured'}\n")
    print(markdown(columns, [cells(row, base) for row in rows]))


def cells(row: dict[str, Any], base: float | None) -> list[object]:
    """A row of the table."""
    if "error" in row:
        return [row["ranks"], row["error"]]
    mean, most = row["rank_tokens_mean"], row["rank_tokens_max"]
    return [
        row["ranks"], row["kind"], row["trajectories"], f"{row['tokens']:,}", f"{row['seconds']:.2f}",
        f"{row['tokens_per_second_per_gpu']:,.0f}",
        f"{row['tokens_per_second_per_gpu'] / base:.3f}" if base else "-",
        f"{mean:,.0f} / {most:,.0f} = {mean / most:.3f}" if mean else "-",
        f"{row['all_reduce_seconds']:.4f}", f"{row['grad_norm']:.5g}", row.get("hash", "not compared"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
