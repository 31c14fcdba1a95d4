"""The small model's evidence, unattended: several runs on each GPU, and their results packed to be taken away.

    python tests/gpu/small_evidence.py run data/small --work work --base FOLDER --seconds 960 \\
        --plan 0:long:1,2,3 1:short:1,2,3:sft_steps=150
    python tests/gpu/small_evidence.py collect work --out OUT --wait 540

``run`` plays the plan: each entry is GPU:NAME:SEEDS[:SETTING=VALUE,…], a ``small_model.py`` with these seeds side by
side on that GPU, in the folder NAME. Training stops ``--reserve`` seconds before the end, and the benchmarks follow.
Killed and started again with the same words, it goes on for what is left of its time.

``collect`` writes ``table.txt`` and ``results.tar.xz`` into OUT and prints the table: metrics, evaluations, benchmarks
with trajectories, logs, failures by class, and of the three best runs the adapter and the one it started from.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import records
from small_model import RUN, SFT, settings_text

HERE = Path(__file__).parent
NOTED = (".json", ".jsonl", ".csv", ".log", ".toml", ".md")
LEFT = {"training", "policy", "in_flight.jsonl", "warm.jsonl", "tokenizer.json"}


@dataclass(frozen=True)
class Entry:
    gpu: str
    name: str
    seeds: list[str]
    changes: list[str]

    @classmethod
    def read(cls, text: str) -> Entry:
        gpu, name, seeds, *changes = text.split(":")
        return cls(gpu, name, seeds.split(","), changes[0].split(",") if changes else [])


def run(options: argparse.Namespace) -> None:
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    end = work / "end"
    if not end.exists():
        end.write_text(str(time.time() + options.seconds))
    left = float(end.read_text()) - time.time()
    entries = [Entry.read(text) for text in options.plan]
    processes = []
    for number, entry in enumerate(entries):
        command = [
            sys.executable, HERE / "small_model.py", options.data, "--work", work / entry.name, "--base", options.base,
            "--seeds", *entry.seeds, "--stages", *options.stages, "--seconds", left,
            "--train-until", left - options.reserve, "--stagger", options.stagger,
            "--set", *options.set, *entry.changes,
        ]  # fmt: skip
        with (work / f"{entry.name}-{number}.log").open("a") as log:
            processes.append(
                subprocess.Popen([str(word) for word in command], stdout=log, stderr=log, env=_on(entry.gpu))
            )
    if options.warm:
        warm(work / "warm", options, entries[-1].gpu)
    for process in processes:
        process.wait()
    (work / "ended").touch()


def warm(folder: Path, options: argparse.Namespace, gpu: str) -> None:
    """Let vLLM compile the model while SFT has the GPUs, so that the training processes find its cache filled."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "emailrl.toml").write_text(settings_text(options.base, options.data, "0", options.set))
    command = [sys.executable, "-m", "emailrl", "rollout", "--limit", "1", "--num-generations", "1"]
    with (folder / "warm.log").open("a") as log:
        subprocess.run([*command, "--out", "warm.jsonl"], cwd=folder, stdout=log, stderr=log, env=_on(gpu), check=False)


def _on(gpu: str) -> dict[str, str]:
    return os.environ | {"CUDA_VISIBLE_DEVICES": gpu}


@dataclass
class Run:
    """One seed's folder and what it has come to."""

    folder: Path

    def __post_init__(self) -> None:
        self.sft = records(self.folder / SFT / "metrics.jsonl")
        self.steps = records(self.folder / RUN / "metrics.jsonl")
        self.validated = {one["step"]: one["accuracy"] for one in records(self.folder / RUN / "evaluations.jsonl")}
        self.benchmarks = {name: report(self.folder / name) for name in ("benchmark", "second")}

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}-{self.folder.name.removeprefix('seed-')}"

    @property
    def best(self) -> float:
        """The best accuracy in validation, by which runs are ranked: no test question chooses an adapter."""
        return max(self.validated.values(), default=0.0)

    def row(self) -> str:
        losses = [one["val_loss"] for one in self.sft if one.get("val_loss") is not None]
        sampled = [one["accuracy"] for one in self.steps if one["accuracy"] is not None]
        cells = [
            f"{len(self.sft)} steps, val {losses[-1]:.4f}" if losses else f"{len(self.sft)} steps",
            f"{len(self.steps)} steps, sampled {_mean(sampled[:3])} → {_mean(sampled[-3:])}",
            ", ".join(f"{accuracy:.1%} at {step}" for step, accuracy in sorted(self.validated.items())) or "–",
            *(compared(found) for found in self.benchmarks.values()),
        ]
        return f"| {self.name} | " + " | ".join(cells) + " |"


def report(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else {}


def compared(found: dict[str, Any]) -> str:
    """Accuracies in the benchmark's order, with intervals, and the paired test's p."""
    shown = [
        f"{r['accuracy']:.1%} ({r['accuracy_low']:.1%}–{r['accuracy_high']:.1%})" for r in found.get("results", [])
    ]
    tests = [f", p = {one['p_value']:.2g}" for one in found.get("comparisons", [])]
    return " → ".join(shown) + "".join(tests) or "–"


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1%}" if values else "–"


def table(runs: Iterable[Run]) -> str:
    head = "| run | SFT | RL | validation, greedy | test: SFT → RL | second table: SFT → RL |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(one.row() for one in runs)]) + "\n"


def collect(options: argparse.Namespace) -> None:
    work, out = options.work, options.out
    runs = sorted((Run(folder) for folder in work.glob("*/seed-*")), key=lambda one: one.best, reverse=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.txt").write_text(shown := table(runs))
    for path in (path for one in runs for path in one.folder.glob("*/trajectories/*.jsonl")):
        target = path.parents[1] / f"failures-{path.stem}.md"
        if (path.parents[1] / "results.json").exists() and not target.exists():
            subprocess.run([sys.executable, HERE / "small_failures.py", path, "--out", target], check=False)
    best = [one.folder / part / "best_model" for one in runs[:3] for part in (RUN, SFT)]
    taken = {path for folder in best for path in folder.glob("adapter_*")}
    with tarfile.open(out / "results.tar.xz", "w:xz", preset=1) as tar:
        for path in sorted(work.rglob("*")):
            inside = set(path.relative_to(work).parts)
            rollouts = "trajectories" in inside and "outputs" in inside
            if path in taken or (path.suffix in NOTED and not rollouts and not inside & LEFT):
                tar.add(path, path.relative_to(work))
    print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    play = commands.add_parser("run")
    play.add_argument("data", type=Path, help="folder with mail.db, questions.jsonl and second.jsonl")
    play.add_argument("--work", type=Path, required=True)
    play.add_argument("--base", type=Path, required=True, help="folder with SmolLM2-135M-Instruct, as SMOL_BASE")
    play.add_argument("--plan", nargs="+", required=True, metavar="GPU:NAME:SEEDS[:SETTING=VALUE,…]")
    play.add_argument("--seconds", type=float, default=960)
    play.add_argument("--reserve", type=float, default=240, help="of them, for the benchmarks")
    play.add_argument("--stagger", type=float, default=8)
    play.add_argument("--stages", nargs="+", default=["sft", "train", "benchmark", "second"])
    play.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of every run")
    play.add_argument("--no-warm", dest="warm", action="store_false", help="do not fill vLLM's cache beforehand")
    play.set_defaults(act=run)
    gather = commands.add_parser("collect")
    gather.add_argument("work", type=Path)
    gather.add_argument("--out", type=Path, required=True)
    gather.set_defaults(act=collect)
    options = parser.parse_args()
    options.act(options)


if __name__ == "__main__":
    main()
