"""Estimate the memory, tokens, time and cost of a run, and suggest changes if it does not fit.

Reads the same settings and questions as train. Of the model it reads only config.json, and not even that for common
Qwen models. With several GPUs (--num-gpus, --nodes) it divides them into trainers and vLLM servers and estimates
tokens per second; with --engine vllm and no VLLM_URLS, all of them train and sample in turn. Without these options it
plans the ranks that train starts, EMAILRL_NPROC on each of EMAILRL_NNODES hosts.
Without --gpu it plans for this machine and also reports missing packages. Exits 1 if the run does not fit or cannot
start. GRADIENT_CHECKPOINTING, LORA_RANK and other settings that affect memory are read from the environment, .env
and emailrl.toml, as in train.

Examples:

\b
  emailrl plan --gpu H200 --price 3.5
  emailrl plan --gpu A100-80 --model Qwen/Qwen3-8B --engine vllm
  emailrl plan --gpu H100 --num-gpus 8 --nodes 16 --network 400
  LORA_RANK=8 emailrl plan --gpu 4090 --model Qwen/Qwen3-0.6B --preset small
  emailrl plan --run outputs/grpo_masked --max-steps 400
  emailrl plan --model nano --gpu CPU --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emailrl.cli.options import Json, Overrides, Preset, Trust, path_option, setting_options
from emailrl.cli.output import print_json, result_console
from emailrl.plain import counted

if TYPE_CHECKING:
    from rich.table import Table

    from emailrl.plan import Plan
    from emailrl.plan.cluster import Split

Gpu = Annotated[
    str | None,
    typer.Option(
        help="B200, H200, H100, A100-80, L40S, 4090, …, a name from nvidia-smi, or CPU; other GPUs as "
        "'24 GiB, 125 TFLOP/s, 0.6 TB/s'. Default: this machine."
    ),
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs per host, to train and to sample. Default: EMAILRL_NPROC.")]
MeasuredRun = Annotated[
    Path | None,
    path_option(
        "--run", help="Run to take token counts from; without --gpu also timings, without --model also the model."
    ),
]
PerTrajectory = Annotated[int | None, typer.Option(min=1, help="Tokens per trajectory, including tool results.")]
Share = Annotated[float | None, typer.Option(min=0, max=1, help="Share of those tokens that are trained.")]
Mfu = Annotated[
    float | None,
    typer.Option(min=0.001, max=1, help="Model FLOP/s utilization in training, as a share. Default: measured."),
]


@setting_options(
    "mode algorithm backend model_name engine",
    "max_steps per_device_train_batch_size num_generations max_turns max_tokens questions db allow_shared_inbox",
)
def plan(
    overrides: Overrides,
    *,
    preset: Preset = None,
    gpu: Gpu = None,
    num_gpus: Gpus = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Hosts. Default: EMAILRL_NNODES.")] = None,
    network: Annotated[float, typer.Option(min=0.1, max=100_000, help="Gbit/s between hosts.")] = 100,
    price: Annotated[float | None, typer.Option(min=0, max=1_000_000, help="Price per GPU-hour.")] = None,
    tokens_per_trajectory: PerTrajectory = None,
    trainable_share: Share = None,
    run: MeasuredRun = None,
    mfu: Mfu = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.plan import base_of, find_device, make_plan, measure_run, this_machine
    from emailrl.plan.report import plan_json
    from emailrl.settings import load_settings

    settings = load_settings(overrides, preset, trust=trust)
    _check_named(overrides)
    measured = None if run is None else measure_run(run)
    if measured is not None:
        settings = base_of(settings, measured)
    name = gpu or ("CPU" if settings.model.device == "cpu" else None)
    planned = make_plan(
        settings, this_machine() if name is None else find_device(name), num_gpus=num_gpus, nodes=nodes,
        network=network, price=price, tokens_per_trajectory=tokens_per_trajectory, trainable_share=trainable_share,
        utilization=mfu, measured=measured, here=gpu is None,
    )  # fmt: skip
    if json:
        print_json(plan_json(planned))
    else:
        _print(planned)
    if not planned.runs:
        raise typer.Exit(1)


def _check_named(overrides: Overrides) -> None:
    """Raise EmailRLError for an unreadable file on the command line; settings files may name those of a later run."""
    from emailrl.questions.load import check_exists
    from emailrl.store import database_fingerprint

    check_exists(overrides["questions"])
    if overrides["db"] is not None:
        database_fingerprint(overrides["db"])


def _print(planned: Plan) -> None:
    from rich.text import Text

    from emailrl.plan import duration

    console = result_console()
    console.print(_table(planned))
    if planned.ways:
        console.print(Text("To make it fit", style="bold"))
    for way in planned.ways:
        console.print(Text(f"  {way.text}: {way.peak / 2**30:.1f} GiB, {duration(way.run_seconds)}"), soft_wrap=True)
    for note in planned.notes:
        console.print(Text(f"Note: {note}", style="dim"))
    console.print(Text(planned.verdict, style="bold green" if planned.runs else "bold red"), soft_wrap=True)


def _table(planned: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    from emailrl.plain import one_line

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    sections = [("Memory, GiB", _memory(planned)), ("Tokens", _tokens(planned))]
    if planned.fits:
        sections.append(("Time and cost", _time(planned)))
    for title, rows in sections:
        table.add_row(Text(title, style="bold"))
        for name, value, remark in rows:
            table.add_row(f"  {name}", value, Text(one_line(remark), style="dim"))
    return table


Row = tuple[str, str, str]


def _memory(planned: Plan) -> list[Row]:
    memory, shape, gib = planned.memory, planned.shape, 2**30
    remarks = {
        "weights": f"{planned.settings.model.name}, {shape.parameters / 1e9:.2f} billion parameters",
        "adapter": f"rank {memory.layout.rank}: weights and gradients",
        "activations": f"{memory.micro_batch_tokens:,} tokens; {memory.layout.layers} layers keep {_KEPT[memory.keep]}",
        "gathered": "the layer at work and the next one; the embeddings",
        "backward pass": "temporary tensors of one layer or of the vocabulary projection",
        "heap": "freed blocks held by glibc; MALLOC_MMAP_THRESHOLD_=65536 returns them",
        "KV cache": f"{shape.cache_bytes(memory.layout.itemsize):,} bytes per token",
        "vLLM": "" if memory.cache_tokens is None else f"room for {memory.cache_tokens:,} tokens in its cache",
    }
    rows = [(name, f"{size / gib:.2f}", remarks.get(name, "")) for name, size in memory.resident.items()]
    for phase, parts, peak in (
        ("sampling", memory.sampling, memory.sampling_peak),
        ("training", memory.training, memory.training_peak),
    ):
        rows += [(f"{name} ({phase})", f"{size / gib:.2f}", remarks.get(name, "")) for name, size in parts.items()]
        remarks["vLLM"] = "asleep" if planned.memory.vllm_sleeps else "awake"
        rows.append((f"peak while {phase}", f"{peak / gib:.2f}", ""))
    usable = f"{planned.device.name}, {memory.usable / gib:.1f} usable"
    return [*rows, ("device", f"{planned.device.gib:.2f}", usable)]


_KEPT = ("only their input", "their input and the attention output", "all but the MLP's gate and up", "everything")


def _tokens(planned: Plan) -> list[Row]:
    tokens = planned.tokens
    trained = f"{counted(tokens.trajectories, 'trajectory')}, {tokens.trainable_share:.0%} of their tokens trained"
    return [
        ("per trajectory", f"{tokens.per_trajectory:,}", f"{tokens.source}; at most {tokens.most_per_trajectory:,}"),
        ("per step", f"{tokens.per_step:,}", trained),
        (
            "whole run",
            f"{tokens.per_step * tokens.steps:,}",
            f"{counted(tokens.steps, 'step')}, {tokens.epochs:.2g} epochs of {counted(tokens.questions, 'question')}",
        ),
    ]


def _time(planned: Plan) -> list[Row]:
    seconds, tokens, split = planned.seconds, planned.tokens, planned.split
    order, loading = _sampling_remarks(planned)
    evaluations = f"{counted(tokens.evaluations, 'evaluation')} of {counted(tokens.eval_trajectories, 'trajectory')}"
    if confirmed := round(tokens.confirmed * tokens.eval_trajectories):
        evaluations += f"; {confirmed:,} more at the end"
    reached = f"{seconds.utilization:.0%} of {planned.device.tflops:,.1f} TFLOP/s"
    gradients = "" if split is None else f"adapter gradients of {counted(split.trainers, 'rank')}"
    phases = [
        ("sampling per step", seconds.rollout, order),
        ("new adapter per step", seconds.handover, loading),
        ("scoring per step", seconds.score, "log-probabilities without gradients"),
        ("training per step", seconds.train, reached),
        ("gathering per step", seconds.gather, "of the sharded base, not hidden by computation"),
        ("all-reduce per step", seconds.reduce, gradients),
        ("step", seconds.step, f"{planned.tokens_per_second:,.0f} tokens/s"),
        ("per evaluation", seconds.evaluation, evaluations),
    ]
    rows = [(name, f"{value:,.{1 if value >= 0.05 else 2}f} s", remark) for name, value, remark in phases if value]
    basis = _shares(planned)
    if planned.measured is not None:
        measured = planned.measured.seconds
        each = ", ".join(f"{name} {value:.1f}" for name, value in measured.items() if name != "total")
        rows.append(("measured per step", f"{measured['total']:,.1f} s", each))
        basis = "as measured"
    return [*_gpus(split), *rows, *_ending(planned, basis)]


def _gpus(split: Split | None) -> list[Row]:
    """What several GPUs are used for."""
    if split is None:
        return []
    each = f"{counted(split.tensor_parallel, 'GPU')}{' each' if split.servers > 1 else ''}"
    name, where = ("engines", "in the trainers' processes") if split.shared else ("servers", "emailrl serve")
    sharded = "" if split.memory.cards == 1 else f", the base sharded over {split.memory.cards}"
    return [
        ("trainers", f"{split.trainers:,}", f"emailrl train{sharded}"),
        (name, f"{split.servers:,}", f"{where}, {each}"),
    ]


def _sampling_remarks(planned: Plan) -> tuple[str, str]:
    """How rollouts are sampled, and what a new adapter takes time for."""
    from emailrl.engines import vllm_in_process

    if planned.seconds.overlaps:
        order, loading = "while the previous step trains", "saving it; the servers load it during the next update"
    elif vllm_in_process(planned.settings):
        order, loading = "then training", "saving it, loading it into vLLM"
        loading += "; vLLM wakes and sleeps" if planned.memory.vllm_sleeps else ""
    else:
        order, loading = "then training", "loading it into the servers"
    if planned.split is None:
        engine = planned.settings.agent.engine.replace("auto", "transformers")
        at_once = min(planned.memory.at_once, planned.tokens.trajectories)
        order = f"{engine}, {counted(at_once, 'concurrent trajectory')}"
    return order, loading


def _ending(planned: Plan, basis: str) -> list[Row]:
    from emailrl.plan import duration

    rows = [("whole run", duration(planned.run_seconds), basis)]
    if planned.cost is not None:
        gpus = counted(planned.fabric.gpus, "GPU")
        rows.append(("cost", f"{planned.cost:,.2f}", f"{gpus} at {planned.price:g} per GPU-hour"))
    return rows


def _shares(planned: Plan) -> str:
    """The run's time, by phase; none if phases overlap."""
    seconds = planned.seconds
    if seconds.overlaps:
        return ""
    parts = {
        "sampling": seconds.steps * seconds.rollout,
        "new adapters": seconds.steps * seconds.handover,
        "scoring": seconds.steps * seconds.score,
        "training": seconds.steps * (seconds.train + seconds.gather + seconds.reduce),
        "evaluation": seconds.evaluating,
    }
    return ", ".join(f"{name} {part / seconds.run:.0%}" for name, part in parts.items() if part)
