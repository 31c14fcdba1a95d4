"""The records of ``bench_grpo_step`` as tables and as a picture."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Batch = tuple[float, int, int]
"""See ``step_timeline.Batch``."""
PHASES = {
    "wake": "wake vLLM",
    "adapter": "adapter: save, load, prove",
    "sampling": "sampling",
    "reward": "reward",
    "sleep": "vLLM to sleep",
    "scoring": "reference log-probs",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "records": "records",
    "start": "vLLM start",
    "other": "other",
}
"""In the order of a step; ``start`` comes in the first one only."""
ORDER = {phase: place for place, phase in enumerate(PHASES)}
COLOURS = dict(zip(PHASES, ["tab:olive", "tab:purple", "tab:blue", "tab:cyan", "gold", "tab:green", "tab:orange",
                            "tab:red", "tab:brown", "tab:pink", "black", "lightgray"], strict=True))  # fmt: skip
SAMPLING = {
    "prompts": "engine steps that read prompts",
    "tokens": "engine steps that only sample",
    "engine": "engine, outside its steps",
    "mailbox": "mailbox (open, search, read)",
    "template": "chat template and tokenizer",
    "bookkeeping": "rollout's bookkeeping, audit",
}
SIZES = (128, 512, 1024, 2048, 1_000_000)
"""Upper ends of the classes of batches that read prompts, in tokens; vLLM captures graphs of up to 128 by default."""


def counted(records: Sequence[Record]) -> list[Record]:
    """The steps that count."""
    return [record for record in records if record["kind"] == "step" and record["counts"]]


def the(records: Sequence[Record], kind: str) -> Record | None:
    """The last record of a kind."""
    return next((record for record in reversed(records) if record["kind"] == kind), None)


def by_phase(own: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, in the order of a step; they add up to what ``own`` adds up to. KeyError for an unknown one."""
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in own.items():
        sums[name.partition("/")[0]] += seconds
    return {phase: sums[phase] for phase in sorted(sums, key=ORDER.__getitem__)}


def part_of(own: Mapping[str, float], phase: str) -> dict[str, float]:
    """Seconds of one phase by part."""
    return {name.partition("/")[2]: seconds for name, seconds in own.items() if name.partition("/")[0] == phase}


def named(sampling: Mapping[str, float]) -> dict[str, float]:
    """The parts of sampling by the names that are shown; an engine without steps of its own is all of it."""
    names = SAMPLING if "tokens" in sampling else SAMPLING | {"engine": "engine"}
    return {names.get(part, part): seconds for part, seconds in sampling.items()}


def mean_of(dicts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each entry, a missing one counting as 0."""
    names = dict.fromkeys(name for one in dicts for name in one)
    return {name: statistics.mean(one.get(name, 0.0) for one in dicts) for name in names}


# -- tables


def tables(records: Sequence[Record]) -> str:
    """All that was measured, as Markdown."""
    run, steps = the(records, "run"), counted(records)
    lines = [] if run is None else [run_line(run), ""]
    every = [record for record in records if record["kind"] == "step"]
    if not steps:
        return "\n".join([*lines, f"No step counts; {len(every)} ran.", *(str(one["own"]) for one in every)])
    lines += [batch_lines(step) for step in every]
    mean, whole = mean_of([by_phase(step["own"]) for step in steps]), statistics.mean(one["seconds"] for one in steps)
    numbers = [f"step {step['number']}{'' if step['counts'] else ' (warm-up)'}" for step in every]
    lines += ["", f"| phase | seconds | share | {' | '.join(numbers)} |", "|---" * (3 + len(every)) + "|"]
    for phase, name in PHASES.items():
        cells = [f"{by_phase(step['own']).get(phase, 0):.2f}" for step in every]
        if any(float(cell) for cell in cells) or phase in mean:
            seconds = mean.get(phase, 0.0)
            lines.append(f"| {name} | {seconds:.2f} | {seconds / whole:.1%} | {' | '.join(cells)} |")
    cells = [f"{step['seconds']:.2f}" for step in every]
    lines += [f"| **all** | {whole:.2f} | {sum(mean.values()) / whole:.1%} | {' | '.join(cells)} |", ""]
    for phase in ("adapter", "sampling"):
        lines += parts_table(phase, named(mean_of([part_of(step["own"], phase) for step in steps])))
    lines += [checked(steps), "", *batches_table([batch for step in steps for batch in step["batches"]])]
    if (batch := the(records, "micro_batch")) is not None:
        lines += micro_batch_lines(batch)
    return "\n".join(lines)


def run_line(run: Record) -> str:
    """What was run, on one line."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    startup = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run["startup"].items())
    settings = ", ".join([*(f"{name} {value}" for name, value in run["settings"].items()), *run["set"]])
    return f"{run['shape']}, {run['engine']}, {run['device']}, {run['date']}; {versions}; {startup}; {settings}"


def batch_lines(step: Record) -> str:
    """What a step was made of, on one line."""
    batch, memory = step["batch"], ", ".join(f"{name} {gib:.1f} GiB" for name, gib in step["memory"].items())
    trained = batch["trained_tokens"] / batch["tokens"]
    gap = "" if batch["proof_gap"] is None else f", proof {batch['proof_gap']:.3f} nats off"
    return (
        f"step {step['number']}: {batch['trajectories']} trajectories of {batch['shortest']:,} to {batch['longest']:,} "
        f"tokens (mean {batch['mean']:,.0f}), {batch['tokens']:,} trained on ({batch['computed_tokens']:,} computed), "
        f"{trained:.1%} of them trained, "
        f"{batch['turns']} turns, {batch['sampled_tokens']:,} sampled; {batch['broken']} broken, "
        f"{batch['micro_batches']} micro-batches ({batch['halved']} halved), kept {batch['kept']}; "
        f"vLLM {batch['vllm_version']} {batch['vllm']}{gap}; {memory}"
    )


def parts_table(title: str, parts: Mapping[str, float]) -> list[str]:
    """Lines of a table of seconds and shares, most first."""
    whole = sum(parts.values()) or 1.0
    lines = [f"| {title} | seconds | share |", "|---|---|---|"]
    for name, seconds in sorted(parts.items(), key=lambda one: -one[1]):
        lines.append(f"| {name} | {seconds:.3f} | {seconds / whole:.1%} |")
    return [*lines, ""]


def batches_table(batches: Sequence[Batch]) -> list[str]:
    """vLLM's batches by what they held and what ran before them; none with another engine."""
    kinds: dict[str, list[Batch]] = {}
    sampled_before = False
    for seconds, rows, tokens in batches:
        if tokens == rows:
            kind = "samples only, as the one before" if sampled_before else "samples only, after prompts"
        else:
            kind = next(f"prompts, at most {most:,} tokens" for most in SIZES if tokens <= most)
        kinds.setdefault(kind, []).append((seconds, rows, tokens))
        sampled_before = tokens == rows
    lines = ["| batches of vLLM | number | seconds | median ms | rows | tokens |", "|---" * 6 + "|"]
    for kind, ones in sorted(kinds.items()):
        seconds, rows, tokens = zip(*ones, strict=True)
        middle = (
            f"{1000 * statistics.median(seconds):.1f} | {statistics.mean(rows):.0f} | {statistics.mean(tokens):,.0f}"
        )
        lines.append(f"| {kind} | {len(ones)} | {sum(seconds):.2f} | {middle} |")
    return [*lines, ""] if kinds else []


def checked(steps: Sequence[Record]) -> str:
    """The product's own seconds (metrics.jsonl) beside those of the clocks."""
    told = mean_of([step["product_seconds"] for step in steps])
    clocks = mean_of([step["whole"] for step in steps])
    ours = {"rollout": clocks["Run.collect"], "update": clocks["Run.train"]}
    pairs = ", ".join(f"{name} {told[name]:.2f} (clocks {seconds:.2f})" for name, seconds in ours.items())
    return f"metrics.jsonl: {pairs}, total {told['total']:.2f} of {statistics.mean(s['seconds'] for s in steps):.2f}"


def micro_batch_lines(batch: Record) -> list[str]:
    """The profile of a micro-batch."""
    title = (
        f"micro-batch of {batch['tokens']:,} tokens ({batch['trained_tokens']:,} trained, {batch['samples']} samples; "
        f"one of {batch['of']}), {batch['seconds']:.2f} s"
    )
    lines = parts_table(title, batch["classes"])
    lines.append(f"A checkpoint (adapter, optimizer) takes {batch['checkpoint']:.2f} s.")
    return lines + [f"    {seconds:8.4f} s  {kind:28} {name[:80]}" for kind, name, seconds in batch["most"]]


# -- the picture


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw the counted steps in time, beneath them what sampling and a micro-batch are made of."""
    from matplotlib.figure import Figure

    steps, run, batch = counted(records), the(records, "run"), the(records, "micro_batch")
    figure = Figure(figsize=(10, 5.6 + 0.5 * len(steps)), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1 + 0.5 * len(steps), 1.6])
    timeline(figure.add_subplot(grid[0, :]), steps)
    assert run is not None
    engine = {"vllm": "vLLM in process", "transformers": "the in-process engine"}[run["engine"]]
    figure.suptitle(f"A GRPO step, {run['shape']} shape, {engine}, {run['device']}", fontsize=11)
    sampling = mean_of([part_of(step["own"], "sampling") for step in steps])
    bars(
        figure.add_subplot(grid[1, 0]),
        named(sampling),
        f"Sampling, {sum(sampling.values()):.1f} s a step",
        COLOURS["sampling"],
    )
    if batch is not None:
        title = f"One of {batch['of']} micro-batches, {batch['tokens']:,} tokens, {batch['seconds']:.2f} s"
        bars(figure.add_subplot(grid[1, 1]), batch["classes"], title, COLOURS["backward"])
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


LABELS = {"sampling": {"sampling"}, "reference": {"scoring"}, "training": {"forward", "backward"}}


def timeline(axes: Any, steps: Sequence[Record]) -> None:
    """One bar a step, every phase in proportion; the legend has the mean seconds and shares of all of them."""
    from matplotlib.patches import Patch

    for row, step in enumerate(steps):
        axes.broken_barh([(0, step["seconds"])], (row - 0.3, 0.6), facecolors=COLOURS["other"])
        for name, start, end in step["spans"]:
            colour = COLOURS[name.partition("/")[0]]
            axes.broken_barh([(start, end - start)], (row - 0.3, 0.6), facecolors=colour, linewidth=0)
        for label, phases in LABELS.items():
            ends = [(start, end) for name, start, end in step["spans"] if name.partition("/")[0] in phases]
            first, last = min(start for start, _ in ends), max(end for _, end in ends)
            if last - first > 0.1 * step["seconds"]:
                axes.text((first + last) / 2, row, label, ha="center", va="center", color="white", fontsize=9)
    mean = mean_of([by_phase(step["own"]) for step in steps])
    whole = statistics.mean(step["seconds"] for step in steps)
    axes.set(xlabel="seconds", xlim=(0, max(step["seconds"] for step in steps)), ylim=(len(steps) - 0.5, -0.5))
    axes.set_yticks(range(len(steps)), [f"step {step['number']}\n{step['seconds']:.1f} s" for step in steps])
    handles = [
        Patch(color=COLOURS[phase], label=f"{PHASES[phase]}  {seconds:.1f} s · {100 * seconds / whole:.1f} %")
        for phase, seconds in mean.items()
    ]
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=8, frameon=False)
    axes.grid(axis="x", alpha=0.3)


def bars(axes: Any, parts: Mapping[str, float], title: str, colour: str) -> None:
    """Horizontal bars, the longest on top, each with seconds and share."""
    ordered = sorted(parts.items(), key=lambda one: one[1])
    whole = sum(parts.values()) or 1.0
    drawn = axes.barh([name for name, _ in ordered], [seconds for _, seconds in ordered], color=colour)
    axes.bar_label(drawn, [f"{s:.2f} s · {100 * s / whole:.1f} %" for _, s in ordered], padding=3, fontsize=8)
    axes.set(title=title, xlim=(0, 1.5 * max(parts.values())))
    axes.title.set_fontsize(10)
    axes.tick_params(labelsize=8)
