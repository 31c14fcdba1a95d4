"""Which named algorithm learns fastest on the demo worlds, with the packaged policy and one budget of steps for all.

    python tests/benchmarks/compare_algorithms.py --out compare --jobs 16
    python tests/benchmarks/compare_algorithms.py --out compare --report --figure docs/figures/algorithms.svg

The rules, and where one gave way to another:

- Every run has the same budget: `--steps` steps of `QUESTIONS` questions × `ROLLOUTS` rollouts, two optimizer updates a
  step (so that ratios differ from 1 and clipping means something), no KL to the reference, no early stop.
- Learning rate: the same search for all, `SEARCH_STEPS` steps from `SEARCH_SEED` at each of `LEARNING_RATES`, judged by
  the last accuracy on the validation worlds; of equals the lowest rate. The critic's is the policy's. (The area under
  the search's curve was the first rule; before any comparison it gave way, for it liked rates that rise and collapse.)
- The comparison: `--seeds` other seeds at the chosen rate, judged on the test worlds, which no search saw: greedy
  accuracy on `EVAL_QUESTIONS` of their questions every `EVAL_STEPS` steps. The last accuracy counts, not the best.
  The rate decays to 0 over the budget (`--schedule`); at a constant one, tried first, one run in 24 collapsed.

Runs are processes of their own with `--threads` threads. A run that ended is not done again, so that an interrupted
comparison goes on where it was; one that failed is told, and tried again by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

NAMES = ("dapo", "grpo", "dr_grpo", "gspo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo")
QUESTIONS, ROLLOUTS, MINI_BATCHES = 8, 6, 2
EVAL_STEPS, EVAL_QUESTIONS = 2, 120
LEARNING_RATES = (1e-3, 2e-3, 4e-3)
SEARCH_SEED, SEARCH_STEPS, SEARCH_EVAL_STEPS = 1000, 6, 3
DEMO_SEED = 42


@dataclass(frozen=True, slots=True)
class Spec:
    """One run: what is trained, from which seed, at which rate, for how long, judged on which split."""

    algorithm: str
    mode: str
    seed: int
    learning_rate: float
    steps: int
    eval_steps: int
    judged_on: str
    schedule: str = "constant"

    @property
    def name(self) -> str:
        """What its files are called."""
        return (
            f"{self.judged_on}-{self.algorithm}-{self.mode}-lr{self.learning_rate:g}-seed{self.seed}-steps{self.steps}"
        )

    @property
    def label(self) -> str:
        """Whose line it belongs to."""
        return self.algorithm if self.mode == "masked" else f"{self.algorithm} ({self.mode})"


def prepare(out: Path) -> None:
    """Write the demo mailbox and, for each split that judges, a question file in which its questions stand as `val`."""
    from emailrl.questions.load import questions_file, read_questions, write_demo, write_scenarios
    from emailrl.settings import DataSettings, StoreSettings

    database = out / "demo.db"
    if (out / "judged_on_test.jsonl").exists():
        return
    write_demo(database, settings=StoreSettings(), seed=DEMO_SEED, overwrite=True)

    def load(split: Any, limit: int | None) -> list[Any]:
        file = questions_file(database)
        return read_questions(file, DataSettings()).of(split, limit=limit, seed=DEMO_SEED).scenarios

    for judge in ("val", "test"):
        asked = [replace(scenario, split="val") for scenario in load(judge, EVAL_QUESTIONS)]
        write_scenarios(out / f"judged_on_{judge}.jsonl", [*load("train", None), *asked])


def train_one(spec: Spec, out: Path) -> dict[str, Any]:
    """Train one run in this process and return its record."""
    from emailrl.settings import load_settings
    from emailrl.training.algorithms import ALGORITHMS
    from emailrl.training.loop import train

    overrides = {
        "db": out / "demo.db", "questions": out / f"judged_on_{spec.judged_on}.jsonl", "eval_dataset_size": 1000,
        "model_name": "nano", "device": "cpu", "judge": "offline", "wandb_mode": "disabled",
        "max_turns": 6, "max_tokens": 96, "temperature": 1.0, "max_batch_trajectories": 128,
        "mode": spec.mode, "algorithm": spec.algorithm, "seed": spec.seed, "num_train_epochs": 1000,
        "max_steps": spec.steps, "eval_steps": spec.eval_steps, "save_steps": 10_000, "patience": 10_000,
        "per_device_train_batch_size": QUESTIONS, "num_generations": ROLLOUTS, "num_mini_batches": MINI_BATCHES,
        "learning_rate": spec.learning_rate, "lr_scheduler": spec.schedule, "warmup_steps": 1, "beta": 0.0,
        "output_dir": out / "runs" / spec.name / spec.mode,
    }  # fmt: skip
    if ALGORITHMS[spec.algorithm].has_critic:
        overrides["critic_learning_rate"] = spec.learning_rate
    settings = load_settings(overrides, cwd=out, environ={})
    # No early stop, so that every run has its whole budget: a share above 1 is never reached.
    never = settings.evaluation.model_copy(update={"target_accuracy": 2.0})
    started = time.monotonic()
    result = train(settings.model_copy(update={"evaluation": never}), overwrite=True, progress=lambda line: None)
    lines = (result.run_dir / "evaluations.jsonl").read_text().splitlines()
    kept = ("step", "accuracy", "accuracy_low", "accuracy_high")
    curve = [{name: one[name] for name in kept} for one in map(json.loads, lines)]
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(out / "runs" / spec.name)
    return asdict(spec) | {
        "label": spec.label,
        "seconds": time.monotonic() - started,
        "curve": curve,
        "num_trajectories": sum(step["num_trajectories"] for step in metrics),
        "trainable_tokens": sum(step["trainable_tokens"] for step in metrics),
    }


def collect(specs: Sequence[Spec], out: Path, jobs: int) -> list[dict[str, Any]]:
    """The records of the runs that ended, now or before; ``jobs`` 0 runs nothing. A failure is told on stderr."""
    records = {spec: out / "records" / f"{spec.name}.json" for spec in specs}
    todo = [spec for spec in specs if jobs and not records[spec].exists()]
    print(f"{len(todo)} runs, {jobs} at a time", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(max(jobs, 1), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(train_one, spec, out): spec for spec in todo}
        for future in as_completed(futures):
            spec = futures[future]
            try:
                record = future.result()
            except Exception:
                print(f"FAILED {spec.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                continue
            beside = records[spec].with_suffix(".part")
            beside.write_text(json.dumps(record) + "\n")
            beside.rename(records[spec])
            told = " ".join(f"{point['accuracy']:.0%}" for point in record["curve"])
            print(f"{spec.name}: {told} ({record['seconds']:.0f} s)", file=sys.stderr, flush=True)
    return [json.loads(path.read_text()) for path in records.values() if path.exists()]


def choose_rates(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Each label's learning rate: the highest last accuracy of the search, of equals the lowest rate."""
    best: dict[str, tuple[float, float]] = {}
    for record in records:
        mark = record["curve"][-1]["accuracy"], -record["learning_rate"]
        best[record["label"]] = max(best.get(record["label"], mark), mark)
    return {label: -rate for label, (_, rate) in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--schedule", default="linear", help="constant, linear, cosine: the rate of the comparison")
    parser.add_argument("--algorithms", nargs="+", default=list(NAMES))
    parser.add_argument("--search-only", action="store_true", help="choose the learning rates and stop")
    parser.add_argument("--report", action="store_true", help="train nothing: tell what has been trained")
    parser.add_argument("--figure", type=Path, help="draw the curves here (SVG or PNG)")
    wanted = parser.parse_args()
    out = wanted.out.absolute()
    os.environ |= {"OMP_NUM_THREADS": str(wanted.threads), "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
    (out / "records").mkdir(parents=True, exist_ok=True)
    prepare(out)
    # grpo once more with every token after the prompt trained: masked against rollout mode.
    lines = [(name, "masked") for name in wanted.algorithms] + [("grpo", "rollout")] * ("grpo" in wanted.algorithms)
    searched = [
        Spec(name, mode, SEARCH_SEED, rate, SEARCH_STEPS, SEARCH_EVAL_STEPS, "val")
        for name, mode in lines
        for rate in LEARNING_RATES
    ]
    jobs = 0 if wanted.report else wanted.jobs
    search = collect(searched, out, jobs)
    rates = choose_rates(search)
    print(json.dumps(rates), file=sys.stderr, flush=True)
    if wanted.search_only:
        return
    specs = [
        Spec(spec.algorithm, spec.mode, seed, rates[spec.label], wanted.steps, EVAL_STEPS, "test", wanted.schedule)
        for spec in searched[:: len(LEARNING_RATES)]
        for seed in wanted.seeds
        if spec.label in rates
    ]
    records = collect(specs, out, jobs)
    facts = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.processor() or platform.machine()}
    (out / "results.json").write_text(json.dumps({"facts": facts, "rates": rates, "runs": records}) + "\n")
    print(table(records))
    if wanted.figure:
        draw(records, wanted.figure)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown, a row a label: means over its seeds with lowest and highest, largest area under the curve first."""

    def spread(values: Sequence[float]) -> str:
        return f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})".replace("%", " %")

    def steps_to(curve: Sequence[dict[str, Any]], least: float) -> str:
        return next((str(point["step"]) for point in curve if point["accuracy"] >= least), "–")

    rows = []
    for label in dict.fromkeys(record["label"] for record in records):
        runs = [record for record in records if record["label"] == label]
        curves = [record["curve"] for record in runs]
        areas = [
            sum((b["accuracy"] + a["accuracy"]) / 2 * (b["step"] - a["step"]) for a, b in pairwise(curve))
            / (curve[-1]["step"] - curve[0]["step"])
            for curve in curves
        ]
        apart = sum(curve[-1]["accuracy_low"] > curve[0]["accuracy_high"] for curve in curves)
        cells = [
            f"`{label}`", f"{runs[0]['learning_rate']:g}", spread([curve[0]["accuracy"] for curve in curves]),
            spread([curve[-1]["accuracy"] for curve in curves]), f"{apart} of {len(runs)}",
            *(", ".join(steps_to(curve, least) for curve in curves) for least in (0.8, 0.9)), spread(areas),
            *(f"{statistics.mean(run[of] for run in runs):,.0f}" for of in ("num_trajectories", "trainable_tokens")),
        ]  # fmt: skip
        rows.append((statistics.mean(areas), " | ".join(cells)))
    head = "| algorithm | rate | start | final | apart | steps to 80 % | steps to 90 % | area | rollouts | tokens |"
    return "\n".join([head, "|---" * 10 + "|", *(f"| {row} |" for _, row in sorted(rows, reverse=True))])


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy over steps: left every algorithm in masked mode, right one algorithm's modes; bands span the seeds."""
    from emailrl.base.drawing import new_figure

    figure = new_figure(10, 4.2)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1])
    modal = {record["algorithm"] for record in records if record["mode"] != "masked"}
    masked = [record for record in records if record["mode"] == "masked"]
    for axes, chosen in ((left, masked), (right, [record for record in records if record["algorithm"] in modal])):
        for marker, label in zip("osD^v<>pX*", dict.fromkeys(record["label"] for record in chosen), strict=False):
            curves = [record["curve"] for record in chosen if record["label"] == label]
            at = [point["step"] for point in curves[0]]
            points = [[point["accuracy"] for point in points] for points in zip(*curves, strict=True)]
            (line,) = axes.plot(at, list(map(statistics.mean, points)), marker=marker, ms=4, label=label)
            axes.fill_between(at, list(map(min, points)), list(map(max, points)), color=line.get_color(), alpha=0.1)
        axes.set(xlabel="step", ylim=(0, 1))
        axes.legend(loc="lower right", fontsize=8)
    left.set(ylabel="answers right on held-out worlds", title="Named algorithms")
    right.set(title="Masked against rollout mode")
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
