"""Estimate the memory, tokens, time and cost of a run, and suggest changes if it does not fit.

Reads the same settings and questions as train; of the model only config.json, and not even that for common Qwen models.
With several GPUs (--num-gpus, --nnodes) it divides them into trainers and vLLM servers and estimates tokens per second;
with --engine vllm and no VLLM_URLS, all train and sample in turn. Without these options it plans the ranks that train
starts, EMAILRL_NPROC on each of EMAILRL_NNODES hosts; without --gpu, for this machine, whose missing packages it also
reports. Exits 1 if the run does not fit or cannot start.

Examples:

\b
  emailrl plan --preset recommended --gpu H200 --price 3.5
  emailrl plan --gpu H100 --num-gpus 8 --nnodes 16 --network 400
  emailrl plan --run outputs/grpo_masked --max-steps 400
  emailrl plan --model nano --gpu CPU --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from emailrl.base.plain import counted, duration, one_line
from emailrl.cli.options import Json, Overrides, Preset, Trust, path_option, setting_options
from emailrl.cli.output import print_json, result_console
from emailrl.settings import load_settings

if TYPE_CHECKING:
    from emailrl.plan import Plan

GIB = 2**30
Row = tuple[str, str, str]
_KEPT = ("only their input", "their input and the attention output", "all but the MLP's gate and up", "everything")


@setting_options(
    "mode algorithm backend model_name engine",
    "max_steps per_device_train_batch_size num_generations max_turns max_tokens questions db allow_shared_inbox",
)
def plan(
    *,
    overrides: Overrides,
    preset: Preset = None,
    gpu: Annotated[
        str | None,
        Option(
            help="B200, H200, H100, A100-80, L40S, 4090, …, a name from nvidia-smi, or CPU; other GPUs as "
            "'24 GiB, 125 TFLOP/s, 0.6 TB/s'. Default: this machine."
        ),
    ] = None,
    num_gpus: Annotated[int | None, Option(min=1, help="GPUs per host, samplers too. Default: EMAILRL_NPROC.")] = None,
    nnodes: Annotated[int | None, Option(min=1, help="Hosts. Default: EMAILRL_NNODES.")] = None,
    network: Annotated[float, Option(min=0.1, max=100_000, help="Gbit/s between hosts.")] = 100,
    price: Annotated[float | None, Option(min=0, max=1_000_000, help="Price per GPU-hour.")] = None,
    tokens_per_trajectory: Annotated[int | None, Option(min=1, help="Tokens per trajectory, tool results too.")] = None,
    trainable_share: Annotated[float | None, Option(min=0, max=1, help="Share of them that is trained.")] = None,
    run: Annotated[
        Path | None,
        path_option(help="Run to take token counts from; without --gpu also timings, without --model also the model."),
    ] = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    from emailrl.mail import database_fingerprint
    from emailrl.plan import Known, find_device, make_plan, measure_run, this_machine
    from emailrl.questions.load import check_exists

    settings = load_settings(overrides, preset, trust=trust)
    check_exists(overrides["questions"])  # settings files may name those of a later run
    if overrides["db"] is not None:
        database_fingerprint(overrides["db"])
    measured = None if run is None else measure_run(run)
    name = gpu or ("CPU" if settings.model.device == "cpu" else None)
    device = this_machine() if name is None else find_device(name)
    known = Known(tokens_per_trajectory, trainable_share, measured)
    planned = make_plan(
        settings, device, num_gpus=num_gpus, nodes=nnodes, network=network, price=price, known=known, here=gpu is None
    )
    if json:
        print_json(_json(planned))
    else:
        _print(planned)
    if not planned.runs:
        raise typer.Exit(1)


def _print(planned: Plan) -> None:
    from rich.table import Column, Table

    table = Table.grid("", Column(justify="right"), Column(overflow="fold", style="dim"), padding=(0, 2))
    sections = {"Memory, GiB": _memory, "Tokens": _tokens} | ({"Time and cost": _time} if planned.fits else {})
    for title, rows in sections.items():
        table.add_row(title, style="bold")
        for name, value, remark in rows(planned):
            table.add_row(f"  {name}", value, one_line(remark))
    console = result_console()
    console.print(table)
    if planned.ways:
        console.print("To make it fit", style="bold")
    for way in planned.ways:
        console.print(f"  {way.text}: {way.peak / GIB:.1f} GiB, {duration(way.run_seconds)}", soft_wrap=True)
    for note in planned.notes:
        console.print(f"Note: {note}", style="dim")
    console.print(planned.verdict, style="bold green" if planned.runs else "bold red", soft_wrap=True)


def _memory(planned: Plan) -> list[Row]:
    memory, shape, device = planned.memory, planned.job.shape, planned.job.cluster.device
    remarks = {
        "weights": f"{planned.job.settings.model.name}, {shape.parameters / 1e9:.2f} billion parameters",
        "adapter": f"rank {memory.layout.rank}: weights and gradients",
        "activations": f"{memory.micro_batch_tokens:,} tokens; {memory.layout.layers} layers keep {_KEPT[memory.keep]}",
        "gathered": "the layer at work and the next one; the embeddings",
        "backward pass": "temporary tensors of one layer or of the vocabulary projection",
        "heap": "freed blocks held by glibc; MALLOC_MMAP_THRESHOLD_=65536 returns them",
        "KV cache": f"{shape.cache_bytes(memory.layout.itemsize):,} bytes per token",
        "vLLM": "" if memory.cache_tokens is None else f"room for {memory.cache_tokens:,} tokens in its cache",
    }
    rows = [(name, f"{size / GIB:.2f}", remarks.get(name, "")) for name, size in memory.resident.items()]
    for phase, parts, peak in (
        ("sampling", memory.sampling, memory.sampling_peak),
        ("training", memory.training, memory.training_peak),
    ):
        rows += [(f"{name} ({phase})", f"{size / GIB:.2f}", remarks.get(name, "")) for name, size in parts.items()]
        remarks["vLLM"] = "asleep" if memory.vllm_sleeps else "awake"
        rows.append((f"peak while {phase}", f"{peak / GIB:.2f}", ""))
    return [*rows, ("device", f"{device.gib:.2f}", f"{device.name}, {memory.usable / GIB:.1f} usable")]


def _tokens(planned: Plan) -> list[Row]:
    tokens = planned.tokens
    trained = f"{counted(tokens.trajectories, 'trajectory')}, {tokens.trainable_share:.0%} of their tokens trained"
    passes = f"{tokens.epochs:.2g} epochs of {counted(tokens.questions, 'question')}"
    return [
        ("per trajectory", f"{tokens.per_trajectory:,}", f"{tokens.source}; at most {tokens.most_per_trajectory:,}"),
        ("per step", f"{tokens.per_step:,}", trained),
        ("whole run", f"{tokens.per_step * tokens.steps:,}", f"{counted(tokens.steps, 'step')}, {passes}"),
    ]


def _time(planned: Plan) -> list[Row]:
    use, tokens, split, settings = planned.use, planned.tokens, planned.split, planned.job.settings
    cluster = planned.job.cluster
    order, loading = "then training", "loading it into the servers"
    if use.overlaps:
        order, loading = "while the previous step trains", "saving it; the servers load it during the next update"
    elif settings.vllm_in_process:
        loading = "saving it, loading it into vLLM" + "; vLLM wakes and sleeps" * planned.memory.vllm_sleeps
    if split is None:
        at_once = min(planned.memory.at_once, tokens.trajectories)
        engine = settings.agent.engine.replace("auto", "transformers")
        order = f"{engine}, {counted(at_once, 'concurrent trajectory')}"
    evaluations = f"{counted(tokens.evaluations, 'evaluation')} of {counted(tokens.eval_trajectories, 'trajectory')}"
    if confirmed := round(tokens.confirmed * tokens.eval_trajectories):
        evaluations += f"; {confirmed:,} more at the end"
    reached = f"{use.utilization:.0%} of {cluster.device.tflops:,.1f} TFLOP/s"
    gradients = "" if split is None else f"adapter gradients of {counted(split.trainers, 'rank')}"
    phases = [
        ("sampling per step", use.rollout, order),
        ("new adapter per step", use.handover, loading),
        ("scoring per step", use.score, "log-probabilities without gradients"),
        ("training per step", use.train, reached),
        ("gathering per step", use.gather, "of the sharded base, not hidden by computation"),
        ("all-reduce per step", use.reduce, gradients),
        ("step", use.step, f"{planned.tokens_per_second:,.0f} tokens/s"),
        ("per evaluation", use.evaluation, evaluations),
    ]
    rows: list[Row] = []
    if split is not None:  # what several GPUs are used for
        each = f"{counted(split.tensor_parallel, 'GPU')}{' each' if split.servers > 1 else ''}"
        name, where = ("engines", "in the trainers' processes") if split.shared else ("servers", "emailrl serve")
        sharded = "" if split.memory.cards == 1 else f", the base sharded over {split.memory.cards}"
        rows.append(("trainers", f"{split.trainers:,}", f"emailrl train{sharded}"))
        rows.append((name, f"{split.servers:,}", f"{where}, {each}"))
    rows += [(name, f"{value:,.{1 if value >= 0.05 else 2}f} s", remark) for name, value, remark in phases if value]
    shares = {  # of the run's time; none if phases overlap
        "sampling": use.rollout,
        "new adapters": use.handover,
        "scoring": use.score,
        "training": use.train + use.gather + use.reduce,
        "evaluation": use.evaluating / use.tokens.steps,
    }
    whole = sum(shares.values())
    basis = "" if use.overlaps else ", ".join(f"{name} {part / whole:.0%}" for name, part in shares.items() if part)
    if planned.measured is not None:
        measured = planned.measured.seconds
        each = ", ".join(f"{name} {value:.1f}" for name, value in measured.items() if name != "total")
        rows.append(("measured per step", f"{measured['total']:,.1f} s", each))
        basis = "as measured"
    rows.append(("whole run", duration(planned.run_seconds), basis))
    if planned.cost is not None:
        priced = f"{counted(cluster.gpus, 'GPU')} at {planned.price:g} per GPU-hour"
        rows.append(("cost", f"{planned.cost:,.2f}", priced))
    return rows


def _json(planned: Plan) -> dict[str, Any]:
    """What the plan's parts hold, under their own names: memory in bytes, times in seconds."""
    job, memory = planned.job, planned.memory
    lora, device = job.settings.lora, job.cluster.device
    lists = {name: [each._asdict() for each in getattr(planned, name)] for name in ("obstacles", "ways", "faster")}
    split, other = planned.split, planned.alternative
    return {
        **_told(planned, "job", "worst", "use"),
        **lists,
        "model": {
            "name": job.settings.model.name,
            "parameters": job.shape.parameters,
            "lora_parameters": job.shape.lora_parameters(lora.lora_rank, lora.target_modules),
        },
        "device": {"name": device.name, "gib": device.gib, "num_gpus": job.cluster.gpus},
        "memory": _told(memory) | {"keep": memory.keep.name.lower(), "worst": _told(planned.worst, "layout", "keep")},
        "tokens": _told(planned.tokens),
        "seconds": _told(planned.use, "memory", "tokens"),
        "split": split and _told(split, "memory", "tokens") | {"sharded_over": split.memory.cards},
        "alternative": other and _told(other, "memory", "tokens") | {"sharded_over": other.memory.cards},
    }


def _told(whole: Any, *but: str) -> dict[str, Any]:
    """A dataclass's fields and properties by name, without those named."""
    properties = (name for name, kind in vars(type(whole)).items() if isinstance(kind, property))
    return {name: getattr(whole, name) for name in (*whole.__slots__, *properties) if name not in but}
