"""The steps that ``bench_async`` recorded, and its table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Step = dict[str, Any]
"""A line of metrics.jsonl."""
ONE, TURNS = "one", "turns"
"""The runs with vLLM in process, on one GPU and on several."""
RECORD = "bench_async-"
"""How the files with the steps of a run begin."""


def recorded(work: Path) -> dict[str, list[Step]]:
    """The steps of the runs in a folder, by name."""
    files = sorted(work.glob(f"{RECORD}*.json"))
    return {file.stem.removeprefix(RECORD): json.loads(file.read_text()) for file in files}


def counted(steps: Sequence[Step], lag: int) -> Sequence[Step]:
    """The steps whose time counts: compiled, and with the rollouts of ``lag`` later steps beside their own."""
    return steps[2 : len(steps) - lag]


def seconds(steps: Sequence[Step], name: str) -> float:
    """Mean seconds of a phase, 0 where a run has none; of ``step``, the total without evaluation."""
    if name == "step":
        return seconds(steps, "total") - seconds(steps, "evaluation")
    return statistics.fmean(step["seconds"].get(name, 0.0) for step in steps)


def mean(steps: Sequence[Step], name: str) -> float:
    """Of a metric over the steps that have it."""
    values = [step[name] for step in steps if step.get(name) is not None]
    return statistics.fmean(values) if values else float("nan")


def table(runs: dict[str, list[Step]]) -> None:
    """One line a run with steps that count, then how the step times compare."""
    names = ("step", "rollout", "update", "trainer_wait", "sampler_wait", "handover", "adapter_load")
    print(f"{'S':>5} steps", *(f"{name:>12}" for name in names), "   age  ratio min   max    cut   reward")
    found = {}
    for name, steps in runs.items():
        if not (these := counted(steps, int(name) if name.isdigit() else 0)):
            print(f"{name:>5} {0:>5} of {len(steps)} count")
            continue
        found[name] = {phase: seconds(these, phase) for phase in names}
        extremes = (min(s.get("correction_min", 1) for s in steps), max(s.get("correction_max", 1) for s in steps))
        print(
            f"{name:>5} {len(these):>5}", *(f"{found[name][phase]:>12.2f}" for phase in names),
            f"{mean(steps, 'policy_age_mean'):>6.2f} {extremes[0]:>10.3f} {extremes[1]:>5.2f}"
            f" {mean(steps, 'correction_cut_fraction'):>6.4f} {mean(steps[2:], 'reward_mean'):>8.3f}",
        )  # fmt: skip
    for lag in [name for name in found if name not in ("0", ONE, TURNS)]:
        if turns := found.get("0"):
            expected = (turns["rollout"] + turns["update"]) / max(turns["rollout"], turns["update"])
            speed = turns["step"] / found[lag]["step"]
            print(f"S={lag}: {speed:.2f} x taking turns; expected by its clocks {expected:.2f} x", end="; ")
            print(f"{speed / expected:.2f} of that")
        for name, what in ((ONE, "one GPU"), (TURNS, "the GPUs in turns")):
            if name in found:
                print(f"S={lag}: {found[name]['step'] / found[lag]['step']:.2f} x {what}")
